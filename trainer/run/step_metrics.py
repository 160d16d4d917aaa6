"""What the log says of every optimizer step: a row for each metric.

To add one, add a row to ``STEP_METRICS``. It is in the next line of metrics.jsonl, in MLflow, and with a ``column`` in
the table on the terminal, too. Its ``value`` runs after every step, so it must not wait for the device (no ``.item()``,
no ``float(tensor)``): the monitor copies the tensors of a whole interval at once.

    "weight_norm": StepMetric(lambda step, trainer: get_total_norm(trainer.model.parameters()), last),

Weights are those after the step, and gradients are gone: what is of them is in the step's record, as ``grad_norm`` is,
to which ``Update.step`` gives it. The metrics of an evaluation are the recipe's: ``metric_sums`` of its ``loss``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from trainer.trainer import StepRecord, Trainer


class Column(NamedTuple):
    """A column of the table on the terminal."""

    heading: str
    text: Callable[[float], str]
    scaled_only: bool = False
    """Whether only a run with a loss scale has it."""


class StepMetric(NamedTuple):
    """One number of every optimizer step."""

    value: Callable[[StepRecord, Trainer], Tensor | float]
    """Takes the results of a step and the trainer after it; returns a scalar on the device, or a number."""
    combine: Callable[[list[float]], float] | None
    """Makes one number of an interval's, such as ``mean`` or ``last``; None: it is added up over the whole run."""
    column: Column | None = None
    of_ranks: bool = False
    """Whether every rank has a part of it, and the parts are added."""


def mean(values: list[float]) -> float:
    """Return the mean, or NaN where a value is not finite."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def last(values: list[float]) -> float:
    """Return the value of the newest step."""
    return values[-1]


def short(value: float | None, decimals: int = 4) -> str:
    """Return a number in eight characters, if it is not negative; empty: there is none."""
    if value is None:
        return ""
    fits = value == 0 or not math.isfinite(value) or 10 ** (1 - decimals) <= abs(value) < 999
    return f"{value:.{decimals}f}" if fits else f"{value:.2e}"


def _scale(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:.1e}"


STEP_METRICS: dict[str, StepMetric] = {
    # Per valid target.
    "loss": StepMetric(lambda step, _: step.loss, mean, Column("loss", short), of_ranks=True),
    "lr": StepMetric(lambda step, _: step.lr, last, Column("lr", "{:.1e}".format)),
    # Before clipping, of the unscaled gradients; not finite where the step was skipped.
    "grad_norm": StepMetric(lambda step, _: step.grad_norm, last, Column("norm", lambda norm: short(norm, 2))),
    "loss_scale": StepMetric(lambda step, _: step.loss_scale, last, Column("scale", _scale, True)),
    "skipped_steps": StepMetric(lambda step, _: step.skipped, None, Column("skipped", "{:.0f}".format, True)),
}
