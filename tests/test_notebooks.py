"""The notebooks run in a real kernel, where the stop button saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.helpers import PROJECT

STOPPED = """
import os, random, signal, threading, time
before = random.getstate()
from trainer import train
assert random.getstate() == before, "an import drew from it"

def press_stop():
    log = "outputs/bignet-fp32-s0/metrics.jsonl"
    while not (os.path.exists(log) and os.path.getsize(log)):  # until a step was taken
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press_stop).start()
small = {"recipe": {"layers": 2, "width": 8}, "data": {"samples": 64}, "log_every": 1, "tracking": "local"}
try:
    train("recipe=bignet", steps=99_000, **small)
except KeyboardInterrupt as stopped:
    run = train(resume=stopped.folder, steps=2 + len(open(stopped.folder / "metrics.jsonl").readlines()))
"""


def executed(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What its cells have printed."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MANTISSA_CACHE"):
        monkeypatch.setenv(name, str(folder / name))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("page", sorted((PROJECT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda page: page.stem)
def test_a_notebook_runs_as_it_is_kept(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(page, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # measured elsewhere
    assert executed(notebook, tmp_path, monkeypatch)


def test_the_stop_button_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = executed(new_notebook(cells=[new_code_cell(STOPPED)]), tmp_path, monkeypatch)
    assert "resumed after step" in printed
