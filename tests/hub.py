"""A server in the layout of the Hugging Face hub, for models and datasets of a few kilobytes.

``with served(Hub()) as hub`` listens on this machine; ``HF_ENDPOINT=hub.address`` sends the libraries there.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE = 1024
"""Bytes of an answer in the middle of which the hub can go away."""
_API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$")
_RESOLVE = re.compile(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)$")


@dataclass
class Repository:
    """Files of a model or dataset, and how the hub answers."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    status: int = 200
    """Other than 200: the answer to every request for it."""
    code: str = ""
    """``X-Error-Code`` of such an answer."""
    token: str | None = None
    """The token without which ``status`` is answered; None: no token helps."""

    @property
    def commit(self) -> str:
        """The only commit."""
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    """What is served, and what was asked for."""

    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    sent: list[str] = field(default_factory=list)
    """Files that were downloaded."""
    dies: bool = False
    """Whether the next large file is sent by half, and nothing is answered after it."""
    port: int = 0

    @property
    def address(self) -> str:
        """What ``HF_ENDPOINT`` is set to."""
        return f"http://127.0.0.1:{self.port}"

    def add_model(self, name: str, folder: Path, **answer: object) -> Repository:
        """Serve the files of a folder as a model."""
        return self._add(self.models, name, folder, answer)

    def add_dataset(self, name: str, folder: Path, **answer: object) -> Repository:
        """Serve the files of a folder as a dataset."""
        return self._add(self.datasets, name, folder, answer)

    @staticmethod
    def _add(kind: dict[str, Repository], name: str, folder: Path, answer: dict[str, object]) -> Repository:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        kind[name] = Repository(files, **answer)  # type: ignore[arg-type]
        return kind[name]


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """Answer requests from a thread."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", hub.port), Handler)  # the one before, where it was gone
    server.daemon_threads = True
    hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask_at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the libraries of this process to a hub: what they keep of its address is theirs again after the test."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Objects made once: in a later test they would ask a hub that is gone, or another test's.
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        given = parse_qs(body)
        wanted = given.get("paths") or (json.loads(body)["paths"] if body.startswith("{") else [])
        self._route(wanted)

    def do_GET(self) -> None:
        self._route([])

    def _route(self, wanted: list[str]) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append(f"{self.command} {unquote(path)}")
        if found := _API.match(path):
            kind, name, what, revision, below = _unquoted(found)
            repository = (self.hub.models if kind == "models" else self.hub.datasets).get(name)
            if self._refused(repository, revision):
                return None
            assert repository
            value = self._api(name, repository, what, below or "", wanted)
            if value is None:
                return self._answer(404, {"X-Repo-Commit": repository.commit, "X-Error-Code": "EntryNotFound"})
            return self._json(value, repository)
        if found := _RESOLVE.match(path):
            of_datasets, name, revision, file = _unquoted(found)
            repository = (self.hub.datasets if of_datasets else self.hub.models).get(name)
            if not self._refused(repository, revision):
                assert repository
                self._file(repository, file)
            return None
        return self._answer(200 if path == "/" else 404)

    def _refused(self, repository: Repository | None, revision: str | None) -> bool:
        if repository is None:
            self._answer(401 if "authorization" not in self.headers else 404, {"X-Error-Code": "RepoNotFound"})
        elif repository.status != 200 and self.headers.get("authorization") != f"Bearer {repository.token}":
            self._answer(repository.status, {"X-Error-Code": repository.code} if repository.code else {})
        elif revision not in (None, *repository.revisions, repository.commit):
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _api(self, name: str, repository: Repository, what: str | None, below: str, wanted: list[str]) -> object:
        files = {path: _entry(path, content) for path, content in sorted(repository.files.items())}
        folders = {str(parent): {"type": "directory", "oid": "0" * 40, "size": 0, "path": str(parent)}
                   for path in files for parent in Path(path).parents}  # fmt: skip
        entries = files | folders
        if what == "paths-info":
            return [entries[path] for path in wanted if path in entries]
        if what == "tree":
            deep = "recursive=true" in self.path.lower()
            inside = [
                entry
                for path, entry in entries.items()
                if path != "."
                and (Path(below or ".") in Path(path).parents if deep else str(Path(path).parent) == (below or "."))
            ]
            return inside or None
        siblings = [{"rfilename": path} for path in repository.files]
        return {"_id": "0", "id": name, "modelId": name, "sha": repository.commit, "private": False, "gated": False,
                "disabled": False, "tags": [], "siblings": siblings}  # fmt: skip

    def _file(self, repository: Repository, file: str) -> None:
        content = repository.files.get(file)
        headers = {"X-Repo-Commit": repository.commit}
        if content is None:
            return self._answer(404, headers | {"X-Error-Code": "EntryNotFound"})
        headers |= {"ETag": f'"{_etag(content)}"', "Accept-Ranges": "bytes"}
        if self.command == "GET":
            self.hub.sent.append(file)
        status = 200
        if wanted := re.match(r"bytes=(\d+)-$", self.headers.get("Range", "")):  # the rest of one that was sent by half
            start, size = int(wanted[1]), len(content)
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            status, content = 206, content[start:]
        return self._answer(status, headers, content)

    def _json(self, value: object, repository: Repository) -> None:
        headers = {"Content-Type": "application/json", "X-Repo-Commit": repository.commit}
        self._answer(200, headers, json.dumps(value).encode())

    def _answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(body) >= LARGE and self.hub.dies:
            self.wfile.write(body[: len(body) // 2])
            self.server.socket.close()
            self.hub.dies, self.close_connection = False, True
            return
        self.wfile.write(body)


def _unquoted(found: re.Match[str]) -> list[str | None]:
    """Return the groups; a revision with slashes arrives quoted."""
    return [group and unquote(group) for group in found.groups()]


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "oid": _etag(content)[:40], "size": len(content), "path": path}
