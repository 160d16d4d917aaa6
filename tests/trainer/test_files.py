"""Folders and cached results that a kill leaves whole or not at all (trainer/files.py, trainer/cache.py)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from trainer import cache, files
from trainer.errors import UserError
from trainer.files import read_config, remove_folder


class Killed(BaseException):
    pass


def test_a_config_is_read_as_windows_saves_it_and_one_that_cannot_be_read_is_no_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_config(path) == {}
    path.write_bytes(b'\xef\xbb\xbf{\r\n"mean": 0}\r\n')
    assert read_config(path) == {"mean": 0}
    for damaged in (b'{"mean": ', "{}".encode("utf-16"), b"[]"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"config.json cannot be read \(.+\); restore it$"):
            read_config(path)


def test_a_folder_whose_removal_is_killed_is_not_there_and_its_rest_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "best"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).touch()

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "a").unlink()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            remove_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == [".best.old"]
    remove_folder(folder)
    assert not list(tmp_path.iterdir())


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
