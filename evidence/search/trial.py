"""One trial: a run that reports its evaluations to the study, and ends early where the study prunes it."""

from __future__ import annotations

from typing import Any, ClassVar

import optuna

from mantissa.display import loss
from trainer.errors import RunError
from trainer.files import METRICS_FILE, read_json_lines
from trainer.run.run import Run
from trainer.run.scores import Score


class Pruned(RunError, optuna.TrialPruned):
    """The study has ended a trial, because earlier ones were better at this step."""

    status = "KILLED"


class TrialRun(Run):
    """A run whose evaluations a study follows."""

    trial: ClassVar[optuna.Trial]

    def __init__(self, *arguments: Any) -> None:
        """See ``Run``. One that is resumed repeats its reports, for the study knows them by another trial."""
        super().__init__(*arguments)
        self._pruned = ""
        for line in read_json_lines(self.folder.path / METRICS_FILE):
            if line["step"] <= self.trainer.step and line.get(self.scores.metric) is not None:
                self.trial.report(line[self.scores.metric], line["step"])

    def _evaluate(self, step: int) -> Score:
        score = super()._evaluate(step)
        if score.value is not None:
            self.trial.report(score.value, step)
            if self.trial.should_prune():
                self._pruned = f"pruned: earlier trials had a better {self.scores.metric} than {loss(score.value)}"
        return score

    def after_step(self) -> None:
        """End the run after the step in which it was pruned, with its checkpoint."""
        super().after_step()
        if self._pruned and not self.complete and self.stopped_by is None:
            self.terminal.note(self._pruned)
            raise Pruned(self._pruned)

    def summary(self, status: str) -> dict[str, Any]:
        summary = super().summary(status)
        return summary | {"stopped_early": self._pruned} if self._pruned and status == Pruned.status else summary


def reporting_to(trial: optuna.Trial) -> type[TrialRun]:
    """Return the class of runs that report to a trial."""
    return type("ReportingRun", (TrialRun,), {"trial": trial})
