"""What is not done anew in every run of the product that a test starts, because it takes longer than the run itself.

``take`` is called in pytest's processes and in the server of ``tests.forks``, whose forks inherit it. Tests of these
things themselves import the originals before that, or start a process with ``subprocess``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock

from trainer.hardware import NATIVE, Hardware
from trainer.precision import kernels
from trainer.profiling import rates
from trainer.tracking import plots
from trainer.tracking.mlflow import store

STORE = "MANTISSA_TEST_STORE"
"""The environment's name of the MLflow store that others are copied from; the first that needs it makes it."""
RATES = {"fp32": 0.1, "tf32": 0.4, "bf16": 0.8, "fp16": 0.001, "fp8": 1.6}
draw, set_up = plots.plot_run, store.set_up


def take() -> None:
    """Take them all in this process."""
    kernels.times = made_up_times  # measuring takes time, and between equals chance decides
    rates.cached = lambda kind, of, work: RATES[of["format"]]
    store.set_up = copied  # MLflow's migrations
    plots.plot_run = lambda folder: None


def made_up_times(dtype: torch.dtype, hardware: Hardware) -> dict[str, dict[str, dict[str, float]]]:
    """As ``kernels.times`` on a machine whose processor is ten times faster in formats that it has instructions for."""
    native = hardware.support({torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]) == NATIVE
    took = {"native": 0.1 if native else 10.0, "fp32": 1.0}
    return {name: dict.fromkeys(operator.examples(), took) for name, operator in kernels.OPERATORS.items()}


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
