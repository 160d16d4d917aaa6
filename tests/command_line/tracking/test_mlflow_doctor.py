"""A diagnosis on its run in MLflow: files and tags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evidence.doctor.mlflow import publish
from mantissa.doctor.diagnosis import FOUND, HEALTHY, Budget, Diagnosis
from mantissa.finding import FORWARD, OVERFLOW, Finding
from trainer.files import write_json
from trainer.tracking.mlflow.record import RunInfo, read_record
from trainer.tracking.mlflow.store import connect

INFO = RunInfo("gpt2", "gpt2-fp16-s0", {"precision": "fp16"}, {}, None)
FINDING = Finding(OVERFLOW, FORWARD, "wo", "fp16", op="aten.mm")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that failed and was not sent to MLflow yet."""
    folder = tmp_path / "run"
    (folder / "doctor" / "step-3").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss": 2.0}\n')
    write_json(folder / "summary.json", {"status": "FAILED"})
    return folder


def diagnosis(folder: Path | None, verdict: str, *findings: Finding) -> Diagnosis:
    replay: Any = SimpleNamespace(folder=folder, step=SimpleNamespace(number=3))
    return Diagnosis(replay, Budget(60, lambda: 0), verdict, findings=list(findings))


def files(run: Path) -> list[Path]:
    written = [run / "doctor" / "step-3" / name for name in ("report.html", "verdict.json")]
    for path in written:
        path.write_text("x")
    return written


def test_the_run_is_sent_with_the_files_and_tags_of_the_newest_diagnosis(run: Path, store: str) -> None:
    replace(INFO, uri=store).write(run)
    client = connect(store)

    def stored() -> tuple[dict[str, str], list[str], int]:
        """The doctor's tags and files, and the number of points of the loss."""
        run_id = read_record(run)["run_id"]
        tags = {name: value for name, value in client.get_run(run_id).data.tags.items() if name.startswith("doctor.")}
        paths = [entry.path for entry in client.list_artifacts(run_id, "doctor/step-3")]
        return tags, paths, len(client.get_metric_history(run_id, "loss"))

    first = publish(diagnosis(run, FOUND, FINDING, replace(FINDING, module="other")), files(run))
    assert len(first) == 1
    assert first[0].startswith("in MLflow, while python scripts/ui.py runs: http://127.0.0.1:5000/#/experiments/")
    sent = ["doctor/step-3/report.html", "doctor/step-3/verdict.json"]
    tags = {"verdict": "FOUND", "step": "3", "kind": "overflow", "module": "wo", "op": "aten.mm",
            "direction": "forward", "rung": "fp16"}  # fmt: skip
    assert stored() == ({f"doctor.{name}": value for name, value in tags.items()}, sent, 1)
    assert publish(diagnosis(run, HEALTHY), files(run)) == first
    assert stored() == ({"doctor.verdict": "HEALTHY", "doctor.step": "3"}, sent, 1)


def test_a_store_that_does_not_answer_is_one_line(run: Path) -> None:
    replace(INFO, uri="http://127.0.0.1:9").write(run)
    (line,) = publish(diagnosis(run, FOUND, FINDING), files(run))
    assert line.startswith("the report is not in MLflow (upload incomplete: ")
    assert line.endswith("; run the same command again to retry")


def test_what_is_not_in_mlflow_is_not_sent(run: Path) -> None:
    assert publish(diagnosis(None, HEALTHY), []) == []
    INFO.write(run)  # tracking=local
    assert publish(diagnosis(run, FOUND, FINDING), files(run)) == []
