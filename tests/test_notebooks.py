"""The notebooks run in a real kernel, and a run in one shows its progress in place and can be interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers import PROJECT

PAGES = sorted((PROJECT / "docs" / "notebooks").glob("*.ipynb"))
INTERRUPTED = """
import os, signal, threading
from trainer import train

def interrupt(reached=threading.Event()):
    while not os.path.exists("outputs/bignet-fp32-s0/metrics.jsonl"):
        reached.wait(0.05)
    os.kill(os.getpid(), signal.SIGINT)  # as a notebook's stop button does

threading.Thread(target=interrupt).start()
try:
    train("recipe=bignet", recipe={"layers": 2, "width": 8}, data={"samples": 64}, steps=99_000, log_every=1, tracking="local")
except KeyboardInterrupt as stopped:
    print("saved" in str(stopped), stopped.folder)
print(train(resume="outputs/bignet-fp32-s0", steps=len(open("outputs/bignet-fp32-s0/metrics.jsonl").readlines()) + 5))
"""


@pytest.fixture
def run_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MANTISSA_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))

    def execute(notebook: Any) -> Any:
        return NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()

    return execute


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs_as_it_is_and_is_kept_without_results(page: Path, run_cells: Any) -> None:
    notebook = nbformat.read(page, as_version=4)
    nbformat.validate(notebook)
    assert [cell.outputs for cell in notebook.cells if cell.get("outputs")] == []
    done = run_cells(notebook)
    bars = [output for cell in done.cells for output in cell.get("outputs", []) if output.output_type == "display_data"]
    assert any(output.data["text/plain"].startswith("step") for output in bars)


def test_progress_stays_in_place_and_the_stop_button_saves(run_cells: Any) -> None:
    done = run_cells(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(INTERRUPTED)]))
    outputs = done.cells[0].outputs
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    bars = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    print(outputs)
    assert "True outputs/bignet-fp32-s0" in text
    assert "loss" not in "".join(line for line in text.splitlines() if line.startswith("step") and "/s" in line)
    assert len(bars) == 2  # one for each run, whatever the number of steps
