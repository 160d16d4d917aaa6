"""A search: every trial is a run of train.py's, one after the other, until the study has all of its trials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from evidence.search.space import overrides_of
from evidence.search.study import Search, forget, run_of
from evidence.search.trial import Pruned, reporting_to
from mantissa.display import duration, loss
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.errors import NonFiniteError, OutOfMemory, UserError, first_line, is_out_of_memory
from trainer.run.command import release_memory
from trainer.run.resume import SAME
from trainer.run.start import train

AT_STEP, WHY = "at_step", "why"
"""Attributes of Optuna's trials: of the best score; why a trial was pruned or has failed."""


@dataclass
class Outcome:
    """How a trial ended."""

    state: TrialState
    value: float | None = None
    """The best value of the metric; None: the trial was not trained to its end."""
    at_step: int | None = None
    why: str = ""


def run_trials(
    search: Search, overrides: list[str], metric: str, parent: str | None, show: Callable[[str], None]
) -> None:
    """Train what the study lacks.

    Args:
        search: the study.
        overrides: of every run.
        metric: what is searched for, such as ``valid/loss``.
        parent: MLflow's id of the search.
        show: called with lines of progress.

    Raises:
        UserError: the first runs were refused; later ones only fail.
        KeyboardInterrupt: of Ctrl-C; the run has saved a checkpoint.
    """
    while True:
        with search.next() as trial:
            if trial is None:
                return
            proposed = overrides_of(trial.params)
            name = run_of(trial)
            show(f"trial {trial.number}: {' '.join(proposed)}")
            config = compose([*overrides, *proposed, f"checkpoint.best={metric}"])
            tracking = replace(config.tracking, parent=parent)
            config = replace(config, run_name=name, resume=SAME, tracking=tracking)
            began = time.monotonic()
            try:
                outcome = _run(config, trial, search.folder / f"{name}.log")
            except UserError as error:
                outcome = Outcome(TrialState.FAIL, why=first_line(error))
                if not any(other.state in (TrialState.COMPLETE, TrialState.PRUNED) for other in search.counted()):
                    search.study.tell(trial, state=TrialState.FAIL)
                    if len(search.counted()) == 1:
                        forget(search)
                    raise UserError(str(error).replace("checkpoint.best", "metric")) from error
            _record(search, trial, outcome)
            show(f"  {_said(outcome, metric)}, {duration(time.monotonic() - began)}")


def _run(config: Config, trial: Any, log: Path) -> Outcome:
    """Train one run, which prints to ``log``."""
    try:
        with log.open("a", encoding="utf-8") as file, redirect_stdout(file):
            summary = train(config, run_class=reporting_to(trial))
    except Pruned as error:
        return Outcome(TrialState.PRUNED, why=str(error))
    except (NonFiniteError, OutOfMemory) as error:
        return Outcome(TrialState.FAIL, why=first_line(error))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Outcome(TrialState.FAIL, why=f"out of memory ({first_line(error)})")
    finally:
        release_memory()
    best = summary["best"]
    if best is None or not math.isfinite(best["value"]):
        return Outcome(TrialState.FAIL, why="no evaluation was finite")
    return Outcome(TrialState.COMPLETE, best["value"], int(best["step"]))


def _record(search: Search, trial: Any, outcome: Outcome) -> None:
    if outcome.why:
        trial.set_user_attr(WHY, outcome.why)
    if outcome.at_step is not None:
        trial.set_user_attr(AT_STEP, outcome.at_step)
    search.study.tell(trial, outcome.value, state=outcome.state)


def _said(outcome: Outcome, metric: str) -> str:
    if outcome.value is None:
        return outcome.why if outcome.state == TrialState.PRUNED else f"failed: {outcome.why}"
    return f"{metric} {loss(outcome.value)} at step {outcome.at_step}"
