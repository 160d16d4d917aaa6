"""Why an MLflow store takes nothing, where no patience mends it."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from trainer.errors import UserError, first_line, redacted

CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"


def refusal(error: Exception, uri: str) -> Exception:
    """Return what the user has to mend, as a ``UserError``; or the error itself, after which a later try may succeed.

    Args:
        error: raised by MLflow, or what lies below it.
        uri: of the store, for the command that mends a database.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, ImportError):  # such as of the client of a cloud's storage
        return UserError(f"{first_line(error)}; install it where this project runs")
    if "out-of-date database schema" in str(error):
        return UserError(
            f"the database has the tables of another MLflow than this one, {version('mlflow')}; install that one, or, "
            f"if it is an earlier one, back up the database and run: python -m mlflow db upgrade {redacted(uri)}"
        )
    code = getattr(getattr(error, "response", None), "status_code", None)  # of files
    code = code or {"UNAUTHENTICATED": 401, "CUSTOMER_UNAUTHORIZED": 401, "PERMISSION_DENIED": 403}.get(
        getattr(error, "error_code", "")
    )
    if code in (401, 403):
        said = str(error).partition("Response body: ")[2] or first_line(error)
        to_do = "start it with --allowed-hosts" if "Invalid Host header" in said else f"set {CREDENTIALS}"
        why = redacted(said.strip("' \n")[:200])
        return UserError(f"the server refuses it ({code}{why and f': {why}'}); {to_do}")
    return error


def check_files_arrive(location: str, uri: str) -> None:
    """Raise UserError where a server keeps files in a folder of its own machine, which its clients would make here.

    Args:
        location: of the files of a run, by the server.
        uri: of the server.
    """
    if not uri.startswith(("http://", "https://")) or re.match(r"(?!file:)[\w.+-]{2,}:", location):
        return
    _, of_experiment, root, *_ = (*Path(re.sub("^file:(//)?", "", location)).parents, Path("/"), Path("/"))
    if not any(folder.is_dir() and folder != folder.parent for folder in (of_experiment, root)):
        raise UserError(
            f"the server keeps the files of this experiment in {root}, which is no folder of this machine; start it "
            "without --no-serve-artifacts and --default-artifact-root, and set another tracking.experiment, because "
            "this one keeps its folder; or make the folder here, if both machines share it"
        )
