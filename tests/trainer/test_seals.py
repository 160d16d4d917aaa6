"""What is refused of a run's folder, and what its owner may keep there (trainer/seals.py, trainer/files.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.tracked import save
from trainer.checkpoint.schema import InvalidCheckpoint, read_manifest
from trainer.errors import UserError
from trainer.files import check_entries
from trainer.run_folder import RunFolder, named
from trainer.seals import check_folder, read_sealed, seal_folder, write_sealed
from trainer.tracking.mlflow.record import refuse_changed


def test_what_an_earlier_version_wrote_is_not_called_changed(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text('{"folder": "/"}')
    with pytest.raises(ValueError, match="it was written by an earlier version"):
        read_sealed(tmp_path / "launch.json")
    write_sealed(tmp_path / "launch.json", {"folder": "/"})
    (tmp_path / "launch.json").write_text((tmp_path / "launch.json").read_text().replace("/", "/a"))
    with pytest.raises(ValueError, match="it was changed"):
        read_sealed(tmp_path / "launch.json")
    manifest = save(tmp_path, 1) / "manifest.json"
    content = {key: value for key, value in read_sealed(manifest).items() if key in ("step", "score", "sha256")}
    for before in (content, content | {"format": 2}):
        manifest.write_text(json.dumps(before))
        with pytest.raises(InvalidCheckpoint, match="was written by another version"):
            read_manifest(manifest.parent)


@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin", "vocab.txt", "chat_template.jinja"],
)
def test_a_file_that_a_loader_would_read_is_not_added_to_a_sealed_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    seal_folder(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "evaluation.json").touch()
    for harmless in ("README.md", "notes.txt", ".DS_Store", "._config.json", "predictions.csv"):
        (tmp_path / harmless).touch()
    check_folder(tmp_path, "run=a")
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"{name} is not the run's"):
        check_folder(tmp_path, "run=a")


def test_what_vanishes_and_what_is_its_owners_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eval.v2").mkdir()
    walked = list(os.walk(tmp_path))
    walked[0][2].append(".summary.json.partial")  # gone since
    with monkeypatch.context() as patch:
        patch.setattr(os, "walk", lambda folder: walked)
        check_entries(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="should be a file"):
        check_entries(tmp_path)


def test_what_is_no_folder_is_no_run_of_this_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").symlink_to("/nowhere/at/all")
    (tmp_path / "a-3").touch()
    assert [folder.path.name for folder in named(str(tmp_path), "a")] == ["a"]
    assert RunFolder.create(str(tmp_path), "a").path.name == "a-4"


def test_a_damaged_manifest_is_named_where_a_run_cannot_be_sent(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"step-00000001/manifest\.json cannot be sent"):
        refuse_changed(tmp_path)
