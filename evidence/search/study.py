"""The study of a search: Optuna's, in an SQLite file, which several processes work on.

A trial belongs to a process as long as that holds the trial's lock. A trial that is running and whose lock is free was
killed: it is marked as failed, and another one with the same proposal continues its run.
"""

from __future__ import annotations

import logging
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from evidence.search.space import Space
from trainer.errors import UserError
from trainer.files import locked, make_folder

DATABASE = "optuna.db"
_SEARCH, _RUN = "search", "run"
"""Attributes of Optuna's studies and trials."""


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


def studies(output_dir: Path) -> RDBStorage:
    """Return the studies of a folder. Their database is made where there is none."""
    url = f"sqlite:///{(output_dir / DATABASE).absolute().as_posix()}"
    return RDBStorage(url, engine_kwargs={"poolclass": NullPool})  # a pool would never close its connections


def open_study(
    name: str, output_dir: Path, described: dict[str, Any], maximise: bool, pruner: BasePruner
) -> optuna.Study:
    """Open the study of this name, or make it.

    Args:
        name: of the study.
        output_dir: of the runs; the SQLite file is there.
        described: what makes it this search, as JSON; a study that was begun with another one is refused.
        maximise: whether the highest value is the best.
        pruner: see ``pruner_of``.

    Raises:
        UserError: the study is of another search.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # failures are exceptions
    logging.getLogger("alembic").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    make_folder(output_dir)
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
            for key, value in {_SEARCH: described, "mlflow_key": uuid.uuid4().hex, "began_s": time.time()}.items():
                study.set_user_attr(key, value)
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
    """For locks and for what the runs print."""
    space: Space
    trials: int
    seed: int

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes of this search from taking trials meanwhile."""
        return locked(self.folder / ".lock")

    @contextmanager
    def next(self) -> Iterator[optuna.Trial | None]:
        """Yield the next trial, or None when all of them are taken. First those that a kill has interrupted."""
        with ExitStack() as stack:
            with self.alone():
                self._repeat_interrupted()
                every = self.study.get_trials(deepcopy=False)
                if len(self.counted()) >= self.trials and all(each.state != TrialState.WAITING for each in every):
                    yield None
                    return
                # Random numbers depend on the seed and the trial's number only: so several processes do not propose the
                # same, and a search that was killed proposes what it would have proposed.
                seed = int(np.random.SeedSequence((self.seed, len(every))).generate_state(1)[0])
                self.study.sampler = TPESampler(seed=seed, constant_liar=True)
                trial = self.study.ask(fixed_distributions=self.space)
                stack.enter_context(self._taken(trial.number))
            yield trial

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

    def _repeat_interrupted(self) -> None:
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            with suppress(TimeoutError), self._taken(trial.number):  # else a process is working on it
                self.study.tell(trial.number, state=TrialState.FAIL)
                self.study.enqueue_trial(trial.params, user_attrs={_RUN: self.run_of(trial)})

    def _taken(self, number: int) -> AbstractContextManager[None]:
        return locked(self.folder / f".trial-{number}.lock", timeout_s=0)
