"""Whether the advised setting computes right: the doctor's check-up of a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from evidence.doctor.step import step_of
from evidence.isolated import answer, measure_isolated
from evidence.runs import merge_overrides
from mantissa.doctor.checks import MANIFEST, MODULES, RANGE, SWEEP
from mantissa.doctor.diagnosis import HEALTHY, diagnose
from mantissa.doctor.examine import take
from mantissa.doctor.finding import CRASH
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import RunError, first_line
from trainer.hardware import Hardware
from trainer.trainer import Trainer

SAMPLES = 2
"""Number of samples in the step that is examined, at most: formats do not depend on it, and batch norm needs two."""
CHECKS = (SWEEP, MANIFEST, RANGE, MODULES, "updates")
"""Checks of the doctor that need few steps."""
TIME_BUDGET_S, LIMIT_S = 30, 180.0
"""Seconds for the doctor's checks; and for all of it, with the start of its process and the end of a part."""


def check(overrides: Sequence[str], hardware: Hardware) -> dict[str, Any]:
    """Examine the first step of a setting, in a process of its own, with few samples.

    Returns:
        ``faults``: what the doctor found, in words; ``missed``: what it did not examine, and why; ``healthy``: whether
        it found nothing and ended. A setting that could not be examined is not healthy and has no faults.
    """
    samples = min(SAMPLES, plan_of(compose(overrides), hardware).batching.micro_batch_size)
    few = merge_overrides(overrides, [f"batch_size={samples}", f"micro_batch_size={samples}"])
    try:
        answered: dict[str, Any] = measure_isolated(__name__, few, {}, limit_s=LIMIT_S)
    except RunError as error:
        return {"faults": [], "missed": [f"not examined: {first_line(error)}"], "healthy": False}
    return answered


def measure(config: Config) -> dict[str, Any]:
    """Examine the first step of a config in this process, and return what ``check`` does."""
    diagnosis = diagnose(take(step_of(Trainer.from_config(config))), CHECKS, TIME_BUDGET_S)
    budget = diagnosis.budget
    return {
        "faults": ["; ".join(finding.parts) for finding in diagnosis.findings if finding.kind != CRASH],
        "missed": [f"crashed: {part}" for part in budget.crashes] + [f"left out: {item}" for item in budget.left_out],
        "healthy": diagnosis.verdict == HEALTHY,
    }


if __name__ == "__main__":
    sys.exit(answer(measure))
