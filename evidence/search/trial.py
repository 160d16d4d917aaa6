"""One trial: a run that reports its evaluations to the study, and ends where the study prunes it."""

from __future__ import annotations

from typing import ClassVar

import optuna

from mantissa.display import loss
from trainer.errors import RunError
from trainer.run.run import Run
from trainer.run.scores import Score


class Pruned(RunError, optuna.TrialPruned):
    """The study has ended a trial, because earlier ones were better at this step."""

    status = "KILLED"


class TrialRun(Run):
    """A run whose evaluations a study follows."""

    trial: ClassVar[optuna.Trial]

    def _evaluate(self, step: int) -> Score:
        score = super()._evaluate(step)
        if score.value is not None:
            self.trial.report(score.value, step)
            if not self.complete and self.trial.should_prune():
                better = f"earlier trials had a better {self.scores.metric} than {loss(score.value)}"
                raise Pruned(f"pruned at step {step}: {better}")
        return score
