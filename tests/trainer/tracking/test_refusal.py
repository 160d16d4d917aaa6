"""What is said of a store that takes nothing: servers that refuse it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tracked import tracked
from trainer.errors import UserError
from trainer.tracking.refusal import check_files_arrive, refusal
from trainer.tracking.store import connect
from trainer.tracking.sync import send

HTML = "text/html; charset=utf-8"
CREDENTIALS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


@contextmanager
def answering(status: int, body: str = "") -> Iterator[str]:
    """A server that gives one answer to everything, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # which the first request of MLflow's client is
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)


def said(uri: str) -> Exception:
    with pytest.raises(Exception) as raised:  # of many kinds, by MLflow
        connect(uri)
    return refusal(raised.value, uri)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, "log in"), "refuses it (401: log in); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ((403, "not you"), "refuses it (403: not you); set MLFLOW_TRACKING_"),
        ((403, "Invalid Host header"), "start it with --allowed-hosts"),
    ],
)
def test_what_a_server_answers_is_said_with_what_mends_it(answer: tuple[int, str], words: str) -> None:
    with answering(*answer) as uri:
        found = said(uri)
    assert isinstance(found, UserError)
    assert words in str(found)


@pytest.mark.parametrize(("status", "retry"), [(401, "when that is mended, send it with: "), (500, "retry with: ")])
def test_a_retry_is_offered_where_it_can_help(
    status: int, retry: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(status) as uri:
        tracked(tmp_path / "run", uri=uri, upload_timeout_s=1)
        again = send(tmp_path / "run").message
    (warned,) = [message for message in caplog.messages if "upload incomplete" in message]
    for message in (warned, again):
        assert f"; {retry}python scripts/sync.py {tmp_path / 'run'}" in message


def test_where_files_are_kept(tmp_path: Path) -> None:
    server, here = "http://tracker:5000", tmp_path / "1" / "run" / "artifacts"
    for location in (
        here.as_posix(),
        here.as_uri(),
        "mlflow-artifacts:/1/run/artifacts",
        "s3://bucket/1/run/artifacts",
    ):
        check_files_arrive(location, server)
    check_files_arrive("/nowhere/1/run/artifacts", "sqlite:///mlflow.db")
    for location in ("/nowhere/1/run/artifacts", "file:///nowhere/1/run/artifacts", "/nowhere/run/artifacts"):
        with pytest.raises(UserError, match="start it without --no-serve-artifacts"):
            check_files_arrive(location, server)
