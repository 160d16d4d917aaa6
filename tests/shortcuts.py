"""What is not done anew in every run of the product that a test starts, because it takes as long as the run itself.

``take`` is called in pytest's processes and in the server of ``tests.forks``, whose forks inherit it. Tests of these
things themselves import the originals before that, or start a process with ``subprocess``.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
from pathlib import Path

from filelock import FileLock

from trainer.profiling import rates
from trainer.run import provenance, start
from trainer.tracking import plots, store

STORE = "MANTISSA_TEST_STORE"
"""The environment's name of the MLflow store that others are copied from; the first that needs it makes it."""
RATES = {"fp64": 0.05, "fp32": 0.1, "tf32": 0.4, "bf16": 0.8, "fp16": 0.001, "fp8": 1.6}
draw, set_up = plots.plot_run, store.set_up


def take() -> None:
    """Take them all in this process."""
    rates.cached = lambda kind, of, work: RATES[of["format"]]
    store.set_up = copied  # MLflow's migrations
    plots.plot_run = lambda folder: None
    start._leave_garbage_alone = lambda stack: gc.enable()  # the processes of tests freeze it once
    for name in ("_git", "_version"):
        setattr(provenance, name, functools.cache(getattr(provenance, name)))


def copied(database: Path) -> None:
    """As ``store.set_up``, which is done where there is no store to copy."""
    if STORE in os.environ:
        shutil.copy(migrated(), database)
    else:
        set_up(database)


def migrated() -> Path:
    """An MLflow store that has been through its migrations, to be copied."""
    whole = Path(os.environ[STORE])
    with FileLock(f"{whole}.lock"):
        if not whole.exists():
            set_up(whole)
    return whole
