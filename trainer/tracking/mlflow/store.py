"""MLflow's tracking store: its URI, the connection, finding and creating runs."""

from __future__ import annotations

import getpass
import logging
import os
import posixpath
import re
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainer.errors import UserError
from trainer.tracking.mlflow.sqlite import prepared

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file", "databricks", "databricks-uc", "uc")
KEY_TAG = "mantissa.key"
"""The tag that holds the key of a run (``RunInfo.key``)."""
SESSION_TAG = "mantissa.session"
"""The tag that holds the name of the process that has trained a run last."""


def explicit_uri(uri: str | None, key: str = "tracking.uri") -> str | None:
    """Return the tracking URI of the config or of ``MLFLOW_TRACKING_URI``; None: there is none.

    Args:
        uri: of the config; it takes precedence.
        key: its name in messages.

    Raises:
        UserError: it is not a URI that MLflow supports.
    """
    value = uri
    if not value:
        key, value = "MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI")
    if not value:
        return None
    scheme, found, rest = value.partition("://")
    kind = scheme.partition("+")[0]
    known = value in ("databricks", "databricks-uc", "uc") or (rest and kind in _SCHEMES)
    if known or (rest and kind in entry_points(group="mlflow.tracking_store").names):
        return value
    if found:
        raise UserError(f"{key}={value} is not a URI that MLflow supports; use sqlite:///file.db or http://host:port")
    raise UserError(f"{key}={value} is not a URI; use sqlite:///{value} or http://host:port")


def tracking_uri(uri: str | None = None, key: str = "tracking.uri") -> str:
    """Return the tracking URI to use: see ``explicit_uri``, else SQLite's ``mlflow.db`` in the current folder."""
    return explicit_uri(uri, key) or f"sqlite:///{(Path.cwd() / 'mlflow.db').as_posix()}"


def without_password(uri: str) -> str:
    """Return a tracking URI without its password, to show and to store."""
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def whole_uri(uri: str) -> str:
    """Return a stored tracking URI with its password, which is only in ``MLFLOW_TRACKING_URI``, never in a file.

    Raises:
        UserError: it is not there.
    """
    if ":***@" not in uri:
        return uri
    current = explicit_uri(None)
    if current and lasting_uri(current) == uri:
        return current
    raise UserError(f"the password of {uri} is not stored; set MLFLOW_TRACKING_URI to the whole address")


def lasting_uri(uri: str) -> str:
    """Return a tracking URI to store: valid in every folder, without password."""
    scheme, found, name = uri.partition(":///")
    if found and scheme.startswith("sqlite") and name[:1] not in ("", ":") and not Path(name).is_absolute():
        uri = f"{scheme}:///{(Path.cwd() / name).as_posix()}"
    return without_password(uri)


def database_file(uri: str) -> Path | None:
    """Return the file of an SQLite tracking URI; None: another kind of store."""
    if not uri.startswith("sqlite:"):
        return None
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    return Path(name).resolve() if name else None


def import_mlflow(uri: str) -> None:
    """Import the parts of MLflow that a store of this kind needs (about a second), and silence its logging.

    Failures are raised as exceptions, so MLflow's own messages about them are not needed.
    """
    # MLflow reads these settings from the environment only. What the user has set stays.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow's retries take minutes and may store a point twice; the feed queries the store first.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import_module("mlflow.system_metrics.system_metrics_monitor")
    if uri.startswith("sqlite:"):
        import_module("alembic.command")
        import_module("mlflow.store.tracking.sqlalchemy_store")
    for name in ("mlflow", "alembic"):  # only now, because the import sets levels of its own
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("mlflow.store.db.utils", "mlflow.system_metrics", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def connect(uri: str) -> MlflowClient:
    """Open a tracking store, creating an SQLite file that does not exist yet (some seconds).

    Raises:
        UserError: the file is not an SQLite database, or of another version of MLflow.
        Exception: of many kinds, when the store does not answer.
    """
    import_mlflow(uri)
    from mlflow import MlflowClient

    database = database_file(uri)
    with prepared(database) if database else nullcontext():
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


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


def create_run(client: MlflowClient, uri: str, experiment: str, name: str, key: str, started_s: float) -> Any:
    """Create a run, or return the one with this key, if it was created before and the answer was lost.

    MLflow's global "active run" is not used, so that runs can follow one another.

    Args:
        client: of the store.
        uri: of the store.
        experiment: its name; it is created if there is none.
        name: of the run.
        key: see ``RunInfo.key``.
        started_s: seconds since the epoch.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        user = "unknown"
    experiment_id = _experiment_id(client, uri, experiment)
    known = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    if known:
        return known[0]
    tags = {"mlflow.user": user, "mlflow.source.type": "LOCAL", "mlflow.source.name": Path(sys.argv[0]).name}
    started_ms = int(started_s * 1000)
    return client.create_run(experiment_id, start_time=started_ms, run_name=name, tags=tags | {KEY_TAG: key})


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = database_file(uri)
        folder = re.sub(r"[^\w.-]", "_", name)
        location = (database.parent / "mlartifacts" / folder).as_uri() if database else None
        try:
            # If the kind is set, MLflow's page does not ask the user for it.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            return str(client.create_experiment(name, artifact_location=location, tags=tags))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run was faster
                raise
        experiment = client.get_experiment_by_name(name)
    if experiment.lifecycle_stage != "active":
        raise RuntimeError(
            f"the experiment {name} was deleted; restore it with `mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}`, or choose another with tracking.experiment=<name>"
        )
    return str(experiment.experiment_id)


def valid_key(name: str) -> str:
    """Return a name that MLflow accepts for a param, metric or tag: few special characters, a normal path."""
    return posixpath.normpath("/" + re.sub(r"[^\w.\- /]", "_", name)).lstrip("/")[:250] or "_"


def cut(value: str, length: int) -> str:
    """Return ``value``, or its beginning and an ellipsis if it is longer than ``length``."""
    return value if len(value) <= length else value[: length - 1] + "…"
