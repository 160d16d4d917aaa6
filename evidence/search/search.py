"""A search by scripts/search.py: Optuna proposes, every trial is a run of train.py's in this process.

The study is in an SQLite file, which several processes work on. A trial belongs to a process as long as that holds the
trial's lock. A trial that is running and whose lock is free was killed: it is marked as failed, and another one with
the same proposal continues its run.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from evidence.search.report import AT_STEP, WHY, lines, publish_search
from evidence.search.space import Space, check_space, overrides_of, parse_space
from evidence.search.trial import Pruned, reporting_to
from mantissa.display import duration, loss
from trainer.config.compose import compose
from trainer.config.options import parse
from trainer.config.schema import Config
from trainer.errors import NonFiniteError, OutOfMemory, UserError, first_line, is_out_of_memory, nearest
from trainer.files import check_output_dir, locked, make_folder
from trainer.hardware import detect
from trainer.parallel.world import launched_processes
from trainer.run.command import release_memory
from trainer.run.resume import SAME
from trainer.run.start import train

DATABASE = "optuna.db"
PRUNERS = ("median", "hyperband", "none")
_SEARCH, _RUN = "search", "run"
"""Attributes of Optuna's studies and trials."""


@dataclass
class SearchOptions:
    """Of scripts/search.py."""

    trials: int = 20
    pruner: str = "median"
    metric: str = "valid/loss"
    study: str = ""


def main(arguments: list[str]) -> int:
    """Search a space, and print its trials and the best of them; the exit code is 1 where no trial was complete.

    Raises:
        UserError: a space that is none, or a mistake of train.py's.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, others = parse(arguments, SearchOptions, "overrides")
    space, overrides = parse_space(others)
    if options.pruner not in PRUNERS:
        near = nearest(options.pruner, PRUNERS)
        raise UserError(f"pruner={options.pruner} is not a pruner ({', '.join(PRUNERS)}){near}")
    if launched_processes():
        raise UserError("trials run in one process each; start the command without torchrun, several times for several")
    first = check_space(space, overrides)
    if first.parallel.kind != "single":
        raise UserError(f"trials run in one process each; leave out parallel={first.parallel.kind}")
    if "/" in options.study or options.study in (".", ".."):
        raise UserError(f"study={options.study} must be the name of a folder, without a slash")
    check_output_dir(first.output_dir)
    name = options.study or first.name
    plan = first.resolve(detect(first.device)).plan
    kept = sorted(
        text for text in overrides if text.partition("=")[0].partition(".")[0] not in ("output_dir", "tracking")
    )
    typed = sorted(argument for argument in others if argument not in overrides)
    search = open_search(
        name,
        Path(first.output_dir).expanduser(),
        space,
        {"space": typed, "options": kept, "metric": options.metric},
        maximise=not first.recipe.falls(options.metric),
        trials=options.trials,
        seed=first.seed,
        pruner=pruner_of(options.pruner, plan.eval_every, plan.steps),
    )
    print(
        f"study {name}: {len(search.counted())} of {options.trials} trials; runs print to {search.folder}", flush=True
    )
    shown = {"space": " ".join(typed), "options": " ".join(kept), "metric": options.metric, "pruner": options.pruner}
    parent, problem = publish_search(first, search, options.metric, "RUNNING", shown)
    status = "KILLED"
    try:
        search.run(overrides, options.metric, parent)
        status = "FINISHED"
    finally:
        if parent:
            _, problem = publish_search(first, search, options.metric, status)
        if problem:
            print(f"MLflow has not taken the search ({problem}); its trials are in {search.folder.parent.parent}")
    print("\n" + "\n".join(lines(search, options.metric, overrides)))
    return int(not any(trial.state == TrialState.COMPLETE for trial in search.counted()))


def pruner_of(name: str, first: int, steps: int) -> BasePruner:
    """Return a pruner.

    Args:
        name: ``median`` (Golovin et al., Google Vizier, 2017), ``hyperband`` (Li et al., 2018) or ``none``.
        first: optimizer steps before the first evaluation.
        steps: of a whole run.
    """
    if name == "hyperband":
        return HyperbandPruner(min_resource=first, max_resource=max(first, steps))
    return MedianPruner() if name == "median" else NopPruner()


@dataclass
class Search:
    """A study, and how many trials it is to have in the end."""

    study: optuna.Study
    name: str
    folder: Path
    """For locks and for what the runs print."""
    space: Space
    trials: int
    seed: int

    def run(self, overrides: list[str], metric: str, parent: str | None) -> None:
        """Train what the study lacks, one run after the other.

        Args:
            overrides: of every run.
            metric: what is searched for, such as ``valid/loss``.
            parent: MLflow's id of the search.

        Raises:
            UserError: the first runs were refused; later ones only fail.
            KeyboardInterrupt: of Ctrl-C; the run has saved a checkpoint.
        """
        while True:
            with self.next() as trial:
                if trial is None:
                    return
                proposed = overrides_of(trial.params)
                print(f"trial {trial.number}: {' '.join(proposed)}", flush=True)
                config = compose([*overrides, *proposed, f"checkpoint.best={metric}"])
                tracking = replace(config.tracking, parent=parent)
                config = replace(config, run_name=self.run_of(trial), resume=SAME, tracking=tracking)
                began = time.monotonic()
                try:
                    state, value, why = self._train(config, trial)
                except UserError as error:
                    state, value, why = TrialState.FAIL, None, first_line(error)
                    if not any(each.state in (TrialState.COMPLETE, TrialState.PRUNED) for each in self.counted()):
                        self.study.tell(trial, state=state)
                        if len(self.counted()) == 1:  # nothing was trained: the corrected command begins anew
                            optuna.delete_study(study_name=self.name, storage=_url(self.folder.parent.parent))
                        raise UserError(str(error).replace("checkpoint.best", "metric")) from error
                if why:
                    trial.set_user_attr(WHY, why)
                self.study.tell(trial, value, state=state)
                said = f"failed: {why}" if state == TrialState.FAIL else why
                done = f"{metric} {loss(value)} at step {trial.user_attrs.get(AT_STEP)}"
                print(f"  {said or done}, {duration(time.monotonic() - began)}", flush=True)

    def _train(self, config: Config, trial: optuna.Trial) -> tuple[TrialState, float | None, str]:
        """Train one run, which prints to a file; return how it ended, its best metric, and why it did not finish."""
        try:
            with (self.folder / f"{config.run_name}.log").open("a", encoding="utf-8") as file, redirect_stdout(file):
                best = train(config, run_class=reporting_to(trial))["best"]
        except Pruned as error:
            return TrialState.PRUNED, None, str(error)
        except (NonFiniteError, OutOfMemory) as error:
            return TrialState.FAIL, None, first_line(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return TrialState.FAIL, None, f"out of memory ({first_line(error)})"
        finally:
            release_memory()
        if best is None or not math.isfinite(best["value"]):
            return TrialState.FAIL, None, "no evaluation was finite"
        trial.set_user_attr(AT_STEP, int(best["step"]))
        return TrialState.COMPLETE, best["value"], ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes of this search from taking trials meanwhile."""
        with locked(self.folder / ".lock"):
            yield

    @contextmanager
    def next(self) -> Iterator[optuna.Trial | None]:
        """Yield the next trial, or None when all of them are taken. First those that a kill has interrupted."""
        with ExitStack() as stack:
            with self.alone():
                self._repeat_interrupted()
                waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
                if not waiting and len(self.counted()) >= self.trials:
                    yield None
                    return
                # Random numbers depend on the seed and the trial's number only: so several processes do not propose the
                # same, and a search that was killed proposes what it would have proposed.
                number = len(self.study.get_trials(deepcopy=False))
                seed = int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])
                self.study.sampler = TPESampler(seed=seed, constant_liar=True)
                trial = self.study.ask(fixed_distributions=self.space)
                stack.enter_context(locked(self._lock(trial.number), timeout_s=0))
            yield trial

    def counted(self) -> list[FrozenTrial]:
        """Return the trials, without those that another one has continued and those that wait for a process."""
        newest = {self.run_of(trial): trial for trial in self.study.get_trials(deepcopy=False)}
        return [trial for trial in newest.values() if trial.state != TrialState.WAITING]

    def run_of(self, trial: Any) -> str:
        """Return the name of a trial's run: of the trial that it continues, where it continues one."""
        return str(trial.user_attrs.get(_RUN, f"{self.name}-t{trial.number}"))

    def _repeat_interrupted(self) -> None:
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            try:
                with locked(self._lock(trial.number), timeout_s=0):
                    self.study.tell(trial.number, state=TrialState.FAIL)
                    self.study.enqueue_trial(trial.params, user_attrs={_RUN: self.run_of(trial)})
            except TimeoutError:  # a process is working on it
                continue

    def _lock(self, number: int) -> Path:
        return self.folder / f".trial-{number}.lock"


def _url(output_dir: Path) -> str:
    return f"sqlite:///{(output_dir / DATABASE).absolute().as_posix()}"


def open_search(
    name: str,
    output_dir: Path,
    space: Space,
    described: dict[str, Any],
    *,
    maximise: bool,
    trials: int,
    seed: int,
    pruner: BasePruner,
) -> Search:
    """Open the study of this name, or make it.

    Args:
        name: of the study.
        output_dir: of the runs; the SQLite file is there.
        space: what is searched.
        described: what makes it this search, as JSON; a study that was begun with another one is refused.
        maximise: whether the highest value is the best.
        trials: of the whole study.
        seed: of the proposals.
        pruner: see ``pruner_of``.

    Raises:
        UserError: the study is of another search.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # failures are exceptions
    logging.getLogger("alembic").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    folder = output_dir / "search" / name
    make_folder(folder)
    with locked(output_dir / f".{DATABASE}.lock"):  # two processes that make the tables at the same time both fail
        study = optuna.create_study(
            storage=_url(output_dir),
            study_name=name,
            load_if_exists=True,
            direction="maximize" if maximise else "minimize",
            pruner=pruner,
        )
        known = study.user_attrs
        if _SEARCH not in known:
            for key, value in {_SEARCH: described, "mlflow_key": uuid.uuid4().hex, "began_s": time.time()}.items():
                study.set_user_attr(key, value)
        elif known[_SEARCH] != described:
            different = [key for key in described if known[_SEARCH].get(key) != described[key]]
            raise UserError(
                f"the study {name} in {output_dir / DATABASE} is another search ({', '.join(different)} differ); "
                "give this one a name of its own with study=NAME"
            )
    return Search(study, name, folder, space, trials, seed)
