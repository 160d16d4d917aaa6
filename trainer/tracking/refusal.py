"""Why an MLflow store takes nothing, where no patience mends it: known by what the server, or the database, answers."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import UserError, first_line, redacted

if TYPE_CHECKING:
    from requests import Response

PATIENCE_S = 10.0
"""Longest duration of the question to a server that has just refused something."""
ENDPOINT = "/api/2.0/mlflow/experiments/search"
"""What any MLflow server answers."""
CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"


def refusal(error: Exception, uri: str) -> Exception:
    """Return what the user has to mend, as a ``UserError``; or the error itself, after which a later try may succeed.

    Args:
        error: raised by MLflow, or what lies below it.
        uri: of the store.
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
        return UserError(_forbidden(code, str(error).partition("Response body: ")[2] or first_line(error)))
    if uri.startswith(("http://", "https://")) and (why := _no_mlflow(uri)):
        return UserError(why)
    if found := re.search(r"too many (\d+) error responses", str(error)):
        return RuntimeError(f"the server answers {found[1]}, an error of its own")
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
            "with --serve-artifacts and without --default-artifact-root, and set another tracking.experiment, because "
            "this one keeps its folder; or make the folder here, if both machines share it"
        )


def _forbidden(code: int, said: str) -> str:
    why = redacted(said.strip("' \n")[:200])
    to_do = "start it with --allowed-hosts" if "Invalid Host header" in said else f"set {CREDENTIALS}"
    return f"the server refuses it ({code}{why and f': {why}'}); {to_do}"


def _no_mlflow(uri: str) -> str:
    """Return why what answers at an address is no MLflow server that can be used; empty: it may be, or nothing does."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    request = {"json": {"max_results": 1}, "allow_redirects": False, "max_retries": 0, "raise_on_status": False}
    try:
        answer: Response = http_request(get_default_host_creds(uri), ENDPOINT, "POST", timeout=PATIENCE_S, **request)
    except Exception as error:  # of many kinds, as MLflow's own
        if "WRONG_VERSION_NUMBER" in str(error):
            return "the server does not speak https; its address begins with http://"
        unknown = "CERTIFICATE_VERIFY_FAILED" in str(error)
        return "the server's certificate is not known here; set MLFLOW_TRACKING_SERVER_CERT_PATH=FILE" * unknown
    # Any other server may not know POST (501); of one that fails, the next answer may be better.
    if (answer.status_code >= 500 and answer.status_code != 501) or answer.status_code == 429 or _is_mlflow(answer):
        return ""
    if answer.status_code in (401, 403):
        return _forbidden(answer.status_code, answer.text)
    place = f", and sends to {redacted(answer.headers['location'])}" if answer.is_redirect else ""
    kind = answer.headers.get("content-type", "").partition(";")[0] or "no text"
    return f"no MLflow server: it answers {answer.status_code} with {kind}{place}"


def _is_mlflow(answer: Response) -> bool:
    """Return whether an answer is one of MLflow's: experiments, or an error with its code."""
    try:
        content = json.loads(answer.text or "{}")
    except ValueError:
        return False
    return isinstance(content, dict) and (answer.status_code == 200 or "error_code" in content)
