"""Test data is neither trained on nor chosen by, under whatever name it is given."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.data.images.folder import ImageFolder
from recipes.data.text.corpus import TextFiles
from trainer.errors import UserError

Data = Callable[..., object]


def images(path: str, **options: str) -> object:
    return ImageFolder(path=path, **options).images(8)


def text(path: str, **options: str) -> object:
    return TextFiles(path=path, tokenizer="bytes", **options).tokens(None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """photos/ with train/, val/ and a test set elsewhere; texts/ and rows/, and other names of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for part in ("photos/train", "photos/val", "tested"):
        for number in range(4):
            file = Path(part, "ab"[number % 2], f"{number}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(file)
    for part in ("train", "test"):
        Path("texts").mkdir(exist_ok=True)
        Path(f"texts/{part}.txt").write_text(f"{part} words\n" * 99)
    Path("link").symlink_to("photos/train")
    Path("text.link").symlink_to("texts/train.txt")
    shutil.copytree("tested", "linked")  # one of its images is a link, one of hard's has two names
    Path("linked/a/x.png").symlink_to(tmp_path / "photos/train/a/0.png")
    shutil.copytree("tested", "hard")
    os.link("photos/val/b/1.png", "hard/b/x.png")
    Path("pool").mkdir()  # of links to what is tested
    for name in "ab":
        Path("pool", name).mkdir()
        for file in Path("tested", name).iterdir():
            Path("pool", name, file.name).symlink_to(file.absolute())
    return tmp_path


@pytest.mark.parametrize(
    ("data", "where", "test", "role"),
    [
        (images, "photos", "photos/train", "training"),
        (images, "photos", "photos/val", "validation"),
        (images, "photos/train", "photos/train", "training"),  # of which a part is held out
        (images, "photos", "link", "training"),
        (images, "photos", "linked", "training"),
        (images, "photos", "hard", "validation"),
        (images, "pool", "tested", "training"),
        (text, "texts/train.txt", "texts/train.txt", "training"),
        (text, "texts/train.txt", "text.link", "training"),
        (text, "text.link", "texts", "training"),
        (text, "texts", "texts/test.txt", "training"),
    ],
)
def test_what_is_trained_on_or_chosen_by_is_no_test_data(
    data: Data, where: str, test: str, role: str, place: Path
) -> None:
    with pytest.raises(UserError, match=rf"data\.test={test}.* is (the )?{role} .*used for nothing else"):
        data(where, test=test)


def test_a_test_folder_that_is_found_is_checked_and_other_data_tests(place: Path) -> None:
    images("photos", test="tested")
    text("texts/train.txt", test="texts/test.txt")
    Path("photos/test").symlink_to(place / "photos/val")
    with pytest.raises(UserError, match=r"data\.test=photos/test: .* is validation data, too"):
        images("photos")
