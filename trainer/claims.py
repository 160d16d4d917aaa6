"""A published claim: a file under conf/claim that says what was claimed, and how it is tested."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from trainer.arms import PROJECT, Arm
from trainer.criteria import Criterion
from trainer.errors import UserError
from trainer.hardware import EMULATED, UNAVAILABLE, Hardware
from trainer.suggest import nearest

FOLDER = PROJECT / "conf" / "claim"
NULL = "null_arm"
NULL_SHIFT = 1000
"""What the null arm adds to a seed."""
QUIET = ("tracking=local", "checkpoint=none")
"""Overrides of every training run: what is measured has no part in tracking or saving."""
PROBE = "probe="
STAND_INS = {
    "precision=tf32": "precision=fp32",
    "precision=fp8": "precision=bf16",
    "precision.fp8_scaling=tensorwise": "",
    "precision.fp8_scaling=rowwise": "",
    "loader=pinned": "loader=plain",
}
"""What a reduced run takes where a CPU has not got the real thing."""


@dataclass
class Claim:
    """One published claim, as its YAML says it. The README shows how to write one."""

    id: str
    statement: str
    """As published."""
    source: str
    """Where it was published."""
    setups: dict[str, str]
    """Overrides by name, shared by arms: what is trained. ``probe=gemm`` names a program of trainer/probes.py."""
    arms: dict[str, str]
    """By name: a setup, then overrides of the arm's own."""
    criteria: list[Criterion]
    published: str = ""
    """The published figure, in the terms measured here."""
    needs: list[str] = field(default_factory=list)
    """Of the machine; see ``lacking``."""
    arms_need: dict[str, list[str]] = field(default_factory=dict)
    """The same for single arms: a machine without it leaves them out, with the criteria about them."""
    asks: dict[str, str] = field(default_factory=dict)
    """Overrides that the user has to type (the key), and what to give there."""
    on_cuda: dict[str, str] = field(default_factory=dict)
    """Further overrides by setup on a CUDA GPU, which takes other sizes than a CPU."""
    repeats: int = 3
    """Runs of each arm, each with a seed of its own."""
    null_arm: str = ""
    """The arm that is also run with other seeds, to show what noise looks like; criteria call that one null_arm."""
    label: str = ""
    """What the test is not: scaled down, or an analogue."""
    traps: list[str] = field(default_factory=list)
    """Known ways to read the published figure wrongly, and what was done about them."""
    reduced: dict[str, str] = field(default_factory=dict)
    """Overrides by setup for a quick run on any CPU, which decides nothing."""
    combines: list[str] = field(default_factory=list)
    """Claims whose outcomes together are this one's; then there are no arms here."""
    digest: str = ""
    """SHA-256 of the file."""

    def __post_init__(self) -> None:
        where = f"conf/claim/{self.id}.yaml"
        if not self.combines and not (self.setups and self.arms and self.criteria):
            raise UserError(f"{where} needs setups, arms and criteria")
        for name, text in self.arms.items():
            if (setup := text.split()[0]) not in self.setups:
                raise UserError(
                    f"{where}: arm {name} begins with {setup}, which is no setup ({', '.join(self.setups)})"
                )
        known = {*self.arms, *([NULL] if self.null_arm else [])}
        for key, names in (("criteria", [n for c in self.criteria for n in c.arms]), ("arms_need", self.arms_need)):
            for name in names:
                if name not in known:
                    raise UserError(f"{where}: {key} name the arm {name}, which is not there{nearest(name, known)}")
        if self.null_arm and self.null_arm not in self.arms:
            raise UserError(f"{where}: null_arm={self.null_arm} is no arm{nearest(self.null_arm, self.arms)}")
        for key, by_setup in (("reduced", self.reduced), ("on_cuda", self.on_cuda)):
            for name in by_setup:
                if name not in self.setups:
                    raise UserError(f"{where}: {key} names the setup {name}, which is not there")
        if self.repeats < 2:
            raise UserError(f"{where}: repeats={self.repeats} gives no interval; use 3")

    def lacking(self, hardware: Hardware, given: list[str]) -> list[str]:
        """Return what is missing here to run the claim, as words for the user; empty: nothing."""
        missing = [words for need in self.needs if (words := lacking(need, hardware))]
        typed = {override.partition("=")[0] for override in given}
        return missing + [f"{key}=… ({what})" for key, what in self.asks.items() if key not in typed]

    def arms_here(self, hardware: Hardware) -> list[str]:
        """Return the names of the arms that this machine can run."""
        return [name for name in self.arms if not any(lacking(need, hardware) for need in self.arms_need.get(name, ()))]

    def runs(self, names: list[str], given: list[str], device: str, memory_ledger: bool) -> list[Arm]:
        """Return the arms as command lines, the null arm last.

        Args:
            names: of the arms to run.
            given: overrides that the user typed.
            device: type of the device, ``cpu`` or ``cuda``.
            memory_ledger: measure memory by a ledger.

        """
        quiet = (*QUIET, "profiler=memory" if memory_ledger else "profiler=none")
        asked = [override for override in given if override.partition("=")[0] in self.asks]
        arms = []
        for name in names:
            setup, *own = self.arms[name].split()
            sizes = self.on_cuda.get(setup, "") if device == "cuda" else ""
            words = [*self.setups[setup].split(), *sizes.split(), *own, f"device={device}"]
            if words[0].startswith(PROBE):
                arms.append(Arm(name, (words[0].removeprefix(PROBE), *words[1:]), script="probe.py"))
            else:
                arms.append(Arm(name, (*quiet, *words, *asked)))
        if self.null_arm in names:
            base = arms[names.index(self.null_arm)]
            arms.append(Arm(NULL, base.overrides, NULL_SHIFT, base.script))
        return arms

    def reduce(self) -> None:
        """Make every arm small enough for any CPU: a test that the file works, not of the claim."""
        for name, text in self.arms.items():
            small = self.reduced.get(text.split()[0], "")
            self.arms[name] = " ".join(STAND_INS.get(word, word) for word in f"{text} {small}".split())
        self.setups = {
            name: " ".join(STAND_INS.get(word, word) for word in text.split()) for name, text in self.setups.items()
        }
        self.repeats, self.needs, self.arms_need = 1, [], {}


def lacking(need: str, hardware: Hardware) -> str:
    """Return what a need asks for, if this machine has not got it; empty otherwise.

    Raises:
        UserError: no such need.

    """
    if need.endswith("GiB") and need.removesuffix("GiB").isdigit():
        enough = hardware.memory_bytes >= int(need.removesuffix("GiB")) * 2**30
        return "" if enough else f"{need} of {'GPU ' if hardware.is_gpu else ''}memory"
    met = {
        "cuda": (hardware.is_gpu, "an NVIDIA GPU"),
        "cpu": (hardware.device.type == "cpu", "a CPU: type device=cpu"),
        "tf32": (hardware.support("tf32") != UNAVAILABLE, "TF32 (an NVIDIA GPU from Ampere on)"),
        "native_bf16": (hardware.support("bf16") not in (EMULATED, UNAVAILABLE), "bf16 in hardware"),
        "native_fp16": (hardware.support("fp16") not in (EMULATED, UNAVAILABLE), "fp16 in hardware"),
        "hopper": (hardware.is_gpu and (hardware.capability or (0, 0)) >= (9, 0), "an NVIDIA GPU from Hopper on"),
        "torchao": (find_spec("torchao") is not None, "torchao: pip install torchao"),
        "amx": ("amx_bf16" in hardware.cpu_flags, "a CPU with AMX"),
    }
    if need not in met:
        raise UserError(f"needs: {need} is not known{nearest(need, met)} ({', '.join(met)}, or memory such as 40GiB)")
    has, words = met[need]
    return "" if has else words


def names() -> list[str]:
    """Return the ids of all claims."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, folder: Path = FOLDER) -> Claim:
    """Read one claim's file.

    Raises:
        UserError: no such claim, or a file that is not one.

    """
    path = folder / f"{name}.yaml"
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in known:
        raise UserError(
            f"claim={name} is not a claim{nearest(name, known)}; python scripts/reproduce.py lists all of them"
        )
    text = path.read_bytes()
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys; see conf/claim/bignet_memory.yaml")
    known_keys = {entry.name for entry in fields(Claim)} - {"id", "digest"}
    _check_keys(content, known_keys, f"{path}")
    for key in ("statement", "source"):
        if not content.get(key):
            raise UserError(f"{path} says no {key}")
    criteria = []
    for entry in content.pop("criteria", []):
        _check_keys(entry, {f.name for f in fields(Criterion)}, f"{path}: criteria")
        criteria.append(Criterion(**entry))
    defaults: dict[str, Any] = {"setups": {}, "arms": {}}
    return Claim(id=name, criteria=criteria, digest=hashlib.sha256(text).hexdigest(), **(defaults | content))


def _check_keys(content: dict[str, Any], known: set[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise UserError(f"{where}: {key} is not a key{nearest(str(key), known)} ({', '.join(sorted(known))})")
