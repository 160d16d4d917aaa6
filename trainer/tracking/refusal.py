"""Why an MLflow store takes nothing, where no patience mends it: known by what the server, or the database, answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

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
    if found := re.search(r"out-of-date database schema \(found version (\w+)", str(error)):
        return UserError(_other_schema(found[1], uri))
    code = getattr(getattr(error, "response", None), "status_code", None)  # of files
    code = code or {"UNAUTHENTICATED": 401, "CUSTOMER_UNAUTHORIZED": 401, "PERMISSION_DENIED": 403}.get(
        getattr(error, "error_code", "")
    )
    if code in (401, 403):
        body = str(error).partition("Response body: ")[2] or first_line(error)
        return UserError(_forbidden(code, redacted(body.strip("' \n")[:200]), uri))
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


def _forbidden(code: int, said: str, uri: str) -> str:
    creds = _credentials(uri)
    given = bool(creds.token or (creds.username and creds.password) or urlsplit(uri).username)
    if code == 401:
        return (
            f"the server does not accept the credentials in {CREDENTIALS}"
            if given
            else (f"the server asks for credentials (401); set {CREDENTIALS}")
        )
    if "Invalid Host header" in said:
        return "the server does not answer under this name (403); start it with --allowed-hosts, or use its other name"
    return f"the server forbids it (403: {said})" + (
        "" if given else f"; if it asks for credentials, set {CREDENTIALS}"
    )


def _other_schema(found: str, uri: str) -> str:
    import mlflow

    known = Path(mlflow.__file__).parent / "store" / "db_migrations" / "versions"
    if any(known.glob(f"{found}_*.py")):
        upgrade = f"python -m mlflow db upgrade {redacted(uri)}"
        return f"the database has the tables of an earlier MLflow; back it up, then run: {upgrade}"
    return (
        f"the database has the tables of another MLflow than this one, {mlflow.__version__}; install the MLflow that "
        "wrote it, or use another database"
    )


# --- what answers at an address ---


def _credentials(uri: str) -> Any:
    from mlflow.utils.credentials import get_default_host_creds

    return get_default_host_creds(uri)


def _asked(uri: str) -> Response | Exception:
    """Return the answer to a request that any MLflow server takes, or what kept it from arriving."""
    from mlflow.utils.rest_utils import http_request

    request = {"json": {"max_results": 1}, "allow_redirects": False, "max_retries": 0, "raise_on_status": False}
    try:
        answer: Response = http_request(_credentials(uri), ENDPOINT, "POST", timeout=PATIENCE_S, **request)
    except Exception as error:  # of many kinds, as MLflow's own
        return error
    return answer


def _no_mlflow(uri: str) -> str:
    """Return why what answers at an address is no MLflow server that can be used; empty: it may be, or nothing does."""
    answer, address = _asked(uri), urlsplit(uri)
    if isinstance(answer, Exception):
        said = str(answer)
        if "CERTIFICATE_VERIFY_FAILED" in said:
            return (
                "the server's certificate is not signed by an authority that this machine knows; set "
                "MLFLOW_TRACKING_SERVER_CERT_PATH=FILE to trust it, or MLFLOW_TRACKING_INSECURE_TLS=true to trust any"
            )
        other = {"https": "http", "http": "https"}[address.scheme]
        is_other = "SSLError" in said if other == "http" else re.search("Connection aborted|RemoteDisconnected", said)
        return _speaks(uri, other) if is_other else ""
    if answer.status_code >= 500 or answer.status_code == 429 or _is_mlflow(answer):
        return ""
    if answer.status_code in (401, 403):
        return _forbidden(answer.status_code, answer.text.strip()[:200], uri)
    if answer.is_redirect:
        place = redacted(answer.headers["location"].removesuffix(ENDPOINT))
        return f"it sends to {place}; if that is a page to log in, set {CREDENTIALS}; else use that address"
    if address.scheme == "http" and answer.status_code == 400 and (why := _speaks(uri, "https")):
        return why
    kind = answer.headers.get("content-type", "").partition(";")[0] or "no text"
    root = f"{address.scheme}://{address.netloc}"
    if uri.rstrip("/") != root and isinstance(there := _asked(root), type(answer)) and _is_mlflow(there):
        return f"no MLflow server (it answers {answer.status_code} with {kind}); the server is at {redacted(root)}"
    return f"no MLflow server: it answers {answer.status_code} with {kind}"


def _speaks(uri: str, scheme: str) -> str:
    """Return that a server is to be reached by another scheme; empty: it does not answer there, either."""
    other = urlsplit(uri)._replace(scheme=scheme).geturl()
    answer = _asked(other)
    answers = not isinstance(answer, Exception) or "CERTIFICATE_VERIFY_FAILED" in str(answer)
    return f"the server there speaks {scheme}: use {redacted(other)}" if answers else ""


def _is_mlflow(answer: Response) -> bool:
    """Return whether an answer is one of MLflow's: experiments, or an error with its code."""
    try:
        content = json.loads(answer.text or "{}")
    except ValueError:
        return False
    return isinstance(content, dict) and (answer.status_code == 200 or "error_code" in content)
