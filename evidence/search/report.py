"""The report of a search, and its parent run in MLflow, which the trials' runs are below."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from evidence.mlflow import publish
from evidence.search.space import overrides_of, shown
from evidence.search.study import Search
from mantissa.display import loss
from mantissa.page import Report, Section, measured_on
from trainer.config.schema import Config
from trainer.tracking import store

AT_STEP = "at_step"
"""Attribute of Optuna's trials: the step of the best score."""
_NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.FAIL: "failed",
}
"""Names of the states, in the order of the table."""


def report(search: Search, overrides: list[str], command: str, facts: Mapping[str, Any]) -> Report:
    """Return the report: the best trial, the table of all, and the command that trains with the best.

    Args:
        search: the study.
        overrides: of every run.
        command: what was typed.
        facts: hardware, versions and commit.
    """
    trials = _ranked(search)
    sections = [Section("Trials", table=[_head(search), *(_cells(search, trial) for trial in trials)])]
    if running := sum(trial.state == TrialState.RUNNING for trial in trials):
        sections[0].sentences = [f"{running} of {len(trials)} trials are still running in another process"]
    answer = ["no trial is complete"]
    if trials and trials[0].state == TrialState.COMPLETE:
        best = overrides_of(trials[0].params)
        answer = [f"best: trial {trials[0].number}; paste:", shlex.join(best)]
        command_of_best = shlex.join(["python", "scripts/train.py", *overrides, *best])
        sections.append(Section("Train with the best", text=command_of_best))
    origin = measured_on(facts["hardware"], facts["versions"], facts["git"])
    return Report("Search", search.study.study_name, answer, command, origin, sections)


def _ranked(search: Search) -> list[FrozenTrial]:
    """Return the trials, best first."""
    order, sign = list(_NAMES), -1 if search.study.direction == StudyDirection.MAXIMIZE else 1
    return sorted(
        search.counted(), key=lambda trial: (order.index(trial.state), sign * (trial.value or 0.0), trial.number)
    )


def _head(search: Search) -> list[str]:
    return ["trial", *search.space, search.described["metric"], "at step", "state", "run"]


def _cells(search: Search, trial: FrozenTrial) -> list[str]:
    value, step = trial.value, trial.user_attrs.get(AT_STEP)
    if trial.state != TrialState.COMPLETE and trial.intermediate_values:
        step, value = max(trial.intermediate_values.items())
    params: dict[str, Any] = trial.params
    return [
        str(trial.number),
        *(shown(params[key]) if key in params else "" for key in search.space),
        "" if value is None else loss(value),
        "" if step is None else str(step),
        _NAMES[trial.state],
        search.run_of(trial),
    ]


def publish_search(config: Config, search: Search, status: str, files: list[Path]) -> tuple[list[str], str | None]:
    """Create the run of the whole search in MLflow, or bring it up to date. Several processes share it.

    Args:
        config: of a run of the search: where it is tracked.
        search: the study.
        status: RUNNING, or how this process ended: FINISHED or KILLED.
        files: of the report.

    Returns:
        Lines to print, and MLflow's id of the run; None: it is not in MLflow.
    """
    if not config.tracking.mlflow:
        return [], None
    study, trials = search.study, search.counted()
    experiment = config.tracking.experiment or config.recipe.name
    found: dict[str, Any] = {}
    if any(trial.state == TrialState.COMPLETE for trial in trials):
        found["metrics"] = {f"best/{search.described['metric']}": study.best_trial.value}
        found["tags"] = {f"best.{key}": shown(value) for key, value in study.best_trial.params.items()}
    others_work = any(trial.state == TrialState.RUNNING for trial in trials) and status == "FINISHED"

    def send(client: Any) -> Any:
        with search.alone():  # else two processes would create two
            return store.publish(
                client,
                experiment,
                f"search-{study.study_name}",
                study.user_attrs["mlflow_key"],
                started_s=study.user_attrs["began_s"],
                params=search.described | {"pruner": type(study.pruner).__name__},
                step=len(trials),
                files=files,
                status="RUNNING" if others_work else status,
                **found,
            )

    lines, run = publish("the search", store.tracking_uri(config.tracking.uri), send)
    return lines, None if run is None else str(run.info.run_id)
