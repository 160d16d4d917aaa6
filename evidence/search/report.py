"""What a search prints at its end: its trials, which options mattered, and what to paste."""

from __future__ import annotations

import shlex
import warnings
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from evidence.search.search import AT_STEP
from evidence.search.space import overrides_of, shown
from evidence.search.study import Search, run_of
from mantissa.display import columns, loss

FEWEST = 8
"""Complete trials from which the importance of options is estimated."""
_ORDER = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL)
_NAMES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


def lines(search: Search, metric: str, overrides: list[str]) -> list[str]:
    """Return the table of the trials, best first, and what follows from it."""
    trials = search.counted()
    sign = -1 if search.study.direction == StudyDirection.MAXIMIZE else 1
    trials.sort(key=lambda trial: (_ORDER.index(trial.state), sign * (trial.value or 0.0), trial.number))
    headings = ["trial", *search.space, metric, "at step", "state", "run"]
    said = [columns([headings, *(_cells(trial, list(search.space)) for trial in trials)])]
    running = sum(trial.state == TrialState.RUNNING for trial in trials)
    if running:
        said.append(f"\n{running} of {len(trials)} trials are still running in another process")
    if weights := importances(search, trials):
        said.append("\nimportance: " + ", ".join(f"{key} {weight:.2f}" for key, weight in weights.items()))
    if trials and trials[0].state == TrialState.COMPLETE:
        best = overrides_of(trials[0].params)
        said.append(f"\nbest: trial {trials[0].number}; paste:\n{shlex.join(best)}")
        said.append(f"\n{shlex.join(['python', 'scripts/train.py', *overrides, *best])}")
    return said


def importances(search: Search, trials: list[FrozenTrial]) -> dict[str, float]:
    """Return how much each option explains of the metric (they sum to 1), the largest first; empty for few trials."""
    values = [trial.value for trial in trials if trial.state == TrialState.COMPLETE]
    if len(values) < FEWEST or len(set(values)) < 2 or len(search.space) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, about its own versions
        found: dict[str, float] = optuna.importance.get_param_importances(search.study)
    return found


def _cells(trial: FrozenTrial, keys: list[str]) -> list[str]:
    value, step = trial.value, trial.user_attrs.get(AT_STEP)
    if trial.state != TrialState.COMPLETE and trial.intermediate_values:
        step, value = max(trial.intermediate_values.items())
    params: dict[str, Any] = trial.params
    return [
        str(trial.number),
        *(shown(params[key]) if key in params else "" for key in keys),
        "" if value is None else loss(value),
        "" if step is None else str(step),
        _NAMES.get(trial.state, "running"),
        run_of(trial),
    ]
