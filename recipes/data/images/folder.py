"""``data=imagefolder``: one folder per class, decoded as training goes."""

from __future__ import annotations

import filecmp
import hashlib
import logging
import os
import shlex
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from zlib import crc32

import numpy as np
import torch

from mantissa.display import shortened
from recipes.data.images.pixels import DecodedImages
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.data.text.files import missing, not_read
from trainer.config.command_line import as_typed
from trainer.data.contract import check_no_overlap
from trainer.errors import UserError, check_range

log = logging.getLogger("mantissa")

EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jp2"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
_PATHS = (".csv", ".tsv", ".json", ".jsonl")
"""Tables in which an image is a path."""
TRAINING, VALIDATION, TEST = PARTS = ("training", "validation", "test")
_SPLITS = {
    **dict.fromkeys(("train", "training"), TRAINING),
    **dict.fromkeys(("val", "valid", "validation"), VALIDATION),
    **dict.fromkeys(("test", "testing"), TEST),
}
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
    "data.path must be a folder like photos/ (val/ and test/ may be missing) or its train/, data.test one like test/:"
    f"\n{LAYOUT}"
)


@dataclass
class ImageFolder(ImageSource):
    """Images in one folder per class."""

    kind: ClassVar[str] = "imagefolder"
    path: str = ""
    """Folder with one folder per class, or with ``train/``, and perhaps ``val/`` and ``test/``, that have one per
    class."""
    valid_fraction: float = 0.1
    """Fraction of each class held out for validation, if there is no ``val/``; a hash of the file names picks them."""
    test: str | None = None
    """Test images, one folder per class, evaluated once, at the end, with the best weights; null: ``test/`` beside
    ``train/``, if there is one."""
    on_error: str = "error"
    """What to do about an image that cannot be decoded. error: save a checkpoint and stop; skip: count it and take the
    next image."""

    def __post_init__(self) -> None:
        check_range("data.valid_fraction", self.valid_fraction, "(0, 1)")
        if not self.path:
            raise UserError(f"missing required option: data.path; {WANTED}")
        for key, path in (("data.path", self.path), ("data.test", self.test or ".")):
            folder = Path(path).expanduser()
            if not folder.exists():
                raise missing(f"{key}={path}")
            if folder.is_file() and folder.suffix.lower() in _PATHS:
                wanted = f"as metadata{folder.suffix.lower()}, with the columns file_name and label, in their folder"
                reads = "data=hub data.name=… reads such a folder"
                raise UserError(f"{key}={path} has no images; write their names and labels {wanted}: {reads}")
            if not folder.is_dir():
                raise not_read(f"{key}={path}", folder) or UserError(f"{key}={path} is a file, not a folder; {WANTED}")

    def images(self, image_size: int | None) -> ImageDatasets:
        """Find the images; squares of 224 pixels by default.

        Raises:
            UserError: the folders are not as ``LAYOUT`` shows, or a class has too few images.
        """
        passed: Counter[str] = Counter()
        folders = _splits(os.path.expanduser(self.path))
        if self.test:
            folders[TEST] = os.path.expanduser(self.test)
        try:
            files = _read(folders, passed)
        except UserError as error:
            raise self._other_kind() or error from None
        classes = sorted(files[TRAINING])
        origin = ", ".join(f"{part} {folder}" for part, folder in folders.items())
        if VALIDATION not in files:
            files[TRAINING], files[VALIDATION] = _split(files[TRAINING], self.valid_fraction)
            lone = f" but {lone} with one image" if (lone := [*files[VALIDATION].values()].count([])) else ""
            origin += f", validation {self.valid_fraction:.3g} of each class{lone}"
        flat = {part: [file for members in by_class.values() for file in members] for part, by_class in files.items()}
        for role in (TRAINING, VALIDATION) if TEST in files else ():
            check_no_overlap(f"data.test={folders[TEST]}", flat[TEST], flat[role], role)
        for part in (VALIDATION, TEST):
            if copies := _copies(flat.get(part, []), flat[TRAINING]):
                message = "at least %d of the %s images are training images, too (%s is %s); results look too good"
                log.warning(message, len(copies), part, *copies[0])
        parts = {part: FolderImages(files[part], classes, self.on_error) for part in PARTS if part in files}
        size, side = image_size or 224, parts[TRAINING].shorter_side()
        left_out = f"; passed over: {numbers(passed)}" if passed.total() else ""
        title = f"{self.kind} ({origin}{left_out})"
        return self.opened(title, f"data.path={self.path}", parts, classes, size, side, decodes=True)

    def _other_kind(self) -> UserError | None:
        """Return what the folder holds that is not one folder of images per class; None: that is not known."""
        path = Path(self.path).expanduser()
        beside_images = [*path.glob("metadata.*")]  # whose columns data=hub reads
        known = beside_images or not find_images(str(path), Counter())
        return not_read(f"data.path={self.path}", path) if known else None


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


def _copies(files: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Return files with the content of one of the others, and that one; of many files, some are compared."""
    # A broken link has no size; it is reported when it is decoded. Copies often have one name.
    some, against = (
        [
            file
            for file in paths
            if crc32(os.fsencode(os.path.basename(file))) % (len(paths) // 1000 + 1) == 0 and os.path.exists(file)
        ]
        for paths in (files, others)
    )
    sizes: dict[int, list[str]] = {}
    for file in against:
        sizes.setdefault(os.path.getsize(file), []).append(file)
    pairs = [(file, other) for file in some for other in sizes.get(os.path.getsize(file), [])[:10]]
    copies = []
    for pair in pairs:
        with suppress(OSError):  # what cannot be read is reported when it is decoded
            if filecmp.cmp(*pair, shallow=False):
                copies.append(pair)
    return [*dict(copies).items()]
