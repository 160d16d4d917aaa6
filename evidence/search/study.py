"""The study of a search: Optuna's, in an SQLite file, which several processes work on.

Optuna's heartbeat finds trials whose process was killed; each is marked as failed, and another one with the same
proposal continues its run.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from evidence.search.space import Space
from trainer.errors import NonFiniteError, OutOfMemory, RunError, UserError
from trainer.files import locked
from trainer.tracking.store import sqlite_uri

DATABASE = "optuna.db"
HEARTBEAT_S, GRACE_S = 10, 60
"""Seconds between two signs of life of a trial, and seconds without one after which its process counts as killed."""
_SEARCH, _RUN = "search", "run"
"""Attributes of Optuna's studies and trials."""
_retry = partial(RetryHeartbeatStaleTrialCallback, inherit_intermediate_values=True)
"""Proposes what a trial that was killed has tried once more."""


def studies(output_dir: Path) -> RDBStorage:
    """Return the studies of a folder. Their database is made where there is none."""
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    url = sqlite_uri((output_dir / DATABASE).absolute())
    return RDBStorage(
        url,
        engine_kwargs={"poolclass": NullPool},  # a pool would never close its connections
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
        heartbeat_stale_trial_callback=_retry(),
    )


def open_study(
    name: str, output_dir: Path, described: dict[str, str], maximise: bool, pruner: BasePruner
) -> optuna.Study:
    """Open the study of this name, or make it.

    Args:
        name: of the study.
        output_dir: of the runs; the SQLite file is there.
        described: what makes it this search, as JSON; a study that was begun with another one is refused.
        maximise: whether the highest value is the best.
        pruner: of trials.

    Raises:
        UserError: the study is of another search.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # failures are exceptions
    logging.getLogger("alembic").setLevel(logging.WARNING)
    output_dir.mkdir(parents=True, exist_ok=True)
    with locked(output_dir / f".{DATABASE}.lock"):  # two processes that make the tables at the same time both fail
        study = optuna.create_study(
            storage=studies(output_dir),
            study_name=name,
            load_if_exists=True,
            direction="maximize" if maximise else "minimize",
            pruner=pruner,
        )
        known = study.user_attrs.get(_SEARCH)
        if known is None:
            study.set_user_attr(_SEARCH, described)
        elif different := [key for key in described if known.get(key) != described[key]]:
            raise UserError(
                f"the study {name} in {output_dir / DATABASE} is another search ({', '.join(different)} differ); "
                "give this one a name of its own with study=NAME"
            )
    return study


@dataclass
class Search:
    """A study, and how many trials it is to have in the end."""

    study: optuna.Study
    folder: Path
    """Folder for what the runs print."""
    space: Space
    trials: int
    seed: int
    described: dict[str, str]
    """Space, options and metric, in words."""

    @property
    def trained(self) -> bool:
        """Whether a trial was trained, so that a mistake is one of the later proposal alone."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return bool(self.study.get_trials(deepcopy=False, states=states))

    def run(self, objective: Callable[[optuna.Trial], float]) -> None:
        """Take trials until all are taken, first those that a kill has interrupted.

        Args:
            objective: trains a trial and returns its score; it raises Optuna's ``TrialPruned`` where it is pruned. Any
                other ``RunError`` fails the trial; a ``UserError`` ends the search if no trial was trained yet.
        """

        def take(trial: optuna.Trial) -> float:
            for key, distribution in self.space.items():
                suggest(trial, key, distribution)
            trial.set_user_attr(_RUN, self.run_of(trial))
            try:
                return objective(trial)
            except KeyboardInterrupt:  # the next call continues its run
                _retry()(self.study, self.study.trials[trial.number])
                raise

        while True:
            fail_stale_trials(self.study)
            every = self.study.get_trials(deepcopy=False)
            waiting = any(trial.state == TrialState.WAITING for trial in every)
            if len(self.counted()) >= self.trials and not waiting:
                return
            # Random numbers depend on the seed and the trial's number only: so several processes do not propose the
            # same, and a search that was killed proposes what it would have proposed.
            seed = int(np.random.SeedSequence((self.seed, len(every))).generate_state(1)[0])
            self.study.sampler = TPESampler(seed=seed, constant_liar=True)
            self.study.optimize(take, n_trials=1, catch=(RunError,) if self.trained else (NonFiniteError, OutOfMemory))

    def counted(self) -> list[FrozenTrial]:
        """Return the trials, without those that another one has continued and those that wait for a process."""
        newest = {self.run_of(trial): trial for trial in self.study.get_trials(deepcopy=False)}
        return [trial for trial in newest.values() if trial.state != TrialState.WAITING]

    def forget(self) -> None:
        """Remove the study."""
        optuna.delete_study(study_name=self.study.study_name, storage=studies(self.folder.parent.parent))

    def run_of(self, trial: Any) -> str:
        """Return the name of a trial's run: of the trial that it continues, where it continues one."""
        return str(trial.user_attrs.get(_RUN, f"{self.study.study_name}-t{trial.number}"))


def suggest(trial: optuna.Trial, key: str, distribution: BaseDistribution) -> None:
    """Let a trial propose a value for an option."""
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(key, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
    elif isinstance(distribution, FloatDistribution):
        trial.suggest_float(key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
