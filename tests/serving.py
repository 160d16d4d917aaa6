"""``scripts/ui.py`` for tests that look at what it serves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.tracking.ui import HOST

UI = Path(__file__).resolve().parents[1] / "scripts" / "ui.py"


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def serve_ui(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Start it in the current folder, and return it with what it has printed until MLflow's server runs."""
    process = subprocess.Popen(
        [sys.executable, UI, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    printed = ""
    for line in process.stdout:
        printed += line
        if "Uvicorn running on" in line:
            return process, printed
    raise AssertionError(f"the server ended with status {process.wait()}:\n{printed}")


@contextmanager
def served(store: str, port: int | None = None) -> Iterator[str]:
    """Serve a store at this address."""
    port = port or free_port()
    process, _ = serve_ui(f"port={port}", f"uri={store}")
    try:
        yield f"http://{HOST}:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 0
