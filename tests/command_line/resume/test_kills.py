"""Killed with SIGKILL from outside, again and again, and resumed: nothing is lost, nothing is doubled.

The long form, over three recipes: python -m tests.kills kills=200
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kills import compared, disturbed, job_of, undelivered
from trainer.seals import read_sealed, sha256, write_sealed

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

STEPS = 16


def test_a_run_that_is_killed_until_it_is_done_equals_one_that_was_not(folder: Path, empty_store: Path) -> None:
    """The database's set-up is killed in test_mlflow_database.py; here it exists, to save its seconds."""
    job = job_of("bignet", STEPS, "run")
    for name in ("whole", "killed"):
        (folder / name).mkdir()
        shutil.copy(empty_store, folder / name / "mlflow.db")
    draw = random.Random()  # other moments every time
    _, whole = disturbed(job, folder / "whole", [], draw)
    _, killed = disturbed(job, folder / "killed", ["start", "training", "closing", "delivery"], draw)
    assert compared(whole, killed, STEPS) == []

    # The comparison must be able to detect differences.
    with sqlite3.connect(folder / "killed" / "mlflow.db") as database:
        database.execute("insert into metrics select key, value, timestamp + 1, run_uuid, step, is_nan from metrics "
                         "where key = 'loss' and step = 8")  # fmt: skip
        database.execute("delete from metrics where key = 'lr' and step = 12")
    database.close()
    assert undelivered(killed) == ["('lr', 12) is not in MLflow", "('loss', 8) 2 times in MLflow"]
    rng = killed / "checkpoints" / f"step-{STEPS:08d}" / "rng.safetensors"
    states = load_file(rng)
    save_file({name: state + 1 if state.dtype == torch.uint8 else state for name, state in states.items()}, rng)
    manifest = read_sealed(rng.with_name("manifest.json"))
    manifest["sha256"][rng.name] = sha256(rng)
    write_sealed(rng.with_name("manifest.json"), manifest)
    assert any(difference.startswith("tensor rng/") for difference in compared(whole, killed, STEPS))
