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

from recipes.data.images.pixels import DecodedImages, check_fraction
from recipes.data.images.source import ImageDatasets, ImageSource
from trainer.data.contract import check_no_overlap
from trainer.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
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
        check_fraction(self.valid_fraction)
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
        train_folder, valid_folder = _split_folders(Path(self.path).expanduser())
        train = _images_by_class(train_folder)
        classes = sorted(train)
        valid = _images_by_class(valid_folder) if valid_folder else {}
        if not valid_folder:
            train, valid = _split(train, self.valid_fraction)
        parts = {"training": train, "validation": valid}
        test_folder = Path(self.test).expanduser() if self.test else _test_folder(train_folder, set(classes))
        if test_folder:
            parts["test"] = _images_by_class(test_folder)
            for role in ("training", "validation"):
                check_no_overlap(f"data.test={test_folder}", _files(parts["test"]), _files(parts[role]), role)
        for part, folder in zip(parts.values(), (train_folder, valid_folder, test_folder), strict=False):
            if unknown := sorted(set(part) - set(classes)):
                raise UserError(f"{folder} has the class {unknown[0]}, which {train_folder} does not have; rename it")
        datasets = {name: FolderImages(part, classes, self.on_error) for name, part in parts.items()}
        side = datasets["training"].shorter_side()
        return self.opened(
            self.kind, f"data.path={self.path}", datasets, classes, image_size or 224, side, decodes=True
        )


def _files(classes: dict[str, list[str]]) -> list[str]:
    return [file for members in classes.values() for file in members]


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


def _split_folders(root: Path) -> tuple[Path, Path | None]:
    """Return the folders to train and to validate on. A class of trains is not a training split."""
    train = root / "train"
    if not train.is_dir() or not any(entry.is_dir() for entry in train.iterdir()):
        return root, None
    names = ("val", "valid", "validation")
    return train, next((root / name for name in names if (root / name).is_dir()), None)


def _test_folder(train: Path, classes: set[str]) -> Path | None:
    """Return ``test/`` beside ``train/``, where it has class folders: published test images often have no labels."""
    folder = train.parent / "test"
    if train.name != "train" or not folder.is_dir():
        return None
    found = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if other := sorted(found - classes):
        message = "%s is not used: %s is no class of %s; to evaluate it, rename its folders, or set data.test="
        logging.getLogger("mantissa").warning(message, folder, other[0], train)
    return folder if found and not other else None


def _images_by_class(root: Path) -> dict[str, list[str]]:
    """Return each class folder's images, sorted; a class folder may have folders of its own."""
    classes = {}
    for folder in sorted(entry for entry in root.iterdir() if entry.is_dir()):
        if files := images_below(folder):
            classes[folder.name] = files
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
