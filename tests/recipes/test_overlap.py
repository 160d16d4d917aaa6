"""Test data is neither trained on nor chosen by, under whatever name it is given."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from recipes.data.images.folder import ImageFolder
from recipes.data.text.corpus import TextFiles
from trainer.errors import UserError


def open_all(path: str, **options: str) -> None:
    if path.startswith("texts"):
        TextFiles(path=path, tokenizer="bytes", **options).tokens(None)
    else:
        ImageFolder(path=path, **options).images(8)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """photos/ with train/, val/ and a test set elsewhere; texts/; and other names of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    for number, part in enumerate(("photos/train", "photos/val", "tested")):
        for name in ("a/0.png", "a/1.png", "b/2.png", "b/3.png"):
            Path(part, name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (9, 9), number).save(Path(part, name))
    Path("texts").mkdir()
    for part in ("train", "test"):
        Path(f"texts/{part}.txt").write_text(f"{part} words\n" * 99)
    Path("link").symlink_to("photos/train")
    Path("texts.link").symlink_to("texts/train.txt")
    shutil.copytree("tested", "linked")  # one of its images is a link, one of hard's has two names
    Path("linked/a/x.png").symlink_to(tmp_path / "photos/train/a/0.png")
    shutil.copytree("tested", "hard")
    os.link("photos/val/b/3.png", "hard/b/x.png")
    return tmp_path


@pytest.mark.parametrize(
    ("where", "test", "role"),
    [
        ("photos", "photos/train", "training"),
        ("photos", "photos/val", "validation"),
        ("photos/train", "photos/train", "training"),  # of which a part is held out
        ("photos", "link", "training"),
        ("photos", "linked", "training"),
        ("photos", "hard", "validation"),
        ("texts/train.txt", "texts.link", "training"),
        ("texts", "texts/test.txt", "training"),
    ],
)
def test_what_is_trained_on_or_chosen_by_is_no_test_data(where: str, test: str, role: str, place: Path) -> None:
    with pytest.raises(UserError, match=rf"data\.test={test}.* is {role} data"):
        open_all(where, test=test)


def test_a_test_folder_that_is_found_is_checked_and_other_data_tests(place: Path) -> None:
    open_all("photos", test="tested")
    open_all("texts/train.txt", test="texts/test.txt")
    Path("photos/test").symlink_to(place / "photos/val")
    with pytest.raises(UserError, match=r"data\.test=photos/test: .* is validation data, too"):
        open_all("photos")
