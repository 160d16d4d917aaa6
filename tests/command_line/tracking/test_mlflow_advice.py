"""An advice in MLflow: a run above the candidates' runs, sent once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from evidence.advice.publish import publish
from tests.evidence.advice.made import TINY, advice, measured
from trainer.config.compose import compose


@pytest.fixture
def database(store: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect("mlflow.db")) as opened:
        yield opened


def test_candidates_are_below_the_advice_and_a_second_time_changes_nothing(
    database: sqlite3.Connection, folder: Path
) -> None:
    (folder / "advice.json").write_text("{}")
    made = advice(measured("it's odd", 1.5, 900, "threads=1"))
    config = compose(TINY)
    line = publish(made, config, "a sentence", [folder / "advice.json"])
    counts = "select (select count(*) from runs), (select count(*) from metrics), (select count(*) from tags)"
    before = database.execute(counts).fetchone()
    made.quality = {"verdict": "EQUIVALENT"}  # found out later
    assert publish(made, config, "a sentence", []) == line
    runs, metrics, tags = database.execute(counts).fetchone()
    assert (runs, metrics, tags) == (before[0], before[1], before[2] + 1)
    ids = dict(database.execute("select name, run_uuid from runs"))
    statuses = dict(database.execute("select name, status from runs"))
    assert statuses.pop("fp16") == statuses.pop("bf16, 1 thread") == "FAILED"
    assert statuses == dict.fromkeys(("advice: gpt2", "bf16 + compile", "bf16", "it's odd", "fp32"), "FINISHED")
    parents = dict(database.execute("select run_uuid, value from tags where key = 'mlflow.parentRunId'"))
    assert parents == {run: ids["advice: gpt2"] for name, run in ids.items() if name != "advice: gpt2"}
    assert ids["advice: gpt2"] in line
    mine = "select key, value from {} where run_uuid = ?"
    speeds = dict(database.execute(mine.format("metrics"), (ids["it's odd"],)))
    assert (speeds["speed"], speeds["speed_low"], speeds["memory_mib"]) == (1.5, 1.45, 900)
    assert dict(database.execute(mine.format("params"), (ids["it's odd"],)))["overrides"] == "threads=1"
    said = dict(database.execute(mine.format("tags"), (ids["advice: gpt2"],)))
    assert (said["winner"], said["quality"]) == ("bf16 + compile", "EQUIVALENT")
    assert dict(database.execute(mine.format("tags"), (ids["fp16"],)))["reason"] == "the loss is not finite"
    assert list((folder / "mlartifacts").rglob("advice.json"))
    assert database.execute("select name from experiments where name like '%advice'").fetchall() == [("gpt2-advice",)]


def test_local_runs_are_not_sent_and_a_store_that_fails_is_named(
    database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publish(advice(), compose([*TINY, "tracking=local"]), "", []) == ""
    assert database.execute("select count(*) from runs").fetchone() == (0,)
    monkeypatch.setattr("trainer.tracking.mlflow.store.connect", lambda uri: json.loads("no store"))
    line = publish(advice(), compose(TINY), "", [])
    assert line.startswith("the advice is not in MLflow (")
