"""``data=imagefolder``: one folder per class, decoded as training goes."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from recipes.data.images.pixels import DecodedImages
from recipes.data.images.source import ImageDatasets, ImageSource
from trainer.data.contract import check_no_overlap
from trainer.errors import UserError, check_range

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PARTS = ("training", "validation", "test")
WANTED = "a folder with one folder of images per class, or with train/ and val/ (and perhaps test/) holding those"


@dataclass
class ImageFolder(ImageSource):
    """Images in one folder per class."""

    kind: ClassVar[str] = "imagefolder"
    path: str = ""
    """Folder with one folder per class, or with ``train/`` and ``val/`` that have one folder per class."""
    valid_fraction: float = 0.1
    """Fraction of each class held out for validation, if there is no ``val/``; a hash of the file names picks them."""
    test: str | None = None
    """Test images, one folder per class, evaluated once, at the end, with the best weights; null: ``test/`` beside
    ``train/``, if it has images in class folders. """
    on_error: str = "error"
    """What to do about an image that cannot be decoded. error: save a checkpoint and stop; skip: count it and take the
    next image."""

    def __post_init__(self) -> None:
        check_range("data.valid_fraction", self.valid_fraction, "(0, 1)")
        if not self.path:
            raise UserError(f"missing required option: data.path; set {WANTED}, as in data.path=/folder")
        for key, path in (("data.path", self.path), ("data.test", self.test or ".")):
            if not Path(path).expanduser().is_dir():
                raise UserError(f"{key}={path} is not a folder; set {WANTED}")

    def images(self, image_size: int | None) -> ImageDatasets:
        """Find the images; squares of 224 pixels by default.

        Raises:
            UserError: no images, fewer than two classes.
        """
        folders = _part_folders(Path(self.path).expanduser(), self.test)
        files = {part: _images_by_class(folder) for part, folder in folders.items()}
        classes = sorted(files["training"])
        for part, folder in folders.items():
            if unknown := sorted(files[part].keys() - classes):
                train = folders["training"]
                raise UserError(f"{folder} has the class {unknown[0]}, which {train} does not have; rename it")
        if "validation" not in files:
            files["training"], files["validation"] = _split(files["training"], self.valid_fraction)
        flat = {part: [file for members in found.values() for file in members] for part, found in files.items()}
        for role in ("training", "validation") if "test" in files else ():
            check_no_overlap(f"data.test={folders['test']}", flat["test"], flat[role], role)
        parts = {part: FolderImages(files[part], classes, self.on_error) for part in PARTS if part in files}
        size, side = image_size or 224, parts["training"].shorter_side()
        return self.opened(self.kind, f"data.path={self.path}", parts, classes, size, side, decodes=True)


class FolderImages(DecodedImages):
    """A dataset of image files."""

    def __init__(self, files: dict[str, list[str]], classes: list[str], on_error: str = "error") -> None:
        # One array of bytes, not a list of strings: worker processes share it without copying.
        self.files = np.array([os.fsencode(file) for name in classes for file in files.get(name, [])])
        labels = [label for label, name in enumerate(classes) for _ in files.get(name, [])]
        super().__init__(torch.tensor(labels, dtype=torch.int64), on_error)

    def stored(self, index: int) -> tuple[str, str]:
        file = os.fsdecode(self.files[index])
        return file, file


def _part_folders(root: Path, test: str | None) -> dict[str, Path]:
    """Return the folders of ``training`` and, where there are any, of ``validation`` and ``test``.

    A class of trains is not a training split, and published test images often have no labels.
    """
    found, train, beside = {"training": root}, root / "train", root / "test"
    if classes := _class_folders(train):
        found["training"] = train
        for name in ("validation", "valid", "val"):
            if (root / name).is_dir():
                found["validation"] = root / name
        tested = set() if test else _class_folders(beside)
        if other := sorted(tested - classes):
            message = "%s is not used: %s is no class of %s; to evaluate it, rename its folders, or set data.test="
            logging.getLogger("mantissa").warning(message, beside, other[0], train)
        elif tested:
            found["test"] = beside
    if test:
        found["test"] = Path(test).expanduser()
    return found


def _class_folders(folder: Path) -> set[str]:
    """Return the names of the folders in a folder; none where there is no such folder."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}


def _images_by_class(root: Path) -> dict[str, list[str]]:
    """Return each class folder's images, sorted; a class folder may have folders of its own."""
    classes = {name: files for name in sorted(_class_folders(root)) if (files := images_below(root / name))}
    if not classes:
        raise UserError(f"{root} has no folders with images ({', '.join(EXTENSIONS)}); data.path must be {WANTED}")
    return classes


def images_below(folder: Path) -> list[str]:
    """Return the image files in a folder and the folders below it, sorted."""
    return sorted(
        os.path.join(place, name)
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
    )


def _split(classes: dict[str, list[str]], fraction: float) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Keep a part of each class for validation: at least one image, never the last one."""
    train, valid = {}, {}
    for name, files in classes.items():
        ranked = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(os.path.basename(file))).digest())
        count = min(max(round(len(files) * fraction), 1), len(files) - 1)
        valid[name], train[name] = sorted(ranked[:count]), sorted(ranked[count:])
    return train, valid
