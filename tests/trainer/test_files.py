"""Folders and cached results that a kill leaves whole or not at all (trainer/files.py, trainer/cache.py)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tracked import save
from trainer import cache, files
from trainer.checkpoint import store
from trainer.files import remove_folder


class Killed(BaseException):
    pass


@pytest.fixture
def killed_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first removal of a folder ends when one file is gone."""
    remove, first = shutil.rmtree, iter([True])

    def rmtree(path: Path, *arguments: Any, **options: Any) -> None:
        if path.exists() and next(first, False):
            next(file for file in sorted(path.rglob("*")) if file.is_file()).unlink()
            raise Killed
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)


@pytest.mark.usefixtures("killed_in_between")
def test_a_folder_whose_removal_is_killed_is_not_there_and_its_rest_is_removed_later(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).touch()
    with pytest.raises(Killed):
        remove_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == [".best.old"]
    remove_folder(folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("killed_in_between")
def test_a_checkpoint_whose_removal_is_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    with pytest.raises(Killed):
        store.prune(folder, 1)
    assert store.steps(folder) in ([1, 3], [2, 3])
    assert len(list(folder.iterdir())) == 3
    store.prune(folder, 1)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_a_killed_cache_entry_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path))

    def killed(descriptor: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files, "flush", killed)
        with pytest.raises(Killed):
            cache.cached("rates", {"of": 1}, lambda: 2)
    assert len(os.listdir(tmp_path / "rates")) == 1  # what was being written
    assert cache.cached("rates", {"of": 1}, lambda: 3) == 3
    assert cache.cached("rates", {"of": 1}, lambda: 4) == 3
    assert len(os.listdir(tmp_path / "rates")) == 1
