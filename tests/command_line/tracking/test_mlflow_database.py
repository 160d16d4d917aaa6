"""MLflow's SQLite file: its set-up is killed, or it is none, or another's."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests import forks, shortcuts
from trainer.errors import UserError
from trainer.tracking.refusal import refusal
from trainer.tracking.store import connect

KILLED = """
import os, signal, sys, warnings
from trainer.tracking.store import connect, import_mlflow
uri = sys.argv[1]
import_mlflow(uri)
from sqlalchemy import event
from sqlalchemy.engine import Engine

def child(moment):
    def die(connection, cursor, statement, *_):
        if statement.strip().startswith(moment):
            os.kill(os.getpid(), signal.SIGKILL)
    event.listen(Engine, "after_cursor_execute", die)
    connect(uri)
    os._exit(0)

for moment in sys.argv[2:]:
    pid = os.fork()
    if not pid:
        child(moment)
    print(moment, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
connect(uri)
"""


def test_a_set_up_that_was_killed_is_done_anew(tmp_path: Path) -> None:
    """Within a migration, and after all of them. What is killed are forks of one process, for speed."""
    moments = ["DROP TABLE metrics", "INSERT INTO experiments"]
    done = forks.run(
        [sys.executable, "-c", KILLED, f"sqlite:///{tmp_path}/a folder/mlflow.db", *moments],
        env={name: value for name, value in os.environ.items() if name != shortcuts.STORE},  # which would be copied
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{moment} -9" for moment in moments]
    files = sorted(path.name for path in (tmp_path / "a folder").iterdir())
    assert files == ["mlflow.db", "mlflow.db-init.lock"]
    assert integrity(tmp_path / "a folder" / "mlflow.db") == "ok"


def integrity(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        return str(connection.execute("pragma integrity_check").fetchone()[0])


def test_a_file_that_is_no_database_is_named_at_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes.db"
    notes.write_bytes(b"notes" * 1000)
    with pytest.raises(UserError, match=r"notes\.db is not an SQLite database; move it, or set tracking\.uri="):
        connect(f"sqlite:///{notes}")
    assert notes.read_bytes() == b"notes" * 1000


def test_databases_that_are_not_this_mlflows(folder: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(database: Path) -> str:
        with pytest.raises(Exception) as raised:  # of many kinds, by MLflow
            connect(uri := f"sqlite:///{database}")
        found = refusal(raised.value, uri)
        assert isinstance(found, UserError)
        return str(found)

    with closing(sqlite3.connect(folder / "study.db")) as other:
        other.execute("create table studies (id int)")
    assert "is the database of another program (it has studies)" in refused(folder / "study.db")
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: path != folder / "mlflow.db")  # root may write any file
        assert "mlflow.db cannot be written (" in refused(folder / "mlflow.db")
    newer = Path(shutil.copy(folder / "mlflow.db", folder / "newer.db"))
    with closing(sqlite3.connect(newer)) as own:
        own.execute("update alembic_version set version_num = 'f00f00f00f00'")
        own.commit()
    assert "the tables of another MLflow than this one" in refused(newer)
