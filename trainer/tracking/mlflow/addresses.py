"""The address (URI) of MLflow's tracking store: where it comes from, and the form that is stored."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

from trainer.errors import UserError, redacted

_SCHEMES = ("sqlite", "file", "http", "https", "postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc")


def explicit_uri(uri: str | None, key: str = "tracking.uri") -> str | None:
    """Return the tracking URI of the config or of ``MLFLOW_TRACKING_URI``; None: there is none.

    Args:
        uri: of the config; it takes precedence.
        key: its name in messages.

    Raises:
        UserError: it is not a URI that MLflow supports.
    """
    if not uri:
        key, uri = "MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return None
    scheme, found, rest = uri.partition("://")
    kind = scheme.partition("+")[0]
    known = uri in ("databricks", "databricks-uc", "uc")
    known |= bool(rest) and (kind in _SCHEMES or kind in entry_points(group="mlflow.tracking_store").names)
    if kind == "file" and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        known = False  # by MLflow itself
    if known:
        return uri
    remedy = "sqlite:///file.db" if found or "@" in uri else f"sqlite:///{uri}"
    shown = redacted(uri) if found or "@" not in uri else "***"
    raise UserError(f"{key}={shown} is not a URI that MLflow supports; use {remedy} or http://host:port")


def tracking_uri(uri: str | None = None, key: str = "tracking.uri") -> str:
    """Return the tracking URI to use: see ``explicit_uri``, else SQLite's ``mlflow.db`` in the current folder."""
    return explicit_uri(uri, key) or f"sqlite:///{(Path.cwd() / 'mlflow.db').as_posix()}"


def lasting_uri(uri: str) -> str:
    """Return a tracking URI to store: valid in every folder, without password."""
    scheme, found, name = uri.partition(":///")
    if found and scheme.startswith("sqlite") and name[:1] not in ("", ":") and not Path(name).is_absolute():
        uri = f"{scheme}:///{(Path.cwd() / name).as_posix()}"
    return redacted(uri)


def whole_uri(uri: str) -> str:
    """Return a stored tracking URI with its password, which is only in ``MLFLOW_TRACKING_URI``, never in a file.

    Raises:
        UserError: it is not there.
    """
    if "***" not in uri:
        return uri
    current = explicit_uri(None)
    if current and lasting_uri(current) == uri:
        return current
    raise UserError(f"the password of {uri} is not stored; set MLFLOW_TRACKING_URI to the whole address")


def database_file(uri: str) -> Path | None:
    """Return the file of an SQLite tracking URI; None: another kind of store."""
    if not uri.startswith("sqlite:"):
        return None
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    return Path(name).resolve() if name else None
