"""The address (URI) of MLflow's tracking store: where it comes from, and the form that is stored."""

from __future__ import annotations

import os
import socket
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from trainer.errors import UserError, redacted

_DATABASES = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_PORTS = {"http": 80, "https": 443, **_DATABASES}
_SCHEMES = ("sqlite", "file", "databricks", "databricks-uc", "uc", *_PORTS)


def explicit_uri(uri: str | None, key: str = "tracking.uri") -> str | None:
    """Return the tracking URI of the config or of ``MLFLOW_TRACKING_URI``; None: there is none.

    Args:
        uri: of the config; it takes precedence.
        key: its name in messages.

    Raises:
        UserError: it is not a URI that MLflow supports, or the package that it needs is not installed.
    """
    if not uri:
        key, uri = "MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return None
    scheme, found, rest = uri.partition("://")
    kind = scheme.partition("+")[0]
    plugins = entry_points(group="mlflow.tracking_store").names
    known = uri in ("databricks", "databricks-uc", "uc") or (rest and (kind in _SCHEMES or kind in plugins))
    if kind == "file" and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        known = False  # by MLflow itself
    if known and _is_readable(uri, kind) and (kind not in _DATABASES or _has_driver(uri, key)):
        return uri
    remedy = "sqlite:///file.db" if found else f"sqlite:///{redacted(uri)}"
    raise UserError(f"{key}={redacted(uri)} is not a URI that MLflow supports; use {remedy} or http://host:port")


def _has_driver(uri: str, key: str) -> bool:
    """Return False where there is no such driver, and raise UserError where it is not installed."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        needed = f"needs the Python package {error.name}; install it: pip install {error.name}"
        raise UserError(f"{key}={redacted(uri)} {needed}") from None
    except ArgumentError:
        return False
    return True


def _is_readable(uri: str, kind: str) -> bool:
    try:
        parts = urlsplit(uri)
        return parts.port != 0 and (kind not in ("http", "https") or bool(parts.hostname))  # the port raises, too
    except ValueError:
        return False


def unreachable(uri: str) -> str | None:
    """Return why no connection to a server is made within a second; None: it is made, or the URI names no server."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(uri)
    default = _PORTS.get(parts.scheme.partition("+")[0])
    proxies = parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")
    if not parts.hostname or default is None or proxies:
        return None
    try:
        socket.create_connection((parts.hostname, parts.port or default), timeout=1).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


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
