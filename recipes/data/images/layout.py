"""What a folder of images holds: splits, classes, or neither. Structure decides; names say which split it is."""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mantissa.display import shortened
from trainer.errors import UserError
from trainer.files import RUN_FILE

log = logging.getLogger("mantissa")

EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jp2"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
TRAINING, VALIDATION, TEST = PARTS = ("training", "validation", "test")
WANTED = "a folder with one folder of images per class, or with train/ and val/ (and perhaps test/) holding those"
_SPLITS = {
    TRAINING: "train(ings?)?(set|dat[ae]n?|images?|[ab])?|entrenamiento|treino|entrainement|[训訓][练練].*",
    VALIDATION: "val(id|idation|idierungs?)?(set|dat[ae]n?|images?)?|dev|validac(ion|ao)|validazione|[验驗検].*",
    TEST: "test(ing|e|s)?(set|dat[ae]n?|images?|[ab])?|eval(uation)?|pruebas?|(测试|測試|テスト).*",
}
_IMAGES = re.compile("images?|imgs?|jpegimages|jpg", re.IGNORECASE)
_ABOUT_IMAGES = re.compile("(.*[^a-z])?(masks?|annotations?|labels?|segmentation.*|ground.?truth|gt)", re.IGNORECASE)
_MASKS = ("mask", "annotation", "label", "seg", "segmentation", "gt")
_MASK = re.compile(f"[^a-z0-9]({'|'.join(_MASKS)})s?([_-]?[0-9]+)?$", re.IGNORECASE)
_FOLD = re.compile("(.*[^a-z])?(k?fold|cv|split|part|batch|site|cent(er|re)|domain|client)s?([^a-z].*)?", re.IGNORECASE)
_OF_SYSTEMS = re.compile("__macosx|@eadir|[#$]recycle([.]bin)?|lost[+]found|system volume.*|thumbnails|mlartifacts")


@dataclass(eq=False)
class Folder:
    """A folder of images, and of such folders."""

    path: str
    passed: Counter[str]
    """Numbers of files in the whole tree that are not used, by reason."""
    images: list[str] = field(default_factory=list)
    folders: dict[str, Folder] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    """Folders without images, and what they have instead."""

    def files(self) -> list[str]:
        """Return the images in this folder and below it, sorted."""
        return sorted([*self.images, *(file for folder in self.folders.values() for file in folder.files())])

    def unwrapped(self, role: str | None = None) -> Folder:
        """Return the folder of folders in it, if it holds nothing else, as archives often do; of a split, its own."""
        if len(self.folders) == 1 and not self.images:
            ((name, inner),) = self.folders.items()
            if inner.folders and (role in (None, _role(name)) or _IMAGES.fullmatch(name)):
                return inner.unwrapped(role)
        return self

    def leave_out(self, name: str) -> None:
        """Remove a folder, and count its images as passed over."""
        self.passed[f"images in {name}"] += len(self.folders.pop(name).files())


def numbers(of: Counter[str]) -> str:
    """Return counts in words, the highest first."""
    return shortened([f"{number:,} {name}" for name, number in of.most_common() if number])


def read(path: str, passed: Counter[str] | None = None, above: tuple[str, ...] = ()) -> Folder:
    """Read a folder and all below it, but for what is hidden, and for links to one of the folders above."""
    found, above = Folder(path, Counter() if passed is None else passed), (*above, os.path.realpath(path) + os.sep)
    passed = found.passed
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        name = entry.name.lower()
        if name.startswith(".") or _OF_SYSTEMS.fullmatch(name):
            passed["hidden"] += 1
        elif entry.is_dir():
            up = entry.is_symlink() and any(place.startswith(os.path.realpath(entry.path) + os.sep) for place in above)
            if up or os.path.exists(os.path.join(entry.path, RUN_FILE)):  # plots of a run are no photos
                passed["links to a folder above" if up else "run folders"] += 1
                continue
            before = passed.copy()
            inner = read(entry.path, passed, above)
            if inner.images or inner.folders:
                found.folders[entry.name] = inner
            elif passed["run folders"] == before["run folders"]:
                found.empty.append(f"{entry.name} ({numbers(passed - before) or 'empty'})")
        elif not entry.is_file():
            passed["broken links"] += 1
        elif name.endswith(EXTENSIONS):
            found.images.append(entry.path)
        else:
            passed[os.path.splitext(name)[1] or "without a suffix"] += 1
    composed = {unicodedata.normalize("NFC", name): inner for name, inner in found.folders.items()}
    if len(composed) == len(found.folders):  # an umlaut is one character or two, by the system that wrote the name
        found.folders = composed
    names = "\n".join(found.images).lower()
    if any(word in names for word in _MASKS):  # of a million images few are worth a closer look
        stems = {os.path.splitext(file)[0]: file for file in found.images}
        masks = {file for stem, file in stems.items() if (end := _MASK.search(stem)) and stem[: end.start()] in stems}
        found.images = [file for file in found.images if file not in masks]
        passed["masks beside their images"] += len(masks)
    if any(map(_IMAGES.fullmatch, found.folders)):
        for name in list(filter(_ABOUT_IMAGES.fullmatch, found.folders)):
            found.leave_out(name)
    return found


def arrange(root: Folder) -> dict[str, Folder]:
    """Return the folders of ``training`` and, where there are any, of ``validation`` and ``test``: theirs are classes.

    Raises:
        UserError: no folders of it are classes, or it can be read in two ways.
    """
    top = root.unwrapped()
    inside = {name: folder.unwrapped(_role(name)) for name, folder in top.folders.items()}
    # One with images only may be a class, such as one of trains; of several for one split, the plain name counts.
    nested = [
        name for name, each in inside.items() if set(each.folders) - {name, *filter(_IMAGES.fullmatch, each.folders)}
    ]
    named = {_role(name): inside[name] for name in sorted(nested, key=str.isalpha)}
    parts = {part: named[part] for part in PARTS if part in named}
    if TRAINING not in parts:
        parts, unused = {TRAINING: top}, _no_classes(root, top, inside)
    else:
        if TEST in parts and parts[TEST].folders.keys() - parts[TRAINING].folders.keys():
            del parts[TEST]
        unused = [name for name, folder in inside.items() if folder not in parts.values()]
    for name in unused:
        if (role := _role(name)) in (TRAINING, VALIDATION):
            why = f"{parts[role].path} is" if role in parts else "it has no folders of classes"
            log.warning("%s is not used for %s: %s", top.folders[name].path, role, why)
        top.leave_out(name)
    if unused and TRAINING not in named:
        return arrange(root)
    for folder in parts.values():
        top.passed["outside of class folders"] += len(folder.images)
    return parts


def _role(name: str) -> str | None:
    """Return the split that a name means; None: it means none, or several."""
    bare = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", name.lower()))  # without accents
    words = re.findall(r"[^\W\d_]+", bare)
    roles = {role for role, split in _SPLITS.items() for word in words if re.fullmatch(split, word)}
    return roles.pop() if len(roles) == 1 and not _ABOUT_IMAGES.fullmatch(name) else None


def _no_classes(root: Folder, top: Folder, inside: dict[str, Folder]) -> list[str]:
    """Return those of the folders ``inside`` that hold the others once more, or masks of them.

    Raises:
        UserError: see ``arrange``.
    """
    inner = {name: folder.folders for name, folder in inside.items() if len(folder.folders) > 1}
    words = {re.sub("[^a-z]+", " ", name.lower()).strip() for name in inside}
    numbered = len(words) == 1 and not inner and {"images", "part", "batch"} & set(min(words).split())
    lone = len(inside) == 1 and (not top.empty or any(map(_IMAGES.fullmatch, inside)))
    if numbered or lone or all(map(_role, inside)):
        remedy = f"data.path must be {WANTED}"
        remedy += "; file names or boxes give no classes" if top.files() else f"; images are {', '.join(EXTENSIONS)}"
        place = next((each for name, each in inside.items() if _role(name) == TRAINING), top).path
        tables = [*Path(place).rglob("*.csv")] or Path(root.path).rglob("*.csv")
        tables = [csv for csv in tables if not re.search("[Ss]ubmission|^[Tt]est", csv.name)]
        if tables and top.files():
            remedy += f"; or write those of {min(tables)} to {place}/metadata.csv (file_name,label), with no other "
            remedy += f"table there, and use data=hub data.name={place} data.label_column=label"
        shown = f"{len(top.files()) or 'no'} images (passed over: {numbers(root.passed) or 'nothing'})"
        raise UserError(f"{root.path} has {shown}, and no folders of several classes; {remedy}")
    if again := [name for name, each in inner.items() if each.keys() <= inside.keys() or _ABOUT_IMAGES.fullmatch(name)]:
        return again
    several, classes = list(inner), set.intersection(*map(set, inner.values())) if inner else set()
    folds = len(classes) > 1 and all(map(_FOLD.fullmatch, inside))  # others that share few names are classes of parts
    if not folds and (2 * len(inner) <= len(inside) or not len(classes) >= len(inner) > 1):
        several = [name for name, each in inner.items() if TRAINING in map(_role, each)]
    if several:
        first = max(several, key=lambda name: len(inside[name].files()))
        raise UserError(
            f"{top.path}: {shortened(several)} hold the folders {shortened(sorted(inner[first]))}; if these are the "
            f"classes or splits, set data.path={inside[first].path}; if not, move the images out of them"
        )
    return []
