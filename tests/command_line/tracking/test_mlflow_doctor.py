"""A diagnosis on its run in MLflow: files and tags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evidence.doctor.mlflow import publish
from mantissa.doctor.budget import Budget
from mantissa.doctor.diagnosis import FOUND, HEALTHY, Diagnosis
from mantissa.finding import FORWARD, OVERFLOW, Finding
from trainer.files import write_json
from trainer.tracking.store import connect
from trainer.tracking.tracked_run import TrackedRun

INFO = TrackedRun("gpt2", "gpt2-fp16-s0", {"precision": "fp16"}, {})
FINDING = Finding(OVERFLOW, FORWARD, "wo", "fp16", op="aten.mm")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that failed and was not sent to MLflow yet."""
    folder = tmp_path / "run"
    (folder / "doctor" / "step-3").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss": 2.0}\n')
    write_json(folder / "summary.json", {"status": "FAILED", "log": None})
    return folder


def publish_in(run: Path, verdict: str, *findings: Finding, of: Path | None = None) -> list[str]:
    """Publish a diagnosis of step 3, and return what is printed."""
    taken: Any = SimpleNamespace(folder=of, step=SimpleNamespace(number=3))
    written = [run / "doctor" / "step-3" / name for name in ("report.html", "verdict.json")]
    for path in written:
        path.write_text("x")
    return publish(Diagnosis(taken, Budget(60, taken.step), verdict, findings=list(findings)), written[0])


def test_the_run_is_sent_with_the_files_and_tags_of_the_newest_diagnosis(run: Path, store: str) -> None:
    replace(INFO, uri=store).write(run)
    client = connect(store)

    def stored() -> tuple[dict[str, str], list[str], int]:
        """The doctor's tags and files, and the number of points of the loss."""
        run_id = TrackedRun.read(run).run_id
        tags = {name: value for name, value in client.get_run(run_id).data.tags.items() if name.startswith("doctor.")}
        paths = [entry.path for entry in client.list_artifacts(run_id, "doctor/step-3")]
        return tags, paths, len(client.get_metric_history(run_id, "train/loss"))

    first = publish_in(run, FOUND, FINDING, replace(FINDING, module="other"), of=run)
    assert "http://127.0.0.1:5000/#/experiments/" in first[0]
    sent = ["doctor/step-3/report.html", "doctor/step-3/verdict.json"]
    tags = {"verdict": "FOUND", "step": "3", "kind": "overflow", "module": "wo", "op": "aten.mm",
            "direction": "forward", "format": "fp16"}  # fmt: skip
    assert stored() == ({f"doctor.{name}": value for name, value in tags.items()}, sent, 1)
    assert publish_in(run, HEALTHY, of=run) == first
    assert stored() == ({"doctor.verdict": "HEALTHY", "doctor.step": "3"}, sent, 1)


def test_what_cannot_be_sent_is_one_line_and_what_is_not_in_mlflow_is_not_sent(run: Path) -> None:
    assert publish_in(run, HEALTHY) == []
    INFO.write(run)  # tracking=local
    assert publish_in(run, FOUND, FINDING, of=run) == []
    replace(INFO, uri="http://127.0.0.1:9").write(run)
    (line,) = publish_in(run, FOUND, FINDING, of=run)
    assert line.startswith("the report is not in MLflow (")
