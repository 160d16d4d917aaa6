"""A run that was started with relative paths is found, resumed and evaluated from any folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from inference.options import RunOptions
from inference.run_config import configure
from tests.command_line.conftest import Train

RUN = (
    "recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=text", "data.path=one.txt", "data.tokenizer=bytes",
    "tracking=local", "device=cpu", "batch_size=4", "eval_samples=8",
)  # fmt: skip


@pytest.fixture
def elsewhere(succeed: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of two steps, seen from another folder, which has a text of the same name."""
    (folder / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    succeed(*RUN, "steps=2", "run_name=first")
    there = folder.parent / "there"
    there.mkdir()
    (there / "one.txt").write_text("another text, which is not the text of this run! " * 60)
    monkeypatch.chdir(there)
    return Path("..") / "here" / "outputs" / "first"


def path_of(run: Path) -> str:
    found: str = json.loads((run / "config.json").read_text())["data.path"]
    return found


def test_its_own_data_are_found_from_another_folder(elsewhere: Path, folder: Path, succeed: Train) -> None:
    setting = configure(RunOptions(str(elsewhere)).find(), [])
    assert setting.config.data.path == str(folder / "one.txt")  # type: ignore[attr-defined]
    typed = configure(RunOptions(str(elsewhere)).find(), ["data.path=one.txt"])
    assert typed.config.data.path == "one.txt"  # type: ignore[attr-defined]

    succeed(f"resume={elsewhere}", "steps=4")
    assert path_of(elsewhere) == str(folder / "one.txt")


def test_the_same_path_may_be_written_in_another_way(
    elsewhere: Path, folder: Path, train: Train, succeed: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = (*RUN, "run_name=first", f"output_dir={folder / 'outputs'}")
    absolute = f"data.path={folder / 'one.txt'}"
    done = train(*same, absolute, "steps=2", "resume=same")
    assert "is already complete" in done.out, done.out + done.err
    succeed(*same, absolute, "steps=3", "resume=auto")
    monkeypatch.chdir(folder)
    assert path_of(Path("outputs/first")) == str(folder / "one.txt")
    resumed = succeed(*same, "steps=4", "resume=auto")
    assert "first, resumed after step 3" in resumed.out
    refused = train(*same, "data.path=../there/one.txt", "steps=5", "resume=auto")
    assert "data.path was one.txt, now ../there/one.txt" in refused.err


def test_data_that_were_moved_are_named_by_the_user(
    elsewhere: Path, folder: Path, train: Train, succeed: Train
) -> None:
    shutil.move(folder / "one.txt", "moved.txt")
    refused = train(f"resume={elsewhere}", "steps=4", "data.path=one.txt")
    assert (refused.code, "has changed since its last checkpoint" in refused.err) == (2, True), refused.err
    assert "training tokens were " in refused.err
    Path("one.txt").unlink()
    gone = train(f"resume={elsewhere}", "steps=4")
    assert "set data.path=… to its new place\n" in gone.err  # and no other data, with which it would be another run
    succeed(f"resume={elsewhere}", "steps=4", "data.path=moved.txt")
    assert path_of(elsewhere) == "moved.txt"
    assert configure(RunOptions(str(elsewhere)).find(), []).config.data.path == "moved.txt"  # type: ignore[attr-defined]


def test_a_pattern_leads_from_the_folder_of_the_start(
    folder: Path, succeed: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.bin", "b.bin"):
        np.arange(2000, dtype=np.uint16).tofile(folder / name)
    succeed(*RUN[:3], "data=tokens", "data.path=*.bin", *RUN[6:], "steps=2", "run_name=ids")
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    succeed("resume=../outputs/ids", "steps=4")
    assert path_of(Path("../outputs/ids")) == str(folder / "*.bin")
