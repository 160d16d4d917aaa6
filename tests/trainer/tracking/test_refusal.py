"""What is said of a store that takes nothing: servers that answer as others than MLflow's do."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.serving import NOBODY
from tests.tracked import tracked
from trainer.errors import UserError
from trainer.tracking.refusal import check_files_arrive, refusal
from trainer.tracking.store import connect
from trainer.tracking.sync import send

HTML = "text/html; charset=utf-8"
CREDENTIALS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


@contextmanager
def answering(status: int, headers: dict[str, str], body: str = "", certificate: Path | None = None) -> Iterator[str]:
    """A server that gives one answer to everything, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # which the first request of MLflow's client is
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            for name, value in ({"content-length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:  # of a client that speaks another scheme
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key, and a certificate that it has signed itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    built = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now.replace(year=2100)
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = built.add_extension(address, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(key.private_bytes(pem, *plain) + signed.public_bytes(pem))
    return path


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
        ((401, {}, "log in"), "refuses it (401: log in); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ((403, {}, "not you"), "refuses it (403: not you); set MLFLOW_TRACKING_"),
        ((403, {}, "Invalid Host header"), "start it with --allowed-hosts"),
        (
            (302, {"location": "https://sso.org/in?next=s3cret"}),
            "answers 302 with no text, and sends to https://sso.org/in?***",
        ),
        ((200, {"content-type": HTML}, "<html>"), "no MLflow server: it answers 200 with text/html"),
        ((404, {"content-type": HTML}, "<html>"), "no MLflow server: it answers 404 with text/html"),
        ((501, {"content-type": HTML}, "<html>"), "no MLflow server: it answers 501 with text/html"),
        ((404, {"content-type": "application/json"}, '{"detail": 1}'), "it answers 404 with application/json"),
    ],
)
def test_what_a_server_answers_is_said_with_what_mends_it(answer: tuple[int, dict[str, str], str], words: str) -> None:
    with answering(*answer) as uri:
        found = said(uri)
    assert isinstance(found, UserError)
    assert words in str(found)


def test_what_may_pass_is_no_mistake() -> None:
    with answering(503, {"content-type": HTML}, "<html>") as uri:
        assert str(said(uri)) == "the server answers 503, an error of its own"
    assert not isinstance(said(NOBODY), UserError)


def test_a_server_without_tls() -> None:
    with answering(200, {}, "{}") as uri:
        found = said(uri.replace("http:", "https:"))
    assert isinstance(found, UserError)
    assert "does not speak https" in str(found)


def test_an_unknown_certificate(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, {}, "{}", certificate) as uri:
        assert "set MLFLOW_TRACKING_SERVER_CERT_PATH=FILE" in str(said(uri))
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate))
        connect(uri)  # the remedy


@pytest.mark.parametrize(("status", "retry"), [(401, "when that is mended, send it with: "), (500, "retry with: ")])
def test_a_retry_is_offered_where_it_can_help(
    status: int, retry: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(status, {}) as uri:
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
        with pytest.raises(UserError, match="start it with --serve-artifacts"):
            check_files_arrive(location, server)
