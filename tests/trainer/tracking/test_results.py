"""What MLflow gets of a run that has ended, from its folder: metrics to sort by, and a description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracked import save
from trainer.files import write_json
from trainer.tracking.results import best_lines, description, summary_lines
from trainer.tracking.tracked_run import TrackedRun

LINES: list[dict[str, object]] = [
    {"step": 1, "loss": 4.0},
    {"step": 10, "loss": 3.0},
    {"step": 10, "valid/loss": 2.5, "valid/perplexity": 12.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "valid/loss": 2.75, "valid/perplexity": None, "valid/perplexity_nonfinite": 1},
]


def scores(log: Path, summary: dict[str, Any]) -> dict[str, tuple[float, int]]:
    """Value and step by the metric's name."""
    lines = summary_lines(log, summary)
    assert {line["time"] for line in lines} == {7.0}
    return {
        key: (value, line["step"])
        for line in lines
        for key, value in line.items()
        if key not in ("step", "time") and value is not None
    }


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"time": 7.0, **line}) + "\n" for line in LINES) + '{"step": 30, "valid')
    return path


def test_a_finished_run_is_scored_by_its_log_and_summary(log: Path) -> None:
    summary = {"best": {"step": 10, "value": 2.5}, "units_per_s": 105.0, "step_time_s": 0.45, "test": {"accuracy": 0.5},
               "peak_memory_bytes": 4 << 20, "reserved_memory_bytes": 6 << 20,
               "process_memory_bytes": 8 << 20, "utilisation": {"mfu": 0.42}}  # fmt: skip
    assert scores(log, summary) == {
        "best_loss": (2.5, 10),
        "throughput": (105.0, 20),
        "step_time_ms": (450.0, 20),
        "mfu": (0.42, 20),
        "peak_memory_mib": (4.0, 20),
        "reserved_memory_mib": (6.0, 20),
        "process_memory_mib": (8.0, 20),
        "test_accuracy": (0.5, 20),
    }
    own = scores(log, {"best": {"step": 10, "value": 12.0}, "best_metric": "valid/perplexity"})
    assert own == {"best_loss": (2.5, 10), "best_perplexity": (12.0, 10)}


def test_a_killed_run_is_scored_by_its_log(log: Path) -> None:
    assert scores(log, {}) == {"best_loss": (2.5, 10)}


@pytest.mark.parametrize(("status", "resumable"), [("FINISHED", True), ("KILLED", True), ("KILLED", False)])
def test_the_note_has_the_command_to_continue_if_possible(tmp_path: Path, status: str, resumable: bool) -> None:
    save(tmp_path, 10)
    summary = {"recipe": "gpt2", "precision": "bf16", "step": 10, "steps": 20, "best": None, "resume": "python x"}
    write_json(tmp_path / "summary.json", summary | {"status": status})
    run = TrackedRun("e", "r", {}, {}, checkpoints="last" if resumable else "none", run_id="r")
    note = description(tmp_path, run)
    assert note
    assert ("resume=mlflow:r" in note) == resumable
    assert ("with more `steps=`" in note) == (status == "FINISHED")


def test_the_note_has_the_step_and_the_reason_of_a_failure(tmp_path: Path) -> None:
    summary = {"recipe": "gpt2", "precision": "fp16", "step": 10, "steps": 20, "best": None, "resume": "python x",
               "status": "FAILED", "failure": {"step": 2}, "error": "step 2: the gradients are not finite"}  # fmt: skip
    write_json(tmp_path / "summary.json", summary)
    note = str(description(tmp_path, TrackedRun("e", "r", {}, {})))
    assert "failed at step 2 of 20" in note
    assert summary["error"] in note


def test_a_table_shows_the_best_loss_in_few_digits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "time": 7.0, "valid/loss": 3.491904640197754}) + "\n")
    assert scores(path, {}) == {"best_loss": (3.4919, 1)}


def test_a_run_that_ended_before_its_first_line_has_no_results(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert summary_lines(tmp_path / "metrics.jsonl", {}) == best_lines(tmp_path / "metrics.jsonl", {}) == []
