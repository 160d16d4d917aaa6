"""The study of a search: Optuna's trials in an SQLite file, which several processes work on.

A trial belongs to a process as long as it holds the trial's lock. A trial that is running and whose lock is free was
killed: it is marked as failed, and another one with the same proposal continues its run.
"""

from __future__ import annotations

import logging
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from evidence.search.space import Dimension
from trainer.errors import UserError
from trainer.files import locked, make_folder

DATABASE = "optuna.db"
_SEARCH, _RUN, _CONTINUED, _KEY, _BEGAN = "search", "run", "continued_by_another", "mlflow_key", "began_s"
"""Attributes of Optuna's studies and trials."""


class ByNumber(BaseSampler):
    """Optuna's TPE sampler, whose random numbers depend on the seed and the trial's number only.

    So several processes do not propose the same, and a search that was killed proposes what it would have proposed.
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._number = -1
        self._sampler = TPESampler()

    def _of(self, trial: FrozenTrial) -> TPESampler:
        if trial.number != self._number:
            seed = int(np.random.SeedSequence((self._seed, trial.number)).generate_state(1)[0])
            self._number, self._sampler = trial.number, TPESampler(seed=seed, constant_liar=True)
        return self._sampler

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._of(trial).after_trial(study, trial, state, values)


def pruner_of(name: str, first: int, steps: int) -> BasePruner:
    """Return a pruner.

    Args:
        name: ``median`` (Golovin et al., Google Vizier, 2017), ``hyperband`` (Li et al., 2018) or ``none``.
        first: optimizer steps before the first evaluation.
        steps: of a whole run.
    """
    if name == "median":
        return MedianPruner()
    if name == "hyperband":
        return HyperbandPruner(min_resource=first, max_resource=max(first, steps))
    return NopPruner()


@dataclass
class Search:
    """A study, and how many trials it is to have in the end."""

    study: Any
    """Optuna's."""
    name: str
    folder: Path
    """For locks and for what the runs print."""
    space: dict[str, BaseDistribution]
    trials: int

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes of this search from taking trials meanwhile."""
        with locked(self.folder / ".lock"):
            yield

    @contextmanager
    def next(self) -> Iterator[Any]:
        """Yield the next trial, Optuna's, with ``run_of`` for its run; None: all of them are taken.

        First those that a kill has interrupted.
        """
        with ExitStack() as stack:
            with self.alone():
                self._repeat_interrupted()
                if not self.waiting() and len(self.counted()) >= self.trials:
                    yield None
                    return
                trial = self.study.ask(fixed_distributions=self.space)
                if _RUN not in trial.user_attrs:
                    trial.set_user_attr(_RUN, f"{self.name}-t{trial.number}")
                stack.enter_context(locked(self._lock(trial.number), timeout_s=0))
            yield trial

    def counted(self) -> list[FrozenTrial]:
        """Return the trials, without those that another one has continued and those that wait for a process."""
        return [
            trial
            for trial in self.study.get_trials(deepcopy=False)
            if _CONTINUED not in trial.user_attrs and trial.state != TrialState.WAITING
        ]

    def waiting(self) -> list[FrozenTrial]:
        """Return the trials that will continue an interrupted one."""
        found: list[FrozenTrial] = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return found

    def _repeat_interrupted(self) -> None:
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            try:
                with locked(self._lock(trial.number), timeout_s=0):
                    attributes = {_RUN: run_of(trial) or f"{self.name}-t{trial.number}"}
                    # (Optuna's public classes set attributes of the trial that a process has asked for only.)
                    self.study._storage.set_trial_user_attr(trial._trial_id, _CONTINUED, True)
                    self.study.tell(trial.number, state=TrialState.FAIL)
                    self.study.enqueue_trial(trial.params, user_attrs=attributes)
            except TimeoutError:  # a process is working on it
                continue

    def _lock(self, number: int) -> Path:
        return self.folder / f".trial-{number}.lock"


def run_of(trial: Any) -> str:
    """Return the name of a trial's run; empty: it was killed before it had one."""
    return str(trial.user_attrs.get(_RUN, ""))


def open_search(
    name: str,
    output_dir: Path,
    space: list[Dimension],
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
    _silence()
    folder = output_dir / "search" / name
    make_folder(folder)
    url = f"sqlite:///{(output_dir / DATABASE).absolute().as_posix()}"
    with locked(output_dir / f".{DATABASE}.lock"):  # two processes that make the tables at the same time both fail
        study = optuna.create_study(
            storage=url,
            study_name=name,
            load_if_exists=True,
            direction="maximize" if maximise else "minimize",
            sampler=ByNumber(seed),
            pruner=pruner,
        )
        known = study.user_attrs
        if _SEARCH not in known:
            for key, value in {_SEARCH: described, _KEY: uuid.uuid4().hex, _BEGAN: time.time()}.items():
                study.set_user_attr(key, value)
        elif known[_SEARCH] != described:
            different = [key for key in described if known[_SEARCH].get(key) != described[key]]
            raise UserError(
                f"the study {name} in {output_dir / DATABASE} is another search ({', '.join(different)} differ); "
                "give this one a name of its own with study=NAME"
            )
    return Search(study, name, folder, {each.key: each.distribution() for each in space}, trials)


def forget(search: Search) -> None:
    """Remove a study in which nothing was trained."""
    optuna.delete_study(study_name=search.name, storage=search.study._storage)


def mlflow_key(search: Search) -> tuple[str, float]:
    """Return what finds the search in MLflow, and when it began, in seconds since the epoch."""
    return search.study.user_attrs[_KEY], search.study.user_attrs[_BEGAN]


def _silence() -> None:
    """Stop what Optuna and Alembic print about their work; failures are exceptions."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
