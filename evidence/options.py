"""Options of the scripts that make many runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from mantissa.verdict.compare import SEED_SHIFT
from trainer.config.options import ONE_PROCESS, Overriding, check_keys
from trainer.config.registration import choices
from trainer.config.text import fraction, listed, unquoted
from trainer.errors import UserError, check_folder_name, nearest

FIRST = 10
"""Steps of a learning-rate range test from which nothing is suggested: its loss is the mean of few batches."""


@dataclass
class AdviseOptions(Overriding):
    """Options of scripts/advise.py."""

    fixed = ONE_PROCESS | dict.fromkeys(("resume", "debug"), "advise.py only times blocks of steps")

    time_budget: str = "5min"


@dataclass
class CompareOptions(Overriding):
    """Options of scripts/compare.py."""

    fixed = ONE_PROCESS | dict.fromkeys(
        ("seed", "run_name", "resume", "output_dir"), "set for every run; use seeds=5, and name=…"
    )

    arms: list[str] = field(default_factory=list)
    baseline: str = ""
    seeds: str = "5"
    margin: str = "0.3%"
    name: str = ""
    output_dir: Path = Path("outputs")

    def __post_init__(self) -> None:
        precisions = choices("precision")
        for name in self.arms:
            if name not in precisions:
                raise UserError(
                    f"arms: {name} is not a precision ({', '.join(precisions)}){nearest(name, precisions)}; "
                    'for other overrides use arm.<name>="key=value …"'
                )
        check_folder_name("name", self.name)

    def split(self, others: list[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """Return the overrides of all arms, and each arm's label with its own.

        Raises:
            UserError: there are fewer than two arms, or one sets what is set for every run.
        """
        common = [text for text in others if not text.startswith("arm.")]
        arms = [(name, [f"precision={name}"]) for name in self.arms]
        for label, _, text in (text.removeprefix("arm.").partition("=") for text in others if text not in common):
            arms.append((label, unquoted(text).split()))
            check_keys(arms[-1][1], type(self))
        if len(arms) < 2:
            raise UserError(
                'a comparison needs two arms or more, as in arms=fp32,bf16 or arms=fp32 arm.compiled="compile=default"'
            )
        return common, arms


@dataclass
class DoctorOptions(Overriding):
    """Options of scripts/doctor.py."""

    positional = "resume"

    resume: str = ""
    step: int = 0
    check: list[str] = field(default_factory=lambda: ["all"])
    time_budget: str = "60s"

    def __post_init__(self) -> None:
        from mantissa.doctor.diagnosis import CHECKS

        if unknown := [name for name in self.check if name not in (*CHECKS, "all")]:
            near = nearest(unknown[0], CHECKS)
            raise UserError(f"check={unknown[0]} is not a check{near} (all, {', '.join(CHECKS)})")
        if self.check == ["islands"]:
            raise UserError("check=islands cures what another check finds; set check=formats,islands, or check=all")


@dataclass
class MaxBatchOptions(Overriding):
    """Options of scripts/max_batch.py."""

    fixed = dict.fromkeys(("micro_batch_size",), "it is what this command finds")

    memory_budget: str = "device"


@dataclass
class RangeOptions(Overriding):
    """Options of scripts/lr_range.py."""

    fixed = ONE_PROCESS | dict.fromkeys(("optimizer.lr", "schedule", "resume", "epochs"), "the test sets it itself")

    min: float = 1e-7
    max: float = 10.0
    steps: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.min < self.max < math.inf:
            raise UserError(
                f"min={self.min:g} and max={self.max:g} must be learning rates above 0, min the lower one, such as "
                f"min={RangeOptions.min:g} max={RangeOptions.max:g}"
            )
        if self.steps <= 2 * FIRST:
            raise UserError(f"steps={self.steps} are too few for a curve; use more than {2 * FIRST}, such as steps=100")


@dataclass
class ReproduceOptions:
    """Options of scripts/reproduce.py."""

    claim: list[str] = field(default_factory=list)
    all: bool = False
    device: str = "auto"
    output_dir: Path = Path("outputs")

    def __post_init__(self) -> None:
        if self.claim and self.all:
            raise UserError("claim=… and all=true exclude each other; drop one")


def seeds_of(text: str) -> list[int]:
    """Return the seeds that ``5`` or ``3,4,5`` means. Raises UserError."""
    try:
        seeds = [int(item) for item in listed(text)] if "," in text or text.startswith("[") else list(range(int(text)))
    except ValueError:
        raise UserError(f"seeds={text} is neither a number nor a list; write seeds=5 or seeds=3,4,5") from None
    if len(set(seeds)) < max(2, len(seeds)) or min(seeds) < 0 or max(seeds) >= SEED_SHIFT:
        raise UserError(f"seeds={text} must be two or more different numbers from 0 to {SEED_SHIFT - 1}; use seeds=5")
    return seeds


def margin_of(text: str) -> float:
    """Return the fraction that ``0.3%`` or ``0.003`` means. Raises UserError."""
    margin = fraction(text)
    if margin is None or not 0 < margin < 1:
        raise UserError(
            f"margin={text} must be a number above 0 and below 100 %: the difference in validation loss that is too "
            "small to matter, such as margin=0.3%"
        )
    return margin
