"""MLflow's tracking store: its address, the connection, finding and creating runs."""

from __future__ import annotations

import errno
import getpass
import json
import logging
import os
import posixpath
import re
import shlex
import sqlite3
import sys
import uuid
import zlib
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from trainer.errors import UserError, redacted
from trainer.files import flush, locked

if TYPE_CHECKING:
    from mlflow import MlflowClient

VIEW = "mantissa"
"""Name of the view of an experiment's runs, in addresses: ``viewStateShareKey=…``."""
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
"""The tag of an experiment that holds the view: without one, MLflow's table has no column of a metric or a tag."""
_METRICS = [f"metrics.`{name}`" for name in ("best_loss", "throughput", "peak_memory_mib", "process_memory_mib")]
_NO_COLUMN = ("run_name", "precision.mode", "hardware.")
"""Prefixes of params that never become columns: ``run_name`` and ``precision.mode`` are shown already, ``hardware.`` is
not swept."""
_MOST_PARAMS = 12
"""Params in the view; MLflow takes 5,000 characters."""
GROUP_TAG = "group"
"""The tag that runs of one sweep, search or comparison share: its name."""
SWEPT_TAG = "swept"
"""The tag of a sweep's runs that has its keys."""
KEY_TAG = "mantissa.key"
"""The tag that holds the key of a run (``TrackedRun.key``)."""
_SEEN_FIRST = re.compile(r"loss|\w+_per_s|step_time_s|(process_)?memory_bytes|mfu")
"""What training learns, how fast and in how much memory, of the metrics of ``Monitor``."""
LOCK_TIMEOUT_S = 60
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # they take minutes; the follower tries again itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # a server that does not answer is reported
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
_WORKSPACES = ("databricks", "databricks-uc", "uc")
_ADDRESS = re.compile(r"[\w.-]+:\d+(/[\w./-]*)?")
"""A server's ``host:port``, perhaps with a path."""


def configured_uri(uri: str | None, key: str = "tracking.uri") -> str | None:
    """Return the tracking URI of the config or of ``MLFLOW_TRACKING_URI``; None: there is none.

    Args:
        uri: of the config; it takes precedence.
        key: its name in messages.

    Raises:
        UserError: it is not a URI that MLflow supports.
    """
    option = key
    if not uri:
        key, uri = "MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return None
    folder = Path(uri.removeprefix("file://").removeprefix("file:"))
    if uri.startswith("file:") or folder.is_dir():
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() == "true":
            return uri
        database = f"sqlite:///{folder.name}.db"
        migrate = shlex.join(
            ["python", "-m", "mlflow", "migrate-filestore", "--source", str(folder), "--target", database]
        )
        raise UserError(
            f"{key}={uri} is a folder, which MLflow no longer writes to (its runs go to a database by: {migrate})",
            shlex.quote(f"{option}={database}"),
        )
    scheme, separator, rest = uri.partition("://")
    kind = scheme.partition("+")[0]
    if kind.startswith("http") and "/#" in rest and "@" not in rest:
        problem = f"{key}={redacted(uri)} is the address of a page, not of the server"
        raise UserError(problem, shlex.quote(f"{option}={uri.partition('#')[0].rstrip('/')}"))
    if kind == "sqlite" and rest and not rest.startswith("/"):
        raise UserError(f"{key}={uri}: SQLite's has three slashes", shlex.quote(f"{option}={scheme}:///{rest}"))
    if separator and (kind in _SCHEMES or kind in entry_points(group="mlflow.tracking_store").names):
        return uri
    if uri in _WORKSPACES:
        return uri
    shown = redacted(uri) if separator or "@" not in uri else "***"
    meant = "sqlite:///file.db" if separator or "@" in uri else f"sqlite:///{uri.removeprefix('sqlite:')}"
    if _ADDRESS.fullmatch(uri):
        meant = f"http://{uri}"
    raise UserError(
        f"{key}={shown} is not a URI that MLflow supports, such as http://host:port", shlex.quote(f"{option}={meant}")
    )


def tracking_uri(uri: str | None = None, key: str = "tracking.uri") -> str:
    """Return the tracking URI to use: see ``configured_uri``, else SQLite's ``mlflow.db`` in the current folder."""
    return configured_uri(uri, key) or sqlite_uri(Path.cwd() / "mlflow.db")


def store_uri(uri: str | None, recorded: str | None, key: str = "tracking.uri") -> str:
    """Return the store of a run: ``uri`` if there is one, else that of its ``tracking.json``, else ``tracking_uri``."""
    return usable_uri(recorded) if recorded and not uri else tracking_uri(uri, key)


def storable_uri(uri: str) -> str:
    """Return a tracking URI to be kept in a file: valid in every folder, without password."""
    if database := database_file(uri):
        return sqlite_uri(database)
    return redacted(uri)


def usable_uri(stored: str) -> str:
    """Return a stored tracking URI with its password, which is only in ``MLFLOW_TRACKING_URI``, never in a file.

    Raises:
        UserError: it is not there.
    """
    if "***" not in stored:
        return stored
    current = configured_uri(None)
    if current and storable_uri(current) == stored:
        return current
    raise UserError(f"the password of {stored} is not stored; set MLFLOW_TRACKING_URI to the whole address")


def sqlite_uri(database: Path) -> str:
    """Return the tracking URI of an SQLite file, in which SQLAlchemy decodes ``%20``."""
    return f"sqlite:///{database.as_posix().replace('%', '%25')}"


def database_file(uri: str) -> Path | None:
    """Return the file of an SQLite tracking URI; None: another kind of store."""
    scheme, _, name = uri.partition(":///")
    name = unquote(name.partition("?")[0])  # as SQLAlchemy does
    return Path(name).resolve() if scheme.startswith("sqlite") and name else None


def import_mlflow(uri: str) -> None:
    """Import the parts of MLflow that a store of this kind needs (about a second), and silence its logging.

    Failures are raised as exceptions, so MLflow's own messages about them are not needed.
    """
    for name, value in _SETTINGS.items():  # MLflow reads them from the environment only; what the user has set stays
        os.environ.setdefault(name, value)
    import_module("mlflow.system_metrics.system_metrics_monitor")
    if uri.startswith("sqlite:"):
        import_module("mlflow.store.tracking.sqlalchemy_store")
    for name in ("mlflow", "alembic"):  # only now, because the import sets levels of its own
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("mlflow.store.db.utils", "mlflow.system_metrics", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def connect(uri: str) -> MlflowClient:
    """Open a tracking store, creating an SQLite file that does not exist yet (some seconds).

    Raises:
        UserError: the file is not an SQLite database, or not MLflow's, or cannot be written.
        Exception: of many kinds, when the store does not answer, or is none.
    """
    import_mlflow(uri)
    from mlflow import MlflowClient

    if database := database_file(uri):
        try:
            database.parent.mkdir(parents=True, exist_ok=True)
            with locked(Path(f"{database}-init.lock"), LOCK_TIMEOUT_S):
                if database.exists():
                    _check_usable(database)
                else:
                    set_up(database)
        except PermissionError as error:
            raise UserError(
                f"{database} cannot be written ({error.filename}: {error.strerror}); make it and its folder writable, "
                "or set tracking.uri=…"
            ) from None
    client = MlflowClient(tracking_uri=uri)
    client.search_experiments(max_results=1)
    return client


def _check_usable(database: Path) -> None:
    """Raise at once where SQLite cannot use the file, which MLflow would try again for minutes, or others' tables are.

    Raises:
        PermissionError: it cannot be written.
        UserError: it is no database, or another program's.
    """
    if not os.access(database, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(database))
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        try:
            tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        except sqlite3.OperationalError:  # locked, or on a disk that fails
            raise
        except sqlite3.DatabaseError:
            raise UserError(f"{database} is not an SQLite database; move it, or set tracking.uri=…") from None
    if tables and "experiments" not in tables:
        raise UserError(f"{database} is the database of another program (it has {tables[0]}); set tracking.uri=…")


def set_up(database: Path) -> None:
    """Make an SQLite file with MLflow's tables.

    MLflow does it in dozens of migrations, each committed by itself: one that is killed leaves a file that MLflow
    refuses from then on. So it is done to a file of another name, which is then renamed.
    """
    from mlflow import MlflowClient

    for stale in database.parent.glob(f".{database.name}.*.partial*"):  # of one that was killed, with its journal
        stale.unlink()
    # Never the same name twice, because MLflow keeps its connection to the file.
    partial = database.with_name(f".{database.name}.{uuid.uuid4().hex}.partial")
    MlflowClient(tracking_uri=sqlite_uri(partial)).search_experiments(max_results=1)
    flush(partial)
    partial.rename(database)
    flush(database.parent)


def find_run(client: MlflowClient, run_id: str) -> Any:
    """Return the run; None: the store does not have it, or it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def create_run(client: MlflowClient, experiment: str, name: str, key: str, started_s: float) -> Any:
    """Create a run, or return the one with this key, if it was created before and the answer was lost.

    MLflow's global "active run" is not used, so that runs can follow one another. ``started_s`` is in seconds since the
    epoch; an experiment that is not there is created.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        user = "unknown"
    experiment_id = _experiment_id(client, experiment)
    known = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    if known:
        return known[0]
    tags = {"mlflow.user": user, "mlflow.source.type": "LOCAL", "mlflow.source.name": Path(sys.argv[0]).name}
    started_ms = int(started_s * 1000)
    return client.create_run(experiment_id, start_time=started_ms, run_name=name, tags=tags | {KEY_TAG: key})


def _experiment_id(client: MlflowClient, name: str) -> str:
    if experiment := client.get_experiment_by_name(name):
        if experiment.lifecycle_stage == "deleted":
            restore = f"python -m mlflow experiments restore --experiment-id {experiment.experiment_id}"
            raise UserError(
                f"its experiment {name!r} is deleted; set another tracking.experiment, or restore it with: "
                f"MLFLOW_TRACKING_URI={shlex.quote(redacted(str(client.tracking_uri)))} {restore}"
            )
        if VIEW_TAG not in experiment.tags:  # another program has made it
            client.set_experiment_tag(experiment.experiment_id, VIEW_TAG, _view())
        return str(experiment.experiment_id)
    database = database_file(client.tracking_uri)
    folder = re.sub(r"[^\w.-]", "_", name)
    location = (database.parent / "mlartifacts" / folder).as_uri() if database else None
    # If the kind is set, MLflow's page does not ask the user for it.
    tags = {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: _view()}
    return str(client.create_experiment(name, location, tags))


def _view(params: Sequence[str] = ()) -> str:
    """Return the view with these params as columns, between precision and metrics."""
    columns = ["tags.`precision`", *(f"params.`{name}`" for name in params), *_METRICS]
    order = ["attributes.`Run Name`", "runDateAndNestInfo", *columns]
    state = {"selectedColumns": columns, "columnOrder": order, "columnWidths": dict.fromkeys(columns, 150)}
    return json.dumps({"name": "precision, loss, throughput, memory", "createdAt": 0, "state": json.dumps(state)})


def show_swept(client: MlflowClient, run_id: str) -> None:
    """Add to the view's columns what a sweep sweeps, then what else differs from the newest other run of its group.

    Every run of a group does so when it begins: together they show what varies, without a list of it.
    """
    run = client.get_run(run_id)
    own = [key for key in run.data.tags.get(SWEPT_TAG, "").split() if key in run.data.params]
    experiment_id, group = run.info.experiment_id, run.data.tags[GROUP_TAG].replace("'", "_")  # any character
    newest = client.search_runs([experiment_id], f"tags.`{GROUP_TAG}` LIKE '{group}'", max_results=2)
    other: dict[str, str] = next((other.data.params for other in newest if other.info.run_id != run_id), {})
    varied = [key for key, value in sorted(run.data.params.items()) if other.get(key, value) != value]
    view = json.loads(client.get_experiment(experiment_id).tags.get(VIEW_TAG) or _view())
    columns = json.loads(view["state"])["selectedColumns"]
    known = [column[len("params.`") : -1] for column in columns if column.startswith("params.")]
    if new := [key for key in (*own, *varied) if key not in known and not key.startswith(_NO_COLUMN)]:
        first = [key for key in own if key in new]
        client.set_experiment_tag(
            experiment_id, VIEW_TAG, _view([*dict.fromkeys([*first, *known, *new])][:_MOST_PARAMS])
        )


def curve_key(name: str) -> str:
    """Return MLflow's name of a logged metric: loss, speed and memory, which is in MiB there, are in ``train/``.

    MLflow's charts show sections such as ``train/`` and ``valid/`` by name, and last what is in none: the machinery,
    such as ``loss_scale``, and the numbers of a run as a whole, see ``results.py``.
    """
    return metric_key(f"train/{name.replace('_bytes', '_mib')}" if _SEEN_FIRST.fullmatch(name) else name)


def metric_key(name: str) -> str:
    """Return MLflow's name of a metric; where it is another, with a number, so that no two become one."""
    key = valid_key(name)
    return key if key == name else f"{key[:240]}-{zlib.crc32(name.encode()):08x}"


def valid_key(name: str) -> str:
    """Return a name that MLflow accepts for a param, metric or tag: few special characters, a normal path."""
    return posixpath.normpath("/" + re.sub(r"[^\w.\- :/]", "_", name)).lstrip("/")[:250] or "_"


def cut(value: str, length: int) -> str:
    """Return ``value``, or its beginning and an ellipsis if it is longer than ``length``."""
    return value if len(value) <= length else value[: length - 1] + "…"
