"""An advice in MLflow: one run, sent once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from evidence.advice.publish import publish
from tests.evidence.advice.made import TINY, advice
from trainer.config.compose import compose


@pytest.fixture
def database(store: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect("mlflow.db")) as opened:
        yield opened


def test_an_advice_is_one_run_also_if_it_is_sent_again(database: sqlite3.Connection, folder: Path) -> None:
    (folder / "advice.json").write_text("{}")
    made = advice()
    config = compose(TINY)
    line = publish(made, config, "a sentence", [folder / "advice.json"])
    assert "in MLflow, " in line, line
    assert publish(made, config, "a sentence", []) == line
    ((name, run_id, status),) = database.execute("select name, run_uuid, status from runs").fetchall()
    assert (name, status) == ("advice: gpt2", "FINISHED")
    assert run_id in line
    metrics_of, tags_of = (dict(database.execute(f"select key, value from {each}")) for each in ("metrics", "tags"))
    assert (metrics_of["speed"], metrics_of["speed_low"], metrics_of["memory_mib"]) == (2.9, 2.85, 620)
    assert tags_of["winner"] == "bf16 + compile"
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
