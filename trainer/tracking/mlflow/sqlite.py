"""MLflow's SQLite file: set up under another name and renamed, so that a kill never leaves an incomplete database."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError
from trainer.files import flush, locked

log = logging.getLogger("mantissa")

LOCK_TIMEOUT_S = 60
QUIET_S = 10.0
"""Seconds in which an empty database must not have been written to: another program may be creating it."""


@contextmanager
def prepared(database: Path) -> Iterator[None]:
    """Hold the lock beside an SQLite file, within which the file is there, whole, and of this MLflow's schema.

    MLflow's own set-up is dozens of migrations, each committed by itself: two processes doing it at once crash, and
    one that is killed leaves a file that MLflow refuses from then on. So it is done to a file of another name, which
    is then renamed. A file that such a kill has left is set aside under another name; it holds no runs.

    Raises:
        UserError: the file is no SQLite database, or is one of another version of MLflow. It is not touched.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{database}-init.lock"), LOCK_TIMEOUT_S):
        if database.exists():
            _set_aside_half_made(database)
        if not database.exists():
            _create(database)
        yield


class _State(NamedTuple):
    tables: frozenset[str]
    revision: str | None
    """Of the schema, as alembic notes it after each migration."""
    used: bool
    """Whether it holds an experiment, which MLflow creates after the last migration, or a run."""


def _read(database: Path) -> _State:
    # Opening also rolls back what a killed process had begun, by the journal beside the file.
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        try:
            tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        except sqlite3.OperationalError:  # locked, or on a disk that fails
            raise
        except sqlite3.DatabaseError:
            raise UserError(f"{database} is not an SQLite database; move it, or set tracking.uri=…") from None
        version = "alembic_version" in tables and connection.execute("select version_num from alembic_version")
        row = version.fetchone() if version else None
        used = any(
            connection.execute(f"select 1 from {table} limit 1").fetchone()
            for table in ("experiments", "runs")
            if table in tables
        )
    return _State(frozenset(tables), row[0] if row else None, used)


@cache
def _revisions() -> tuple[str | None, frozenset[str]]:
    """Return the revision of this MLflow's schema, and all that this MLflow knows."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    scripts = ScriptDirectory.from_config(_get_alembic_config(""))
    return scripts.get_current_head(), frozenset(script.revision for script in scripts.walk_revisions())


def _set_aside_half_made(database: Path) -> None:
    """Rename a database whose creation was interrupted; refuse one that this MLflow would have to change."""
    head, known = _revisions()
    written_s = database.stat().st_mtime
    while (state := _read(database)).revision != head and not state.used:
        if not state.tables:
            database.unlink()
            return
        if "experiments" not in state.tables:  # the first table that MLflow makes
            raise UserError(f"{database} belongs to another program; set tracking.uri=sqlite:///another.db")
        if state.revision is not None and state.revision not in known:
            break
        if time.time() - written_s > QUIET_S:
            aside = _free_name(database.with_name(f"{database.name}.half-made"))
            database.rename(aside)
            log.warning(
                "%s was incomplete: its creation was interrupted. It has no runs; it is now %s. A new one is created.",
                database,
                aside.name,
            )
            return
        time.sleep(0.2)  # an MLflow server that was started at the same time is perhaps setting it up
        written_s = database.stat().st_mtime
    if state.revision == head:
        return
    if state.revision is None or state.revision in known:
        raise UserError(
            f"{database} was made by an older MLflow (schema {state.revision}). Copy it, then upgrade it with: "
            f"mlflow db upgrade sqlite:///{database.as_posix()}"
        )
    raise UserError(
        f"{database} was made by a newer MLflow (schema {state.revision}); upgrade mlflow, or set tracking.uri=…"
    )


def _create(database: Path) -> None:
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    partial = database.with_name(f".{database.name}.partial")
    for stale in partial.parent.glob(f"{partial.name}*"):  # of a set-up that was killed, with its journal
        stale.unlink()
    engine = create_sqlalchemy_engine(f"sqlite:///{partial.as_posix()}")
    try:
        _initialize_tables(engine)
    finally:
        engine.dispose()
    with closing(sqlite3.connect(partial)) as connection:  # a write-ahead log would stay behind under the old name
        connection.execute("pragma journal_mode = delete")
    flush(partial)
    partial.rename(database)
    flush(database.parent)


def _free_name(path: Path) -> Path:
    paths = chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))
    return next(free for free in paths if not free.exists())
