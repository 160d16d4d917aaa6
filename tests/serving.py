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
NOBODY = f"http://{HOST}:9"
"""An address at which nobody listens."""


@contextmanager
def served(store: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Serve a store, and files of ``folder``; yields the address, and what was printed until MLflow's server ran."""
    printed = "cannot be used"
    while "cannot be used" in printed or "address already in use" in printed:  # the port that was free is another's
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        command = [sys.executable, UI, f"port={port}", f"uri={store}"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout
        printed = ""
        while (line := process.stdout.readline()) and "Uvicorn running on" not in line:
            printed += line
    try:
        assert line, printed
        yield f"http://{HOST}:{port}", printed
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 0
