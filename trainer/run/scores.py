"""A run's evaluations: the last one, the best one, and whether early stopping ends the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mantissa.display import counted, loss
from trainer.config.schema import Config
from trainer.errors import UserError, most_like

PREFIX = "valid/"


class Score(NamedTuple):
    """One evaluation, seen by the metric that marks the best checkpoint."""

    value: float | None
    """None: not finite."""
    improved: bool
    """Whether it is the best so far."""


class Scores:
    """Keeps the scores of a run.

    Args:
        config: of the run: its recipe's metric, ``checkpoint.best`` and ``early_stopping``.
        lower_is_better: takes a metric, and returns whether its lowest value is the best; None: the recipe's.
    """

    def __init__(self, config: Config, lower_is_better: Callable[[str], bool] | None = None) -> None:
        recipe, self.stopping = config.recipe, config.early_stopping
        self.metric: str = recipe.best_metric if config.checkpoint.best == "auto" else config.checkpoint.best
        """Metric that marks the best checkpoint, such as ``valid/loss``."""
        lower_is_better = lower_is_better or recipe.lower_is_better
        self.lowest: bool = lower_is_better(self.metric)
        """Whether the lowest value is the best; else the highest."""
        self.best: dict[str, Any] | None = None
        """The best score: ``step`` and ``value``."""
        self.before: float | None = None
        """Value before training; None: it was not evaluated, or not finite. It is never the best: no checkpoint has it.
        """
        self.final: dict[str, float] = {}
        """Metrics of the last evaluation by ``valid/<name>``."""
        self.step = 0
        """Step after which the last evaluation was."""
        self.watched: str = self.stopping.metric or self.metric
        """Metric of early stopping."""
        self._watches_lowest: bool = lower_is_better(self.watched)
        self._reference: float | None = None
        """Value that an evaluation has to improve; None: none was finite."""
        self._waited = 0
        """Evaluations since then."""
        self._all_known = recipe.best_metric == self.metric == self.watched

    @property
    def exhausted(self) -> bool:
        """Whether early stopping ends the run."""
        return self.stopping.patience is not None and self._waited >= self.stopping.patience

    @property
    def why(self) -> str:
        """Return why early stopping ended the run."""
        best = "was never finite" if self._reference is None else f"has not been better than {loss(self._reference)}"
        return f"{self.watched} {best} in the last {counted(self._waited, 'evaluation')}"

    @property
    def worse_than_before(self) -> str:
        """Return that training has made the weights worse; empty: it has not, or that is not known."""
        best = None if self.best is None else self.best["value"]
        if self.before is None or not self.step or not _better(self.before, best, self.lowest):
            return ""
        return f"worse than before training ({self.metric.removeprefix(PREFIX)} {loss(self.before)} at step 0)"

    def check_known(self, names: Callable[[], Collection[str]], always: bool = False) -> None:
        """Check that the metrics that the user has set exist.

        Args:
            names: returns the metrics of an evaluation, without ``valid/``, and takes the time of a forward pass.
            always: whether it has something to check by itself.

        Raises:
            UserError: names the ones that exist.
        """
        if self._all_known and not always:
            return
        known = [PREFIX + name for name in names()]
        for key, metric in (("checkpoint.best", self.metric), ("early_stopping.metric", self.watched)):
            if metric not in known:
                near = f"{key}={most_like(metric, known) or known[0]}"
                raise UserError(f"{key}={metric} is not a metric of this recipe ({', '.join(known)})", near)

    def add_first(self, metrics: dict[str, float]) -> None:
        """Take in the metrics of the weights that training begins with."""
        value = metrics[self.metric.removeprefix(PREFIX)]
        self.before = value if math.isfinite(value) else None

    def add(self, step: int, metrics: dict[str, float]) -> Score:
        """Take in the metrics of an evaluation after ``step``."""
        self.step, self.final = step, {PREFIX + name: value for name, value in metrics.items()}
        value, watched = self.final[self.metric], self.final[self.watched]
        improved = _better(value, None if self.best is None else self.best["value"], self.lowest)
        if improved:
            self.best = {"step": step, "value": value}
        if _better(watched, self._reference, self._watches_lowest, self.stopping.min_delta):
            self._reference, self._waited = watched, 0
        else:
            self._waited += 1
        return Score(value if math.isfinite(value) else None, improved)

    def rank(self, score: Score) -> float | None:
        """Return a score as a checkpoint's manifest has it, where the lowest is the best."""
        return score.value if score.value is None or self.lowest else -score.value

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, as JSON types; what there is no value of is left out."""
        state: dict[str, Any] = {"best": self.best, "final": self.final, "evaluated": self.step}
        if self.before is not None:
            state["before"] = self.before
        if self.stopping.patience is not None:
            state["stopping"] = {"metric": self.watched, "reference": self._reference, "waited": self._waited}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's; without early stopping of the same metric the wait begins now."""
        self.best, self.final, self.step = state["best"], state["final"], state["evaluated"]
        self.before = state.get("before")
        stopping = state.get("stopping", {})
        if stopping.get("metric") == self.watched:
            self._reference, self._waited = stopping["reference"], stopping["waited"]


def _better(value: float, than: float | None, lowest: bool, margin: float = 0.0) -> bool:
    """Return whether a value is finite, and better by more than a margin; None: there was no finite one before."""
    if than is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < than - margin if lowest else value > than + margin
