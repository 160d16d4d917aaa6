"""``data=imagefolder``: one folder per class, decoded as training goes."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mantissa.display import shortened
from recipes.data.images.labels import read as read_table
from recipes.data.images.pixels import DecodedImages
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.data.text.files import NAMES, PART_OF, missing, not_read
from trainer.config.command_line import as_typed
from trainer.data.contract import check_no_overlap
from trainer.errors import UserError, check_range, no_effect

log = logging.getLogger("mantissa")

EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jp2"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
Parts = dict[str, tuple[list[str], Tensor]]
"""The files of each part, and their labels as ``Images`` has them."""
TRAINING, VALIDATION, TEST = PARTS = tuple(NAMES.values())
_SPLITS = {word: NAMES[part] for word, part in PART_OF.items()}
LAYOUT = """\
    photos/
      train/
        cat/1.jpg, 2.jpg, ...
        dog/3.jpg, 4.jpg, ...
      val/
        cat/5.jpg, ...
        dog/6.jpg, ...
      test/
        cat/7.jpg, ...
        dog/8.jpg, ..."""
WANTED = (
    "data.path must be a folder like photos/ (val/ and test/ may be missing) or its train/, data.test one like test/, "
    "or data.labels a table of the labels of the images in data.path:"
    f"\n{LAYOUT}"
)


@dataclass
class ImageFolder(ImageSource):
    """Images in one folder per class, or with their labels in a table."""

    kind: ClassVar[str] = "imagefolder"
    path: str = ""
    """Folder with one folder per class, or with ``train/``, and perhaps ``val/`` and ``test/``, that have one per
    class."""
    valid_fraction: float = 0.1
    """Fraction of each class held out for validation, if there is no ``val/``; a hash of the file names picks them."""
    test: str | None = None
    """Test images, one folder per class, evaluated once, at the end, with the best weights; null: ``test/`` beside
    ``train/``, if there is one."""
    labels: str | None = None
    """CSV file with the columns ``file_name``, a path from ``path`` on, and ``label``, or for several labels to an
    image a column of 0 and 1 for each. A column ``split`` (train, val, test), or folders of these names, part the
    images."""
    on_error: str = "error"
    """What to do about an image that cannot be decoded. error: save a checkpoint and stop; skip: count it and take the
    next image."""

    def __post_init__(self) -> None:
        check_range("data.valid_fraction", self.valid_fraction, "(0, 1)")
        if not self.path:
            raise UserError(f"missing required option: data.path; {WANTED}")
        for key in ("path", "test", "labels"):
            if not Path(path := getattr(self, key) or ".").expanduser().exists():
                raise missing(f"data.{key}={path}")
        if self.labels is not None and self.test is not None:
            why = "the column split of data.labels says which images are for the test"
            raise no_effect(f"data.test={self.test}", why, mistake="data.test")
        for key, path in (("data.path", self.path), ("data.test", self.test or ".")):
            if not (file := Path(path).expanduser()).is_dir():
                raise not_read(f"{key}={path}", file) or UserError(f"{key}={path} is a file, not a folder; {WANTED}")

    def images(self, image_size: int | None) -> ImageDatasets:
        """Find the images; squares of 224 pixels by default.

        Raises:
            UserError: the folders are not as ``LAYOUT`` shows, the table is not as ``labels.WANTED`` says, or a class
                has too few images.
        """
        passed: Counter[str] = Counter()
        found, classes, origin = self._by_folder(passed) if self.labels is None else self._by_table(passed)
        parts = {part: FolderImages(*found[part], self.on_error) for part in PARTS if part in found}
        size, side = image_size or 224, parts[TRAINING].shorter_side()
        left_out = f"; passed over: {numbers(passed)}" if passed.total() else ""
        title = f"{self.kind} ({origin}{left_out})"
        where = f"data.path={self.path}" if self.labels is None else f"data.labels={self.labels}"
        return self.opened(title, where, parts, classes, size, side, decodes=True)

    def _by_folder(self, passed: Counter[str]) -> tuple[Parts, list[str], str]:
        """Return the images of each part with their labels, the classes, and where the parts are from."""
        path = Path(self.path).expanduser()
        folders = _splits(str(path))
        if self.test:
            folders[TEST] = os.path.expanduser(self.test)
        try:
            files = _read(folders, passed)
        except UserError as error:
            other = None if find_images(folders[TRAINING], Counter()) else not_read(f"data.path={self.path}", path)
            raise other or error from None
        classes = sorted(files[TRAINING])
        origin = ", ".join(f"{part} {folder}" for part, folder in folders.items())
        if VALIDATION not in files:
            files[TRAINING], files[VALIDATION] = _split(files[TRAINING], self.valid_fraction)
            lone = f" but {lone} with one image" if (lone := [*files[VALIDATION].values()].count([])) else ""
            origin += f", validation {self.valid_fraction:.3g} of each class{lone}"
        found = {part: _flat(by_class, classes) for part, by_class in files.items()}
        for role in (TRAINING, VALIDATION) if TEST in files else ():
            check_no_overlap(f"data.test={folders[TEST]}", found[TEST][0], found[role][0], role)
        return found, classes, origin

    def _by_table(self, passed: Counter[str]) -> tuple[Parts, list[str], str]:
        """Return the same of images with labels in a table."""
        table, folder = Path(self.labels or "").expanduser(), os.path.expanduser(self.path)
        images = find_images(folder, passed)
        given = f"data.labels={self.labels}"
        if not images:
            raise UserError(f"data.path={self.path} has {_contents(folder)}, and no images ({', '.join(EXTENSIONS)})")
        if table.resolve().is_relative_to(Path(folder).resolve()):
            passed -= Counter([_suffix(table.name)])
        labelled = read_table(table, given, folder, images)
        folders = [file[len(folder) :].lstrip("/").split("/")[0] for file in labelled.files]
        words = [word.lower() for word in labelled.splits or folders]
        if unknown := [word for word in words if word not in _SPLITS]:
            if labelled.splits:
                known = ", ".join(_SPLITS)
                raise UserError(f"{given}: column split has {unknown[0][:60]!r}, which is none of {known}")
            words = ["train"] * len(words)
        roles = [_SPLITS[word] for word in words]
        if TRAINING not in roles:
            raise UserError(f"{given}: no image is for training; the parts are {', '.join(sorted({*roles}))}")
        pairs = [*zip(labelled.files, roles, strict=True)]
        files = {part: sorted(file for file, role in pairs if role == part) for part in PARTS if part in roles}
        row = {file: number for number, file in enumerate(labelled.files)}
        labels, classes, several = labelled.labels, labelled.classes, labelled.labels.ndim > 1
        by = "column split" if labelled.splits else "" if unknown else "folders"
        origin = f"{given}: {labelled.note}" + f", parts by {by}" * bool(by)
        if VALIDATION not in files:
            groups: dict[str, list[str]] = {}
            for file in files[TRAINING]:
                groups.setdefault("" if several else classes[labels[row[file]]], []).append(file)
            halves = _split(groups, self.valid_fraction)
            files[TRAINING], files[VALIDATION] = ([*chain.from_iterable(half.values())] for half in halves)
            origin += f"; validation {self.valid_fraction:.3g} of {'all' if several else 'each class'}"
        found = {part: (members, labels[[row[file] for file in members]]) for part, members in files.items()}
        of_training = found[TRAINING][1]
        counts = of_training.sum(0) if several else torch.bincount(of_training, minlength=len(classes))
        if absent := [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]:
            problem = f"{given}: no training image has the label {shortened(absent)}"
            if not several:
                raise UserError(f"{problem}, which images of other splits have; move some, or leave those out")
            log.warning("%s; nothing can be learned of it", problem)
        return found, classes, origin


class FolderImages(DecodedImages):
    """A dataset of image files, and their labels as ``Images`` has them."""

    def __init__(self, files: Sequence[str], labels: Tensor, on_error: str = "error") -> None:
        # One array of bytes, not a list of strings: worker processes share it without copying.
        self.files = np.array([os.fsencode(file) for file in files])
        super().__init__(labels, on_error)

    def stored(self, index: int) -> tuple[str, str]:
        file = os.fsdecode(self.files[index])
        return file, file


def find_images(folder: str, passed: Counter[str]) -> list[str]:
    """Return the images in a folder and below it, sorted, but for hidden ones; count other files in ``passed``."""
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        found += [os.path.join(place, name) for name in names if _is_image(name)]
        passed.update(_suffix(name) for name in names if not (_is_image(name) or _is_hidden(name)))
    return sorted(found)


def numbers(of: Counter[str]) -> str:
    """Return counts in words, the highest first."""
    return shortened([f"{number:,} {name}" for name, number in of.most_common()])


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() == "__macosx"  # which macOS adds to archives


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not _is_hidden(name)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower() or "without a suffix"


def _folders(path: str) -> list[str]:
    """Return the names of the folders in a folder, sorted, but for hidden ones."""
    return sorted(name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name)) and not _is_hidden(name))


def _contents(path: str) -> str:
    """Say what is in a folder, but for what is hidden: ``the folders a, b and files (3 .jpg, 1 .csv)``."""
    folders = _folders(path)
    files = Counter(_suffix(name) for name in os.listdir(path) if name not in folders and not _is_hidden(name))
    named = f"the folder{'s' * (len(folders) > 1)} {shortened(folders)}"
    return " and ".join([named] * bool(folders) + [f"files ({numbers(files)})"] * bool(files)) or "nothing in it"


def _splits(path: str) -> dict[str, str]:
    """Return the folder of each split that there is; the folders in it are classes.

    Raises:
        UserError: ``train/`` is missing beside ``val/`` or ``test/``, a split is there twice, or other folders are
            beside ``train/``.
    """
    roles = {name: _SPLITS.get(name.lower()) for name in _folders(path)}
    splits = {role: os.path.join(path, name) for name, role in roles.items() if role}
    has_classes = TRAINING in splits and _folders(splits[TRAINING])
    # train/ alone may be a class: pictures of trains
    if not has_classes and (None in roles.values() or not roles) and len(splits) < 2:
        return {TRAINING: path}
    if TRAINING not in splits or len(splits) < len(roles):
        raise UserError(f"{path} has {_contents(path)}, not train/ with only val/ and test/ beside it; {WANTED}")
    return {part: splits[part] for part in PARTS if part in splits}


def _read(folders: Mapping[str, str], passed: Counter[str]) -> dict[str, dict[str, list[str]]]:
    """Return the images of each class of each split, see ``find_images``.

    Raises:
        UserError: there are no folders of two classes, one of them has no images, or one is not in the training split.
    """
    train = folders[TRAINING]
    if len(names := _folders(train)) < 2:
        remedy = ""
        with suppress(UserError):  # an archive may have all in one folder
            if names and len(folders) == 1 and _read(_splits(inner := os.path.join(train, names[0])), Counter()):
                remedy = f"set {shlex.quote(f'data.path={as_typed(inner)}')}; "
        raise UserError(f"{train} has {_contents(train)}, and no folders of two classes or more; {remedy}{WANTED}")
    files = {part: _classes(folder, passed) for part, folder in folders.items()}
    for part, folder in folders.items():
        if unknown := sorted(files[part].keys() - files[TRAINING].keys()):
            raise UserError(
                f"{folder} has the class {unknown[0]}, which {train} does not have; rename it or move it out; {WANTED}"
            )
    return files


def _classes(path: str, passed: Counter[str]) -> dict[str, list[str]]:
    """Return the images of each class.

    Raises:
        UserError: there are no folders of classes, or one of them has no image directly in it.
    """
    names = _folders(path)
    if not names:
        raise UserError(f"{path} has {_contents(path)}, and no folders of classes; {WANTED}")
    places = {name: os.path.join(path, name) for name in names}
    for place in places.values():
        if not any(map(_is_image, os.listdir(place))):
            raise UserError(f"{place} has {_contents(place)}, and no images ({', '.join(EXTENSIONS)}); {WANTED}")
    composed = {unicodedata.normalize("NFC", name): place for name, place in places.items()}
    if len(composed) == len(places):  # an umlaut is one character or two, by the system that wrote the name
        places = composed
    if loose := sum(map(_is_image, os.listdir(path))):
        passed["outside of class folders"] += loose
    return {name: find_images(place, passed) for name, place in places.items()}


def _split(classes: dict[str, list[str]], fraction: float) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Keep a part of each class for validation: at least one image, never the last one."""
    train, valid = {}, {}
    for name, files in classes.items():
        ranked = sorted(files, key=lambda file: hashlib.sha256(os.fsencode(os.path.basename(file))).digest())
        count = min(max(round(len(files) * fraction), 1), len(files) - 1)
        valid[name], train[name] = sorted(ranked[:count]), sorted(ranked[count:])
    return train, valid


def _flat(by_class: Mapping[str, list[str]], classes: list[str]) -> tuple[list[str], Tensor]:
    """Return the files, and the number of the class of each, int64."""
    counts = torch.tensor([len(by_class.get(name, [])) for name in classes])
    files = [file for name in classes for file in by_class.get(name, [])]
    return files, torch.arange(len(classes)).repeat_interleave(counts)
