"""What keeps a run's checkpoints in MLflow, on a store that is a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tracked import save
from trainer.files import write_json
from trainer.tracking.mlflow import checkpoints as mlflow_checkpoints
from trainer.tracking.mlflow.checkpoints import CheckpointSender
from trainer.tracking.mlflow.description import description

RUN: Any = SimpleNamespace(info=SimpleNamespace(run_id="r"))


class Client:
    """As much of MLflow's client as sending takes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def log_artifact(self, run_id: str, path: str, place: str | None) -> None:
        folder = self.root / (place or "")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)

    def log_text(self, run_id: str, text: str, file: str) -> None:
        (self.root / file).write_text(text)

    def list_artifacts(self, run_id: str, place: str) -> list[Any]:
        return [
            SimpleNamespace(
                path=path.relative_to(self.root).as_posix(), is_dir=path.is_dir(), file_size=path.stat().st_size
            )
            for path in sorted((self.root / place).glob("*"))
        ]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def remove(client: Client, run: Any, name: str) -> None:
        shutil.rmtree(client.root / "checkpoints" / name)

    monkeypatch.setattr(mlflow_checkpoints, "_remove", remove)
    return Client(tmp_path / "store")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (folder / name).write_text("{}\n")
    return folder


def send(sender: CheckpointSender, client: Any) -> None:
    sender.send(client, RUN, lambda name, size: None)


def kept(client: Client) -> list[str]:
    return sorted(path.name for path in (client.root / "checkpoints").iterdir())


def test_one_that_is_set_aside_is_sent_by_the_name_of_its_step(run: Path, client: Any) -> None:
    saved = save(run, 20)
    saved.rename(saved.with_name(f".{saved.name}.old"))
    sender = CheckpointSender(run, "all")
    assert sender.unsent() == ["step-00000020"]
    send(sender, client)
    assert kept(client) == ["step-00000020"]
    assert sender.unsent() == []


def test_what_cannot_be_removed_is_reported_once_and_stops_nothing(
    run: Path, client: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = CheckpointSender(run, "all")
    first, second = save(run, 10), save(run, 20)
    send(sender, client)

    def forbidden(client: Client, run: Any, name: str) -> None:
        raise PermissionError("no right at http://me:s3cret@host to delete")

    monkeypatch.setattr(mlflow_checkpoints, "_remove", forbidden)
    for folder, step in ((first, 30), (second, 40)):
        shutil.rmtree(folder)
        save(run, step)
        send(sender, client)
    (said,) = caplog.messages
    assert said == "MLflow does not remove old checkpoints (no right at http://me:***@host to delete); they stay there."
    assert kept(client) == [f"step-000000{step}" for step in (10, 20, 30, 40)]


@pytest.mark.parametrize(("status", "resumable"), [("FINISHED", True), ("KILLED", True), ("KILLED", False)])
def test_the_note_has_the_command_to_continue_if_possible(run: Path, status: str, resumable: bool) -> None:
    save(run, 10)
    summary = {"recipe": "gpt2", "precision": "bf16", "step": 10, "steps": 20, "best": None, "resume": "python x"}
    write_json(run / "summary.json", summary | {"status": status})
    note = description(run, "r", None, resumable=resumable)
    assert note
    assert ("resume=mlflow:r" in note) == resumable
    assert ("with more `steps=`" in note) == (status == "FINISHED")
