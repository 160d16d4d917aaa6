"""Published claims: files in evidence/claims/published with what was claimed and how it is tested."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evidence.claims.criteria import NOT_HERE, RELATED, Criterion, Finding, combine, evaluate
from evidence.measures import MEASURES, PROBE_MEASURES, TIMED
from evidence.options import CLAIMS, check_claim
from evidence.runs import Arm, Outcome
from mantissa.quality import NULL_SHIFT
from trainer.config.compose import key_of
from trainer.devices import CUDA
from trainer.errors import UserError, first_line, nearest
from trainer.hardware import EMULATED, UNAVAILABLE, Hardware
from trainer.precision.kernels import not_timed_here

NULL_ARM = "null_arm"
QUIET = ("tracking=local", "checkpoint=none", "tracking.epilogue=false")
"""Overrides of every training run: neither tracking nor saving is measured, and nobody reads a generated sample."""
PROBE = "probe="
_PRECISION = "precision="
STAND_INS = {
    "precision=tf32": "precision=fp32",
    "precision=fp8": "precision=bf16",
    "precision.fp8_scaling=tensorwise": "",
    "precision.fp8_scaling=rowwise": "",
    "loader=pinned": "loader=plain",
}
"""Replacements in a reduced run, which has to run on any CPU."""


@dataclass
class Claim:
    """One published claim: the fields but ``id`` and ``digest`` are the keys of its YAML (see docs/claims.md)."""

    id: str
    """The file's name, without ``.yaml``."""
    digest: str
    """SHA-256 of the file."""
    statement: str
    """As published."""
    source: str
    """Where it was published."""
    setups: dict[str, str] = field(default_factory=dict)
    """Overrides by name, which arms begin with. ``probe=gemm`` runs a probe of benchmarks/probe.py instead."""
    arms: dict[str, str] = field(default_factory=dict)
    """By name: a setup, then overrides of the arm's own."""
    criteria: list[Criterion] = field(default_factory=list)
    published: str = ""
    """The published figure, in the terms measured here."""
    needs: list[str] = field(default_factory=list)
    """What the machine must have: keys of ``NEEDS``, memory such as ``40GiB``, or a GPU by name such as ``A100``."""
    speaks_of: list[str] = field(default_factory=list)
    """The same for the hardware that the statement is about; elsewhere the outcome is a related measurement."""
    related: str = ""
    """Why this tests something else than the statement, on any machine: a related measurement, without a verdict."""
    arms_need: dict[str, list[str]] = field(default_factory=dict)
    """The same for single arms; on a machine without it, these arms and their criteria are left out."""
    asks: dict[str, str] = field(default_factory=dict)
    """Overrides that the user has to set: the key, and what to set it to."""
    on_cuda: dict[str, str] = field(default_factory=dict)
    """Further overrides by setup on a CUDA GPU, where other sizes fit."""
    repeats: int = 3
    """Runs of each arm, each with another seed."""
    null_arm: str = ""
    """The arm that is also run with other seeds, to show the noise; criteria call those runs ``null_arm``."""
    traps: list[str] = field(default_factory=list)
    """Known ways to misread the published figure, and how the test avoids them."""
    reduced: dict[str, str] = field(default_factory=dict)
    """Overrides by setup for a quick run on any CPU, which decides nothing."""
    combines: list[str] = field(default_factory=list)
    """Claims that measure what this one says; it has no arms and no outcome of its own then."""

    def __post_init__(self) -> None:
        """Check what the types do not: that the names in it exist, and that something decides."""
        if self.combines:
            if self.setups or self.arms or self.criteria or self.id in self.combines:
                raise UserError("combines takes other claims, and excludes setups, arms and criteria")
            return
        if bool(self.related) == any(criterion.decides for criterion in self.criteria):
            raise UserError(
                "related leaves no verdict; drop the bounds of the criteria"
                if self.related
                else "no criterion decides; give one at_least, at_most or within, or say in related: why none can"
            )
        if self.repeats < 2:
            raise UserError(f"repeats={self.repeats} gives no interval; set repeats: 3")
        for name, text in self.arms.items():
            if not re.fullmatch(r"[\w.-]+", name) or name == NULL_ARM:
                raise UserError(f"an arm cannot be called {name}; use letters, digits, - and _")
            _check_name(f"arms.{name}", text.partition(" ")[0], self.setups)
        for key in ("reduced", "on_cuda"):
            for name in getattr(self, key):
                _check_name(key, name, self.setups)
        if self.null_arm:
            _check_name("null_arm", self.null_arm, self.arms)
        for name in self.arms_need:
            _check_name("arms_need", name, self.arms)
        for need in [*self.needs, *self.speaks_of, *(need for needs in self.arms_need.values() for need in needs)]:
            _check_need(need)
        for criterion in self.criteria:
            for name in criterion.arms:
                _check_name("criteria", name, {*self.arms, *([NULL_ARM] if self.null_arm else [])})
                probe = self.words(self._base(name))[0]
                measures = PROBE_MEASURES[probe.removeprefix(PROBE)] if probe.startswith(PROBE) else MEASURES
                _check_name(f"criteria on {name}", criterion.measure, measures)

    def _base(self, name: str) -> str:
        """Return the arm whose overrides these are: of the null arm, the one that it repeats."""
        return self.null_arm if name == NULL_ARM else name

    def words(self, arm: str, on_cuda: bool = False) -> list[str]:
        """Return the overrides of an arm: its setup's, those for a GPU, its own."""
        setup, *own = self.arms[arm].split()
        return [*self.setups[setup].split(), *(self.on_cuda.get(setup, "") if on_cuda else "").split(), *own]

    def lacking(self, hardware: Hardware, given: list[str]) -> list[str]:
        """Return what this machine or the command line lacks to run the claim, in words; empty: nothing."""
        typed = set(map(key_of, given))
        asked = [f"{key}=… ({what})" for key, what in self.asks.items() if key not in typed]
        return lacking(self.needs, hardware) + asked

    def only_related(self, hardware: Hardware) -> str:
        """Return why an outcome on this machine is only a related measurement, in words; empty: it is a verdict."""
        others = lacking(self.speaks_of, hardware)
        return self.related or ("the claim speaks of " + ", ".join(others) if others else "")

    def judge(self, outcomes: list[Outcome], hardware: Hardware) -> tuple[str, list[Finding]]:
        """Return the verdict of runs on a machine, and what was found by each criterion."""
        findings = [evaluate(criterion, outcomes) for criterion in self.criteria]
        if not self.only_related(hardware):
            return combine([finding.verdict for finding in findings]), findings
        for finding in findings:
            finding.verdict = finding.verdict if finding.verdict == NOT_HERE else ""
        measured = any(finding.values for finding in findings) or not all(run.finished for run in outcomes)
        return RELATED if measured else NOT_HERE, findings

    def arms_lack(self, hardware: Hardware) -> dict[str, str]:
        """Return what this machine lacks for arms that it cannot run, by arm."""
        found = {name: "; ".join(lacking(needs, hardware)) for name, needs in self.arms_need.items()}
        return {name: words for name, words in found.items() if words}

    def mode(self, arm: str) -> str:
        """Return the precision of an arm."""
        words = reversed(self.words(arm))
        return next((word.removeprefix(_PRECISION) for word in words if word.startswith(_PRECISION)), "fp32")

    def not_timed(self, hardware: Hardware) -> dict[str, str]:
        """Return why the speed of arms that run here is not that of their format, by arm."""
        lack = self.arms_lack(hardware)
        found = {name: not_timed_here(self.mode(name), hardware) for name in self.arms if name not in lack}
        return {name: why for name, why in found.items() if why}

    def to_run(self, hardware: Hardware) -> list[str]:
        """Return the names of the arms to run here: those that a criterion needs which can be tested with the rest.

        Empty: nothing can be tested that gives an outcome.
        """
        lack, not_timed = self.arms_lack(hardware), self.not_timed(hardware)
        useful: set[str] = set()
        decided = False
        for criterion in self.criteria:
            used = set(map(self._base, criterion.arms))
            if used & {*lack, *(not_timed if criterion.measure in TIMED else ())}:
                continue
            useful |= used
            decided |= criterion.decides or bool(self.only_related(hardware))
        return [name for name in self.arms if name in useful] if decided else []

    def runs(self, names: list[str], given: list[str], device: str, memory_ledger: bool) -> list[Arm]:
        """Return the arms of these names as command lines, the null arm last; ``device`` is torch's type."""
        quiet = (*QUIET, "profiler=memory" if memory_ledger else "profiler=none")
        asked = [override for override in given if key_of(override) in self.asks]
        arms = []
        for name in names:
            words = [*self.words(name, device == CUDA.type), f"device={device}"]
            if words[0].startswith(PROBE):
                arms.append(Arm(name, (words[0].removeprefix(PROBE), *words[1:]), script="benchmarks/probe.py"))
            else:
                arms.append(Arm(name, (*quiet, *words, *asked)))
        if self.null_arm in names:
            base = arms[names.index(self.null_arm)]
            arms.append(Arm(NULL_ARM, base.overrides, NULL_SHIFT, base.script))
        return arms

    def reduce(self) -> None:
        """Make every arm small enough for any CPU: a test of the file, not of the claim.

        Raises:
            UserError: the file has no reduced size for a setup.
        """
        if missing := [name for name in self.setups if name not in self.reduced]:
            raise UserError(
                f"evidence/claims/published/{self.id}.yaml gives no reduced size for {missing[0]}; add, for example, "
                f"reduced: {{{missing[0]}: steps=3 batch_size=2 micro_batch_size=2}}"
            )
        small = {name: f"{text} {self.reduced[text.partition(' ')[0]]}" for name, text in self.arms.items()}
        self.arms, self.setups = _stand_in(small), _stand_in(self.setups)
        self.repeats, self.needs, self.arms_need = 1, [], {}


def _stand_in(texts: dict[str, str]) -> dict[str, str]:
    return {name: " ".join(STAND_INS.get(word, word) for word in text.split()) for name, text in texts.items()}


def lacking(needs: list[str], hardware: Hardware) -> list[str]:
    """Return, in words, those needs that this machine does not meet."""
    found = []
    for need in needs:
        if need in NEEDS:
            has, words = NEEDS[need]
            met = has(hardware)
        elif not need.endswith("GiB"):  # a part of a GPU is not that GPU
            met, words = bool(re.search(rf"\b{need}\b(?!.*\bMIG\b)", hardware.name)), f"the GPU {need}"
        else:  # a card sold as one of 80 GB reports 79 GiB
            met = hardware.memory_bytes >= _MEMORY_IS_SOLD_AS * int(need.removesuffix("GiB")) * 2**30
            words = f"{need} of {'GPU ' if hardware.is_gpu else ''}memory"
        if not met:
            found.append(words)
    return found


_MEMORY_IS_SOLD_AS = 0.92
NEEDS: dict[str, tuple[Callable[[Hardware], bool], str]] = {
    "cuda": (lambda here: here.kind is CUDA, "an NVIDIA GPU"),
    "cpu": (lambda here: here.device.type == "cpu", "a CPU: set device=cpu"),
    "tf32": (lambda here: here.support("tf32") != UNAVAILABLE, "TF32 (an NVIDIA GPU from Ampere on)"),
    "native_bf16": (lambda here: here.support("bf16") not in (EMULATED, UNAVAILABLE), "bf16 in hardware"),
    "native_fp16": (lambda here: here.support("fp16") not in (EMULATED, UNAVAILABLE), "fp16 in hardware"),
    "hopper": (lambda here: (here.capability or (0, 0)) >= (9, 0), "an NVIDIA GPU from Hopper on"),
    "torchao": (lambda _: find_spec("torchao") is not None, "torchao: pip install torchao"),
    "avx512_bf16": (lambda here: "avx512_bf16" in here.cpu_flags, "a CPU with avx512_bf16"),
    "amx": (lambda here: "amx_bf16" in here.cpu_flags, "a CPU with AMX"),
}
"""What a claim may need of a machine besides memory: the check, and the words for the user."""


def names(folder: Path = CLAIMS) -> list[str]:
    """Return the ids of all claims."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load(name: str, folder: Path = CLAIMS) -> Claim:
    """Read one claim's file.

    Raises:
        UserError: no such claim, or a file that is not one.
    """
    check_claim(name, folder)
    text = (folder / f"{name}.yaml").read_bytes()
    computed = {"id": name, "digest": hashlib.sha256(text).hexdigest()}
    try:
        given = OmegaConf.create(text.decode())
        return cast("Claim", OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Claim), given, computed)))
    except (UserError, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        key = f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) and error.full_key else ""
        words = first_line(error) if key else " ".join(str(error).split())
        raise UserError(f"evidence/claims/published/{name}.yaml: {key}{words}") from None


def _check_name(key: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not among the known ones."""
    if name not in known:
        raise UserError(f"{key}: {name!r} is not known{nearest(name, known)} ({', '.join(known)})")


def _check_need(need: str) -> None:
    if not re.fullmatch(r"\d+GiB|[A-Z]+\d+", need):
        _check_name("needs (or memory such as 40GiB, or a GPU such as A100)", need, NEEDS)
