"""What a search prints at its end, and its parent run in MLflow, which the trials' runs are below."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from evidence.search.space import overrides_of, shown
from evidence.search.study import Search
from mantissa.display import columns, loss
from trainer.config.schema import Config
from trainer.errors import first_line
from trainer.tracking.store import connect, publish, tracking_uri

AT_STEP, WHY = "at_step", "why"
"""Attributes of Optuna's trials: of the best score; why a trial was pruned or has failed."""
_NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.FAIL: "failed",
}
"""Names of the states, in the order of the table."""


def lines(search: Search, metric: str, overrides: list[str]) -> list[str]:
    """Return the table of the trials, best first, and what follows from it."""
    said = [columns(rows(search, metric))]
    trials = ranked(search)
    if running := sum(trial.state == TrialState.RUNNING for trial in trials):
        said.append(f"\n{running} of {len(trials)} trials are still running in another process")
    if complete := _complete(search):
        best = overrides_of(complete[0].params)
        said.append(f"\nbest: trial {complete[0].number}; paste:\n{shlex.join(best)}")
        said.append(f"\n{shlex.join(['python', 'scripts/train.py', *overrides, *best])}")
    return said


def ranked(search: Search) -> list[FrozenTrial]:
    """Return the trials, best first."""
    order, sign = list(_NAMES), -1 if search.study.direction == StudyDirection.MAXIMIZE else 1
    return sorted(
        search.counted(), key=lambda trial: (order.index(trial.state), sign * (trial.value or 0.0), trial.number)
    )


def _complete(search: Search) -> list[FrozenTrial]:
    return [trial for trial in ranked(search) if trial.state == TrialState.COMPLETE]


def rows(search: Search, metric: str) -> list[list[str]]:
    """Return the head of the table, and a row for each trial, best first."""
    head = ["trial", *search.space, metric, "at step", "state", "run"]
    return [head, *([*_cells(trial, list(search.space)), search.run_of(trial)] for trial in ranked(search))]


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
        _NAMES[trial.state],
    ]


def publish_search(
    config: Config, search: Search, metric: str, status: str, params: Mapping[str, str] = {}
) -> tuple[str | None, str]:
    """Create the run of the whole search in MLflow, or bring it up to date. Several processes share it.

    Args:
        config: of a run of the search: where it is tracked.
        search: the study.
        metric: what is searched for.
        status: RUNNING, or how this process ended: FINISHED or KILLED.
        params: of the run.

    Returns:
        MLflow's id of it, or None; and why MLflow could not take it, in which case the search continues.
    """
    if not config.tracking.mlflow:
        return None, ""
    trials, known = search.counted(), search.study.user_attrs
    uri, experiment = tracking_uri(config.tracking.uri), config.tracking.experiment or config.recipe.name
    found: dict[str, Any] = {}
    if any(trial.state == TrialState.COMPLETE for trial in trials):
        best = search.study.best_trial
        found["metrics"] = {f"best/{metric}": best.value}
        found["tags"] = {f"best.{key}": shown(value) for key, value in best.params.items()}
    others_work = any(trial.state == TrialState.RUNNING for trial in trials) and status == "FINISHED"
    try:
        client = connect(uri)
        with search.alone():  # else two processes would create two
            run = publish(
                client,
                experiment,
                f"search-{search.study.study_name}",
                known["mlflow_key"],
                started_s=known["began_s"],
                params=params,
                step=len(trials),
                files=[],
                status="RUNNING" if others_work else status,
                **found,
            )
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return None, first_line(error)
    return str(run.info.run_id), ""
