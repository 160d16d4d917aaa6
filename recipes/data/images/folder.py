"""``data=imagefolder``: one folder per class, decoded as training goes."""

from __future__ import annotations

import filecmp
import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from mantissa.display import shortened
from recipes.data.images.layout import PARTS, TEST, TRAINING, VALIDATION, WANTED, Folder, arrange, numbers, read
from recipes.data.images.pixels import DecodedImages
from recipes.data.images.source import ImageDatasets, ImageSource
from trainer.data.contract import check_no_overlap
from trainer.errors import UserError, check_range

log = logging.getLogger("mantissa")


@dataclass
class ImageFolder(ImageSource):
    """Images in one folder per class."""

    kind: ClassVar[str] = "imagefolder"
    path: str = ""
    """Folder with one folder per class, or with ``train/`` and ``val/`` (or the like) that have one per class."""
    valid_fraction: float = 0.1
    """Fraction of each class held out for validation, if there is no ``val/``; a hash of the file names picks them."""
    test: str | None = None
    """Test images, one folder per class, evaluated once, at the end, with the best weights; null: ``test/`` beside
    ``train/``, if it has images in class folders."""
    on_error: str = "error"
    """What to do about an image that cannot be decoded. error: save a checkpoint and stop; skip: count it and take the
    next image."""

    def __post_init__(self) -> None:
        check_range("data.valid_fraction", self.valid_fraction, "(0, 1)")
        if not self.path:
            raise UserError(f"missing required option: data.path; set {WANTED}, as in data.path=/folder")
        for key, path in (("data.path", self.path), ("data.test", self.test or ".")):
            if not Path(path).expanduser().is_dir():
                raise UserError(f"{key}={path} is not a folder (unpack an archive); set {WANTED}")

    def images(self, image_size: int | None) -> ImageDatasets:
        """Find the images; squares of 224 pixels by default.

        Raises:
            UserError: no images, fewer than two classes, or folders that can be read in two ways.
        """
        root = read(os.path.expanduser(self.path))
        folders = arrange(root)
        if self.test:
            folders[TEST] = read(os.path.expanduser(self.test)).unwrapped(TEST)
        train = folders[TRAINING]
        for each in folders.values():
            if not each.folders:
                raise UserError(f"{each.path} has no folders of images; set {WANTED}")
            if unknown := sorted(each.folders.keys() - train.folders.keys()):
                raise UserError(f"{each.path} has the class {unknown[0]}, which {train.path} does not have; rename it")
        files = {part: {name: each.files() for name, each in found.folders.items()} for part, found in folders.items()}
        if train.empty:
            log.warning("%s has folders without images, which are no classes: %s", train.path, shortened(train.empty))
        classes = sorted(files[TRAINING])
        plain = {"".join(name.casefold().split()) if len(name) > 1 else name: name for name in classes}  # A, a: letters
        if again := sorted({*classes} - {*plain.values()}):
            log.warning("classes differ from %s in case or blanks only; join those that are one", shortened(again))
        deep = [each for each in map(Folder.unwrapped, train.folders.values()) if len(each.folders) > 1]
        if 2 * len(deep) > len(classes):
            message = "%s is one class, with all in %s; if these are the classes, set data.path=%s, or move them up"
            log.warning(message, deep[0].path, shortened(sorted(deep[0].folders)), deep[0].path)
        origin = ", ".join(f"{part} {found.path}" for part, found in folders.items())
        if VALIDATION not in files:
            files[TRAINING], files[VALIDATION] = _split(files[TRAINING], self.valid_fraction)
            lone = f" but {lone} with one image" if (lone := [*files[VALIDATION].values()].count([])) else ""
            origin += f", validation {self.valid_fraction:.3g} of each class{lone}"
        flat = {part: [file for members in found.values() for file in members] for part, found in files.items()}
        for role in (TRAINING, VALIDATION) if TEST in files else ():
            check_no_overlap(f"data.test={folders[TEST].path}", flat[TEST], flat[role], role)
        for part in (VALIDATION, TEST):
            if copies := _copies(flat.get(part, []), flat[TRAINING]):
                message = "at least %d of the %s images are training images, too (%s is %s); results look too good"
                log.warning(message, len(copies), part, *copies[0])
        parts = {part: FolderImages(files[part], classes, self.on_error) for part in PARTS if part in files}
        size, side = image_size or 224, parts[TRAINING].shorter_side()
        passed = f"; passed over: {numbers(root.passed)}" if root.passed.total() else ""
        title = f"{self.kind} ({origin}{passed})"
        return self.opened(title, f"data.path={self.path}", parts, classes, size, side, decodes=True)


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


def _split(classes: dict[str, list[str]], fraction: float) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Keep a part of each class for validation: at least one image, never the last one."""
    train, valid = {}, {}
    for name, files in classes.items():
        ranked = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(os.path.basename(file))).digest())
        count = min(max(round(len(files) * fraction), 1), len(files) - 1)
        valid[name], train[name] = sorted(ranked[:count]), sorted(ranked[count:])
    return train, valid


def _copies(files: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Return files with the content of one of the others, and that one; of many files, some are compared."""
    some, against = (each[:: len(each) // 1000 + 1] for each in (files, others))
    sizes: dict[int, list[str]] = {}
    for file in against:
        sizes.setdefault(os.path.getsize(file), []).append(file)
    pairs = [(file, other) for file in some for other in sizes.get(os.path.getsize(file), [])[:10]]
    found = []
    for pair in pairs:
        with suppress(OSError):  # what cannot be read is told where it is decoded
            if filecmp.cmp(*pair, shallow=False):
                found.append(pair)
    return [*dict(found).items()]
