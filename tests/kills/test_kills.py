"""Killed with SIGKILL again and again, and resumed: nothing is lost, doubled or left over.

The long form, with all kinds of kills, of ranks and of MLflow's server too: python -m tests.kills kills=500
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kills.harness import compared, placed, undelivered
from trainer.checkpoint.schema import write_manifest
from trainer.files import read_json, sha256

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def test_a_run_that_is_killed_until_it_is_done_equals_one_that_was_not(tmp_path: Path, empty_store: Path) -> None:
    """In a step, then at other places every time. The database's set-up is killed in test_mlflow_database.py."""
    with placed("bignet", tmp_path / "whole", empty_store) as place:
        assert place.start("file:0:0").wait() == 0, place.log.read_text()
        whole, counts = place.until_done(), json.loads((place.folder / "counts.json").read_text())
    with placed("bignet", tmp_path / "killed", empty_store, counts=counts) as place:
        # Within step 6: MLflow and the log have the line of step 4, the newest checkpoint is that of step 3.
        middle = counts["accumulation"] * 11 // 48
        assert place.start(f"accumulation:{middle}:0").wait() != 0
        happened = [moment for moment in ("export", "artifact") if place.kill_at(moment)]
        killed = place.until_done()
    assert not any(compared(whole, killed).values()), (happened, compared(whole, killed))

    # The comparison must be able to detect differences.
    with sqlite3.connect(tmp_path / "killed" / "mlflow.db") as database:
        database.execute("insert into metrics select key, value, timestamp + 1, run_uuid, step, is_nan from metrics "
                         "where key = 'train/loss' and step = 8")  # fmt: skip
        database.execute("delete from metrics where key = 'lr' and step = 12")
    database.close()
    assert undelivered(killed) == ["('lr', 12) is not in MLflow", "('train/loss', 8) 2 times in MLflow"]
    rng = killed / "checkpoints" / "step-00000024" / "rng.safetensors"
    states = load_file(rng)
    save_file({name: state + 1 if state.dtype == torch.uint8 else state for name, state in states.items()}, rng)
    manifest = read_json(rng.with_name("manifest.json"))
    manifest["sha256"][rng.name] = sha256(rng)
    write_manifest(rng.parent, manifest)
    assert any(difference.startswith("tensor rng/") for difference in compared(whole, killed)["bits"])
