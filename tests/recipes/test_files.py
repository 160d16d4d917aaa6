from __future__ import annotations

from pathlib import Path

import pytest

from recipes.data.text.files import not_read
from trainer.config.command_line import remedied
from trainer.config.compose import refusal

KINDS = {
    "t10k-labels.idx1-ubyte": "not read here", "a.npy": "data=tokens", "a.PDF": "not read here",
    "a b.zip": "unpack it", "a.tar.gz": "unpack it", "a.jsonl.zst": "unpack it", "rows.csv": "data=hub",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("alone", [True, False])
def test_a_file_that_nothing_reads_is_named_with_what_to_do(name: str, alone: bool, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / name
    file.write_bytes(b"\0\1")
    path = file if alone else tmp_path
    error = not_read(f"data.path={path}", path)
    assert KINDS[name] in str(error)
    assert name in str(error)


def test_other_files_are_left_to_their_readers(tmp_path: Path) -> None:
    for name in ("a.txt", "b.png", ".c.npy"):
        (tmp_path / name).touch()
    assert not_read(f"data.path={tmp_path}", tmp_path) is None


def test_what_to_open_instead_takes_the_place_of_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\na tale\n")
    typed = ["recipe=resnet", "data=imagefolder", f"data.path={tmp_path}"]
    error = not_read(typed[2], tmp_path)
    assert error is not None
    assert error.remedies
    for remedy in error.remedies:
        assert refusal(remedied(typed, remedy, error.mistake)) is None
