"""Folders of photos: which classes, splits and counts are read, or what is said instead."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.data.images.folder import LAYOUT, ImageFolder
from tests.helpers import PROJECT, compose
from trainer.data.contract import SampleId
from trainer.errors import UserError

PET = "{cat,dog}/{5}.png"


def write(folder: Path, *patterns: str, height: int = 9, width: int = 9) -> Path:
    """Write files: ``{cat,dog}/{3}.png`` is three images for each of two classes; others than images are text."""
    for pattern in patterns:
        names = [""]
        for part in re.split(r"(\{[^}]*\})", pattern):
            inner = part[1:-1]
            choices = [part]
            if part.startswith("{"):
                choices = [f"{number}" for number in range(int(inner))] if inner.isdigit() else inner.split(",")
            names = [name + choice for name in names for choice in choices]
        for name in names:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix.lower() in Image.registered_extensions():
                pixels = np.random.default_rng(list(name.encode())).integers(0, 256, (height, width, 3), np.uint8)
                Image.fromarray(pixels).save(file)
            else:
                file.write_text("text")
    return folder


READ: dict[str, tuple[tuple[str, ...], str, tuple[int, ...], str]] = {
    # files; classes; images for training, validation and test; what the start block says
    "classes": ((PET,), "cat dog", (8, 2), "(training PATH, validation 0.1 of each class): 8 training"),
    "train": (("train/" + PET,), "cat dog", (8, 2), "(training PATH/train, validation 0.1 of each class): 8 training"),
    "train and val": (
        ("{train,val}/" + PET,),
        "cat dog",
        (10, 10),
        "(training PATH/train, validation PATH/val): 10 tr",
    ),
    "train and test": (
        ("{train,test}/" + PET,),
        "cat dog",
        (8, 2, 10),
        "test PATH/test, validation 0.1 of each class)",
    ),
    "in full": (("{training,validation,testing}/" + PET,), "cat dog", (10, 10, 10), "PATH/validation, test PATH/te"),
    "in short": (("{train,Valid,test}/" + PET,), "cat dog", (10, 10, 10), "validation PATH/Valid, test PATH/test"),
    "shouted": (("{TRAIN,VAL}/{cat,dog}/{5}.JPG",), "cat dog", (10, 10), "validation PATH/VAL"),
    "below a class": (("cat/{3}.png", "cat/{a,a/b}/{2}.png", "dog/1.png"), "cat dog", (7, 1), "but 1 with one image"),
    "val of one class": (("train/" + PET, "val/dog/{3}.png"), "cat dog", (10, 3), "2 classes"),
    "a class of trains": (("{bus,train}/{5}.png",), "bus train", (8, 2), "(bus, train)"),
    "classes like splits": (("{trainer,testudo,val2}/{5}.png",), "testudo trainer val2", (12, 3), "3 classes"),
    "hidden": (
        (
            *(PET, "{.git,__MACOSX,.train}/cat/a.png", "cat/{.ipynb_checkpoints,__MACOSX,a/.b}/{5}.png"),
            *("dog/{._0.png,.DS_Store}", ".a.png"),
        ),
        "cat dog",
        (8, 2),
        "of each class): 8 training",
    ),
    "all suffixes": (
        ("a/{0.JPG,1.jpeg,2.jfif,3.avif,4.webp,5.TIF,6.tiff}", "b/{0.PNG,1.bmp,2.gif,3.jpe,4.pgm,5.heic,6}"),
        "a b",
        (10, 2),
        "; passed over: 1 .heic, 1 without a suffix): 10 training",
    ),
    "names of another form of Unicode": (
        ("train/{Äpfel,Nüsse}/{5}.png", "val/{A\u0308pfel,Nu\u0308sse}/{5}.png"),
        "Äpfel Nüsse",
        (10, 10),
        "2 classes",
    ),
}


def described(folder: Path) -> str:
    return ImageFolder(path=str(folder)).images(8).description.replace(str(folder), "PATH")


def refused(folder: Path, **options: str) -> str:
    """The message, which ends with the layout, without it."""
    with pytest.raises(UserError) as raised:
        ImageFolder(path=str(folder), **options).images(8)
    message, _, drawn = str(raised.value).partition("data.path must be ")
    assert drawn.endswith(f":\n{LAYOUT}")
    return message.replace(str(folder), "PATH").removesuffix("; ")


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str, tmp_path: Path) -> None:
    files, classes, counts, says = READ[name]
    folder = tmp_path / ".cache/photos"  # what is hidden is so from the folder on
    write(folder, *files)
    data = ImageFolder(path=str(folder)).images(8)
    assert data.classes == sorted(classes.split())
    assert tuple(len(part) for part in (data.train, data.valid, data.test) if part) == counts
    assert says in data.description.replace(str(folder), "PATH")


NO_CLASSES, NO_TRAIN = "and no folders of two classes or more", "not train/ with only val/ and test/ beside it"
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((".hidden/a.png",), f"PATH has nothing in it, {NO_CLASSES}"),
    "one class": (("cat/{5}.png",), f"PATH has the folder cat, {NO_CLASSES}"),
    "one class to train": (("train/cat/{5}.png", "val/" + PET), f"PATH/train has the folder cat, {NO_CLASSES}"),
    "packed": (("set/" + PET,), f"PATH has the folder set, {NO_CLASSES}; set data.path=PATH/set"),
    "packed, with what does not fit": (("set/{train,dev}/" + PET,), f"PATH has the folder set, {NO_CLASSES}"),
    "no images": (("{cat,dog}/{5}.md",), "PATH/cat has files (5 .md), and no images (.jpg, "),
    "an empty class": ((PET, "fox/.keep"), "PATH/fox has nothing in it, and no images (.jpg, "),
    "classes in classes": (
        ("{amazon,dslr}/{bike,mug}/{2}.png",),
        "PATH/amazon has the folders bike, mug, and no images (.jpg, ",
    ),
    "folders in a class of val": (
        ("train/" + PET, "val/cat/a/{2}.png"),
        "PATH/val/cat has the folder a, and no images",
    ),
    "no classes in train": (("train/{5}.png", "val/" + PET), f"PATH/train has files (5 .png), {NO_CLASSES}"),
    "no classes in val": (("train/" + PET, "val/{9}.png"), "PATH/val has files (9 .png), and no folders of classes"),
    "no train": (("{val,test}/" + PET,), f"PATH has the folders test, val, {NO_TRAIN}"),
    "train twice": (("{train,Train}/" + PET,), f"PATH has the folders Train, train, {NO_TRAIN}"),
    "a split of another name": (("{train,dev}/" + PET,), f"PATH has the folders dev, train, {NO_TRAIN}"),
    "a new class in val": (
        ("train/" + PET, "val/cow/{3}.png"),
        "PATH/val has the class cow, which PATH/train does not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_there_and_the_layout_that_is_wanted_are_said(name: str, tmp_path: Path) -> None:
    files, message = REFUSED[name]
    write(tmp_path, *files)
    said = refused(tmp_path)
    assert said.startswith(message)
    assert ("set data.path=" in said) == ("set data.path=" in message)


def test_test_data_of_their_own_are_class_folders(tmp_path: Path) -> None:
    write(tmp_path, "photos/" + PET, "flat/{3}.png", "other/{cat,cow}/{3}.png", "more/cat/{3}.png")
    test = str(tmp_path / "flat")
    assert refused(tmp_path / "photos", test=test) == f"{test} has files (3 .png), and no folders of classes"
    assert "other has the class cow, which PATH does not have" in refused(
        tmp_path / "photos", test=str(tmp_path / "other")
    )
    data = ImageFolder(path=str(tmp_path / "photos"), test=str(tmp_path / "more")).images(8)
    assert data.test is not None
    assert len(data.test) == 3


def test_the_folder_that_fits_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "my photos/set (1)/" + PET)
    remedy = re.search(r"; set (.*)$", refused(Path("my photos")))
    assert remedy
    config = compose("recipe=resnet", "data=imagefolder", *shlex.split(remedy[1].replace("PATH", "my photos")))
    assert config.data.images(8).classes == ["cat", "dog"]


def test_the_page_draws_the_layout_of_the_messages() -> None:
    assert LAYOUT in (PROJECT / "docs/recipes.md").read_text(encoding="utf-8")


def test_the_order_of_images_does_not_change(tmp_path: Path) -> None:
    """It is that of whole paths within a class; the order of training, and who is held out, depend on it."""
    write(tmp_path, "split/train/cat/{c,a,b/1,b0}.png", "split/train/Zebra/{10,9}.png", "split/val/cat/{2}.png")
    write(tmp_path, "alone/{b,a}/{9}.png")
    split = ImageFolder(path=str(tmp_path / "split")).images(8)
    names = [os.path.relpath(os.fsdecode(file), tmp_path / "split/train") for file in split.train.files]
    assert names == ["Zebra/10.png", "Zebra/9.png", "cat/a.png", "cat/b/1.png", "cat/b0.png", "cat/c.png"]
    assert split.train.labels.tolist() == [0, 0, 1, 1, 1, 1]
    valid = ImageFolder(path=str(tmp_path / "alone"), valid_fraction=0.3).images(8).valid
    names = [os.path.relpath(os.fsdecode(file), tmp_path / "alone") for file in valid.files]
    assert names == ["a/0.png", "a/6.png", "a/8.png", "b/0.png", "b/6.png", "b/8.png"]


def test_links_are_followed_and_a_dead_one_is_a_broken_image(tmp_path: Path) -> None:
    write(tmp_path, "photos/{train,val}/" + PET, "elsewhere/{4}.png")
    for part in ("train", "val"):
        (tmp_path / f"photos/{part}/fox").symlink_to(tmp_path / "elsewhere")
        (tmp_path / f"photos/{part}/dog/gone.png").symlink_to("nowhere.png")
    data = ImageFolder(path=str(tmp_path / "photos")).images(8)
    assert (data.classes, len(data.train), len(data.valid)) == (["cat", "dog", "fox"], 15, 15)
    gone = [os.fsdecode(file).endswith("gone.png") for file in data.train.files].index(True)
    with pytest.raises(UserError, match=r"train/dog/gone\.png cannot be decoded"):
        data.train.batch([SampleId(gone, None)])


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    write(tmp_path, PET)
    for file in tmp_path.rglob("*.png"):
        file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{hash(file)}\nsize 12345\n")
    with pytest.raises(UserError, match="git lfs pull"):
        ImageFolder(path=str(tmp_path)).images(8).train.batch([SampleId(0, None)])
