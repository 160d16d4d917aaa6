"""Published claims: files in evidence/claims/published with what was claimed, and the comparison that tests it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evidence.measures import MEASURES
from evidence.runs import Arm, check_labels
from mantissa.verdict.judge import EXACT, TIMED, Ratio, ratio
from mantissa.verdict.runs import Runs
from mantissa.verdict.statistics import INCONCLUSIVE, PAIRS, Interval
from trainer.config.compose import key_of
from trainer.errors import UserError, check_choice, first_line, nearest
from trainer.files import PROJECT
from trainer.hardware import CUDA, EMULATED, UNAVAILABLE, Hardware
from trainer.precision.kernels import not_timed_here

CONFIRMED, REFUTED = "CONFIRMED", "REFUTED"
CLAIMS = PROJECT / "evidence" / "claims" / "published"
QUIET = ("tracking=local", "checkpoint=none")
"""Overrides of every run: neither tracking nor saving is measured."""
_PRECISION = "precision="
_MEMORY_IS_SOLD_AS = 0.92
"""Share of its memory that a card reports: one sold as 80 GB has 79 GiB."""


@dataclass
class Criterion:
    """Bounds on a row of a comparison; without bounds it is only reported."""

    measure: str
    """Name of the number: a key of ``MEASURES``."""
    arm: str
    over: str = ""
    """Baseline, whose ratios are bounded; empty: the mean over the runs is."""
    at_least: float = -math.inf
    at_most: float = math.inf
    published: str = ""
    note: str = ""
    """What the number shows, where it is not obvious."""

    def __post_init__(self) -> None:
        """Check that it can be judged."""
        if self.at_least > self.at_most:
            raise UserError(f"at_least: {self.at_least:g} is above at_most: {self.at_most:g}; swap them")

    @property
    def arms(self) -> list[str]:
        """Arms that it names."""
        return list(filter(None, (self.arm, self.over)))

    @property
    def decides(self) -> bool:
        """Whether it has bounds."""
        return (self.at_least, self.at_most) != (-math.inf, math.inf)

    def quantity(self) -> str:
        """Return the quantity in words."""
        return f"{MEASURES[self.measure]}, {self.arm}{f' over {self.over}' if self.over else ''}"

    def bounds(self) -> str:
        """Return the bounds in words."""
        if math.isinf(self.at_least):
            return f"≤ {self.at_most:g}"
        return f"≥ {self.at_least:g}" if math.isinf(self.at_most) else f"{self.at_least:g} to {self.at_most:g}"

    def row(self, runs: Runs) -> Ratio:
        """Return the row of a comparison that it bounds; a failed run leaves its verdict open."""
        arm, base = runs[self.arm], runs[self.over or self.arm]
        row, all_ended = ratio(self.measure, arm, base), all(run.ended for run in (*arm.values(), *base.values()))
        return row if all_ended else replace(row, why=row.why or "a run failed")

    def interval(self, row: Ratio) -> Interval | None:
        """Return the interval that the bounds are for, from a comparison's row; None: not measured."""
        return row.ratio if self.over else row.value

    def verdict(self, row: Ratio) -> str:
        """Return whether all of the interval is within the bounds, all outside, or neither; empty: no bounds."""
        interval = self.interval(row)
        if not self.decides:
            return ""
        if row.why or not interval:
            return INCONCLUSIVE
        if self.at_least <= interval.low and interval.high <= self.at_most:
            return CONFIRMED
        return REFUTED if interval.high < self.at_least or interval.low > self.at_most else INCONCLUSIVE


@dataclass
class Claim:
    """One published claim: the fields but ``id`` are the keys of its YAML (see docs/results.md)."""

    id: str
    """Name of the file, without ``.yaml``."""
    statement: str
    """Statement as published."""
    source: str
    """Place where it was published."""
    setups: dict[str, str]
    """Overrides by name, which arms begin with."""
    arms: dict[str, str]
    """Arms by name: a setup, then overrides of the arm's own."""
    criteria: list[Criterion]
    published: str = "no figure"
    """Published figure, in the terms measured here."""
    needs: list[str] = field(default_factory=list)
    """What the machine must have: keys of ``NEEDS``, memory such as ``40GiB``, or a GPU by name such as ``A100``."""
    speaks_of: list[str] = field(default_factory=list)
    """The same for the hardware that the statement is about; elsewhere there is no verdict."""
    asks: dict[str, str] = field(default_factory=dict)
    """Overrides that the user has to set: the key, and what to set it to."""
    on_cuda: dict[str, str] = field(default_factory=dict)
    """Further overrides by setup on a CUDA GPU, where other sizes fit."""
    repeats: int = 3
    """Number of runs of each arm, each with another seed."""

    def __post_init__(self) -> None:
        """Check what the types do not: that something is measured, and that the names in it exist."""
        if not self.criteria:
            raise UserError("criteria: there is none; give one such as {measure: speed, arm: bf16, over: fp32}")
        if self.repeats < (PAIRS if any(criterion.measure not in EXACT for criterion in self.criteria) else 2):
            raise UserError(f"repeats: {self.repeats} is too few; set repeats: {PAIRS}")
        check_labels(list(self.arms))
        for name, text in self.arms.items():
            check_choice(f"arms.{name}", text.partition(" ")[0], list(self.setups))
        for name in self.on_cuda:
            check_choice("on_cuda", name, list(self.setups))
        for need in [*self.needs, *self.speaks_of]:
            if not re.fullmatch(r"\d+GiB|[A-Z]+\d+", need):  # memory, or a GPU
                check_choice("needs", need, list(NEEDS))
        for criterion in self.criteria:
            check_choice("measure", criterion.measure, list(MEASURES))
            for name in criterion.arms:
                check_choice(f"criteria on {criterion.measure}", name, list(self.arms))

    def overrides(self, arm: str, on_cuda: bool = False) -> list[str]:
        """Return the overrides of an arm: its setup's, those for a GPU, its own."""
        setup, *changes = self.arms[arm].split()
        return [*self.setups[setup].split(), *(self.on_cuda.get(setup, "") if on_cuda else "").split(), *changes]

    def lacking(self, hardware: Hardware, given: list[str]) -> list[str]:
        """Return what this machine or the command line lacks to run the claim, in words; empty: nothing."""
        typed = set(map(key_of, given))
        asked = [f"{key}=… ({what})" for key, what in self.asks.items() if key not in typed]
        return lacking(self.needs, hardware) + asked

    def speaks_not_of(self, hardware: Hardware) -> str:
        """Return why there is no verdict on this machine, in words; empty: there is one, if anything has bounds."""
        others = lacking(self.speaks_of, hardware)
        return "the claim speaks of " + ", ".join(others) if others else ""

    def untestable(self, hardware: Hardware) -> dict[int, str]:
        """Return why criteria cannot be tested here, by their number: a format that this machine lacks or emulates."""
        untestable: dict[int, str] = {}
        for number, criterion in enumerate(self.criteria):
            for arm in criterion.arms:
                words = reversed(self.overrides(arm))
                mode = next((word.removeprefix(_PRECISION) for word in words if word.startswith(_PRECISION)), "fp32")
                if hardware.support(mode) == UNAVAILABLE:
                    untestable[number] = f"{mode} is not available here"
                elif criterion.measure in TIMED and (why := not_timed_here(mode, hardware)):
                    untestable[number] = why
        return untestable

    def to_run(self, hardware: Hardware) -> list[str]:
        """Return the names of the arms to run here; empty: nothing can be tested that gives an outcome."""
        left_out = self.untestable(hardware)
        tested = [criterion for number, criterion in enumerate(self.criteria) if number not in left_out]
        is_judged = any(criterion.decides for criterion in self.criteria) and not self.speaks_not_of(hardware)
        if is_judged and not any(criterion.decides for criterion in tested):
            return []
        return [name for name in self.arms if any(name in criterion.arms for criterion in tested)]

    def runs(self, names: list[str], given: list[str], hardware: Hardware) -> list[Arm]:
        """Return the arms of these names as command lines."""
        ledger = not hardware.is_gpu and any(criterion.measure == "memory" for criterion in self.criteria)
        quiet = (*QUIET, "profiler=memory" if ledger else "profiler=none")
        asked = [override for override in given if key_of(override) in self.asks]
        device = hardware.device.type
        overrides = {name: self.overrides(name, device == CUDA.type) for name in names}
        return [Arm(name, (*quiet, *overrides[name], f"device={device}", *asked)) for name in names]


def lacking(needs: list[str], hardware: Hardware) -> list[str]:
    """Return, in words, those needs that this machine does not meet."""
    missing = []
    for need in needs:
        if need in NEEDS:
            has, words = NEEDS[need]
            met = has(hardware)
        elif need.endswith("GiB"):
            met = hardware.memory_bytes >= _MEMORY_IS_SOLD_AS * int(need.removesuffix("GiB")) * 2**30
            words = f"{need} of {'GPU ' if hardware.is_gpu else ''}memory"
        else:  # a part of a GPU is not that GPU
            met, words = bool(re.search(rf"\b{need}\b(?!.*\bMIG\b)", hardware.name)), f"the GPU {need}"
        if not met:
            missing.append(words)
    return missing


NEEDS: dict[str, tuple[Callable[[Hardware], bool], str]] = {
    "cuda": (lambda here: here.kind is CUDA, "an NVIDIA GPU"),
    "cpu": (lambda here: here.device.type == "cpu", "a CPU: set device=cpu"),
    "tf32": (lambda here: here.support("tf32") != UNAVAILABLE, "TF32 (an NVIDIA GPU from Ampere on)"),
    "native_bf16": (lambda here: here.support("bf16") not in (EMULATED, UNAVAILABLE), "bf16 in hardware"),
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
    if name not in (known := names(folder)):
        raise UserError(
            f"claim={name} is not a claim{nearest(name, known)}; python scripts/reproduce.py lists all of them"
        )
    try:
        given = OmegaConf.create((folder / f"{name}.yaml").read_bytes().decode())
        return cast("Claim", OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Claim), given, {"id": name})))
    except (UserError, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        key = f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) and error.full_key else ""
        words = first_line(error) if key else " ".join(str(error).split())
        raise UserError(f"evidence/claims/published/{name}.yaml: {key}{words}") from None
