"""A search by scripts/search.py: Optuna proposes, every trial is a run of train.py's in this process."""

from __future__ import annotations

import logging
import math
import shlex
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import optuna
import torch
from optuna.pruners import MedianPruner, NopPruner
from optuna.trial import FrozenTrial, TrialState

from evidence.runs import merge_overrides
from evidence.search.space import SearchOptions, check_space, overrides_of, parse_space, shown
from evidence.search.study import DATABASE, Search, open_study
from mantissa.display import columns, duration, loss
from trainer.config.command_line import quoted
from trainer.config.compose import compose, key_of
from trainer.config.options import parse
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import NonFiniteError, OutOfMemory, RunError, UserError, first_line
from trainer.files import SAME, check_output_dir
from trainer.hardware import detect
from trainer.metrics import Metrics
from trainer.recipe import Recipe
from trainer.run.fit import release_memory
from trainer.run.run import Run
from trainer.run.scores import Score
from trainer.run.start import train
from trainer.tracking.store import GROUP_TAG


class Pruned(RunError, optuna.TrialPruned):
    """The study has ended a trial, because earlier ones were better at this step."""

    status = "KILLED"


class TrialRun(Run):
    """A run whose evaluations a study follows."""

    trial: ClassVar[optuna.Trial]

    def evaluate(self) -> Score | None:
        score, step = super().evaluate(), self.trainer.step
        if score is not None and score.value is not None:
            self.trial.report(score.value, step)
            if not self.complete and self.trial.should_prune():
                better = f"earlier trials had a better {self.scores.metric} than {loss(score.value)}"
                raise Pruned(f"pruned at step {step}: {better}")
        return score


def main(arguments: list[str]) -> int:
    """Search a space, and print its trials and the best of them; the exit code is 1 where no trial was complete.

    Raises:
        UserError: a space that is none, or a mistake of train.py's.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, others = parse(arguments, SearchOptions, "overrides")
    space, overrides = parse_space(others)
    first = check_space(space, overrides)
    check_output_dir(first.output_dir)
    name, output_dir = options.study or first.name, Path(first.output_dir).expanduser()
    settled = plan_of(first, detect(first.device)).config
    recipe = settled.recipe
    datasets = None if type(recipe).metrics is Recipe.metrics else settled.open_datasets()
    metrics = Metrics(recipe, datasets, first.metrics, torch.device("cpu"))
    kept = sorted(text for text in overrides if key_of(text).partition(".")[0] not in ("output_dir", "tracking"))
    typed = sorted(argument for argument in others if argument not in overrides)
    described = {"space": " ".join(typed), "options": " ".join(kept), "metric": options.metric}
    study = open_study(
        name,
        output_dir,
        described,
        maximise=not metrics.lower_is_better(options.metric),
        pruner=MedianPruner() if options.pruner == "median" else NopPruner(),
    )
    search = Search(study, output_dir / "search" / name, space, options.trials, first.seed, described)
    search.folder.mkdir(parents=True, exist_ok=True)
    print(
        f"study {name}: {len(search.counted())} of {options.trials} trials; runs print to {search.folder}", flush=True
    )
    run_trials(search, overrides)
    print(f"\n{columns(_rows(search))}\n\n{_answer(search)}")
    print(f"plots and the importance of options: optuna-dashboard sqlite:///{output_dir / DATABASE}")
    return int(not _complete(search))


def run_trials(search: Search, overrides: list[str]) -> None:
    """Train what the study lacks, one run after the other; in MLflow, their tag ``group`` is the study.

    Raises:
        UserError: the first runs were refused; later ones only fail.
        KeyboardInterrupt: of Ctrl-C; the run has saved a checkpoint.
    """
    metric = search.described["metric"]

    def objective(trial: optuna.Trial) -> float:
        proposed = overrides_of(trial.params)
        print(f"trial {trial.number}: {' '.join(proposed)} ({len(search.counted())} of {search.trials})", flush=True)
        began = time.monotonic()
        try:
            group = f"tags.{GROUP_TAG}={quoted(search.study.study_name)}"
            fixed = [f"checkpoint.best={metric}", f"run_name={quoted(search.run_of(trial))}", f"resume={SAME}"]
            best = _train(compose(merge_overrides([group], overrides, proposed, fixed)), trial, search.folder)
        except (Pruned, UserError, NonFiniteError, OutOfMemory) as error:
            if search.trained or not isinstance(error, UserError):  # else it ends the search
                failed = "" if isinstance(error, Pruned) else "failed: "
                print(f"  {failed}{first_line(error)}, {duration(time.monotonic() - began)}", flush=True)
            raise
        took = duration(time.monotonic() - began)
        print(f"  {metric} {loss(best['value'])} at step {best['step']:.0f}, {took}", flush=True)
        return float(best["value"])

    try:
        search.run(objective)
    except UserError as error:
        if len(search.counted()) == 1:  # the corrected command begins anew
            search.forget()
        raise UserError(str(error).replace("checkpoint.best", "metric")) from error


def _train(config: Config, trial: optuna.Trial, folder: Path) -> dict[str, Any]:
    """Train one run, which prints to a file, and return its best score and that one's step.

    Raises:
        RunError: it did not finish.
    """
    run_class = type("ReportingRun", (TrialRun,), {"trial": trial})
    try:
        with (folder / f"{config.run_name}.log").open("a", encoding="utf-8") as file, redirect_stdout(file):
            best: dict[str, Any] | None = train(config, run_class=run_class).summary["best"]
    finally:
        release_memory()
    if best is None or not math.isfinite(best["value"]):
        raise NonFiniteError("no evaluation was finite")
    return best


def _complete(search: Search) -> list[FrozenTrial]:
    return [trial for trial in search.counted() if trial.state == TrialState.COMPLETE]


def _answer(search: Search) -> str:
    """Return the options of the best trial, to paste."""
    if not _complete(search):
        return "no trial is complete"
    best = search.study.best_trial
    return f"best: trial {best.number}; paste:\n{shlex.join(overrides_of(best.params))}"


def _rows(search: Search) -> list[list[str]]:
    """Return the head of the table, and a row for each trial, best first."""
    sign = -1 if search.study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL]
    ranked = sorted(
        search.counted(), key=lambda trial: (states.index(trial.state), sign * (trial.value or 0.0), trial.number)
    )
    rows = [["trial", *search.space, search.described["metric"], "at step", "state", "run"]]
    for trial in ranked:
        scores, value, params = trial.intermediate_values, trial.value, trial.params
        if trial.state != TrialState.COMPLETE and scores:
            value = scores[max(scores)]
        at = next((str(step) for step, score in scores.items() if score == value), "")
        options = [shown(params[key]) if key in params else "" for key in search.space]
        score = "" if value is None else loss(value)
        rows.append([str(trial.number), *options, score, at, trial.state.name.lower(), search.run_of(trial)])
    return rows
