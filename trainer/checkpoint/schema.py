"""What the files of a checkpoint may hold. A hash shows damage, but anyone can compute one, so values are checked too.

``manifest.json`` and ``state.json`` have known keys of known types; the folder holds what the manifest lists, and
nothing else. Whether that fits the run that is resumed is checked in ``check.py``.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trainer.files import read_json

FORMAT = 2
STEP_NAME = re.compile("step-[0-9]{8}")
"""The name of a checkpoint's folder."""
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
KINDS = ("model", "optimizer", "rng")
"""For each there is one file, or one file per rank."""

_PART = re.compile(rf"({'|'.join(KINDS)})(?:-[0-9]{{5}}-of-([0-9]{{5}}))?\.safetensors")
_SHA256 = re.compile("[0-9a-f]{64}")
_LARGEST = 2**53
"""Whole numbers up to here are exact as floating-point numbers, too."""


class InvalidCheckpoint(Exception):
    """A file of a checkpoint does not hold what it should; the message begins with the file's name."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    score: float | None
    sha256: dict[str, str]
    """By the name of the file."""

    def files(self, kind: str) -> list[str]:
        """Return the files of one kind, in the order of the ranks that wrote them."""
        return sorted(name for name in self.sha256 if name.startswith(kind))


@dataclass(frozen=True)
class State:
    """The content of ``state.json``."""

    step: int
    ties: dict[str, str]
    """For each weight that shares its memory with another one, the name under which it is stored."""
    names: list[str]
    """The optimizer's parameters, in its order."""
    groups: list[dict[str, Any]]
    """The options of the optimizer's groups."""
    scalars: dict[str, dict[str, Any]]
    """State that is not a tensor, by parameter."""
    stateless: list[str] | None
    """Parameters without any state; None: the file is from an earlier version, which did not record them."""
    progress: dict[str, Any]


def damage(folder: Path, step: int) -> str | None:
    """Return what is wrong with the folder of a checkpoint of ``step``, the file's name first; None: it is whole."""
    try:
        manifest = read_manifest(folder)
        _check_files(folder, manifest)
        for name, expected in sorted(manifest.sha256.items()):
            if sha256(folder / name) != expected:
                raise InvalidCheckpoint(f"{name} does not match its SHA-256")
            if name.endswith(".safetensors"):
                _check_header(folder / name, step)
        for file, found in ((MANIFEST_FILE, manifest.step), (STATE_FILE, read_state(folder).step)):
            if found != step:
                raise InvalidCheckpoint(f"{file} is of step {found}")
    except InvalidCheckpoint as refused:
        return str(refused)
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    return None


def sha256(path: Path) -> str:
    """Return the hash of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rank_file(kind: str, rank: int, ranks: int) -> str:
    """Return the name of one rank's file."""
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        InvalidCheckpoint: it cannot be read, or is of another format.
    """
    content = _read(folder / MANIFEST_FILE)
    found = content.get("format")
    if type(found) is int and found != FORMAT:
        raise InvalidCheckpoint(f"{MANIFEST_FILE}: it has format {found:.60g}, this version reads {FORMAT}")
    require_keys(content, {"format", "step", "score", "sha256"}, MANIFEST_FILE)
    step, score, hashes = content["step"], content["score"], content["sha256"]
    require(type(found) is int, "format is not a whole number", MANIFEST_FILE)
    require(is_count(step), "step is not a valid number of steps", MANIFEST_FILE)
    require(score is None or is_finite(score), "score is not a finite number", MANIFEST_FILE)
    require(isinstance(hashes, dict), "sha256 is not a list of files", MANIFEST_FILE)
    for name, value in hashes.items():
        known = name == STATE_FILE or _PART.fullmatch(name)
        require(known, f"{name!r:.80} is not a file of a checkpoint", MANIFEST_FILE)
        require(isinstance(value, str) and _SHA256.fullmatch(value), f"{name} has no SHA-256", MANIFEST_FILE)
    manifest = Manifest(step, score, hashes)
    if STATE_FILE not in hashes:
        raise InvalidCheckpoint(f"{STATE_FILE} is missing")
    for kind in KINDS:
        parts = manifest.files(kind)
        ranks = len(parts)
        expected = [rank_file(kind, rank, ranks) for rank in range(ranks)]
        if not parts:
            raise InvalidCheckpoint(f"{kind}.safetensors is missing")
        require(parts == expected, f"the files of {kind} are not one, or one for each rank", MANIFEST_FILE)
    return manifest


def read_state(folder: Path) -> State:
    """Return a checkpoint's state, of which ``progress`` has any keys.

    Raises:
        InvalidCheckpoint: it cannot be read.
    """
    content = _read(folder / STATE_FILE)
    require_keys(content, {"step", "ties", "optimizer", "progress"}, STATE_FILE)
    step, ties, progress = content["step"], content["ties"], content["progress"]
    require(is_count(step), "step is not a valid number of steps")
    require(isinstance(ties, dict) and _is_list_of(list(ties.values()), str), "ties are not names of weights")
    require(isinstance(progress, dict), "progress has no keys")
    optimizer = content["optimizer"]
    require_keys(optimizer, {"names", "groups", "scalars"}, f"{STATE_FILE}: optimizer", optional={"stateless"})
    names, groups, scalars = optimizer["names"], optimizer["groups"], optimizer["scalars"]
    stateless = optimizer.get("stateless")
    require(_is_list_of(names, str), "optimizer.names are not names of parameters")
    require(_is_list_of(groups, dict), "optimizer.groups are not options")
    good = isinstance(scalars, dict) and _is_list_of(list(scalars.values()), dict)
    require(good, "optimizer.scalars are not values by parameter")
    good = "stateless" not in optimizer or _is_list_of(stateless, str)
    require(good, "optimizer.stateless are not names of parameters")
    return State(step, ties, names, groups, scalars, stateless, progress)


def require_keys(content: Any, expected: set[str], where: str, optional: Collection[str] = ()) -> None:
    """Refuse what is no JSON object, lacks a key, or has one that is not expected.

    Raises:
        InvalidCheckpoint: the message begins with ``where``.
    """
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{where} has no keys")
    for key in sorted(expected - content.keys()):
        raise InvalidCheckpoint(f"{where} lacks {key}")
    for key in sorted(content.keys() - expected - set(optional)):
        raise InvalidCheckpoint(f"{where} has an unknown key {key!r:.80}")


def require(condition: object, problem: str, file: str = STATE_FILE) -> None:
    """Raise InvalidCheckpoint with the file and the problem, unless the condition holds."""
    if not condition:
        raise InvalidCheckpoint(f"{file}: {problem}")


def is_count(value: Any) -> bool:
    """Return whether this is a whole number of at least 0."""
    return type(value) is int and 0 <= value <= _LARGEST


def is_number(value: Any) -> bool:
    """Return whether this is a number (infinity and NaN included) and not a bool."""
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)


def is_finite(value: Any) -> bool:
    """Return whether this is a finite number and not a bool."""
    return is_number(value) and math.isfinite(value)


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that lacks a file of its manifest, or holds another one, a link or a device."""
    known = {MANIFEST_FILE, *manifest.sha256}
    for name in sorted(path.name for path in folder.iterdir()):
        if name not in known:
            raise InvalidCheckpoint(f"{name} is not in the manifest; move it out of the checkpoint")
    for name in sorted(known):
        try:
            mode = (folder / name).lstat().st_mode
        except FileNotFoundError:
            raise InvalidCheckpoint(f"{name} is missing") from None
        if not stat.S_ISREG(mode):
            raise InvalidCheckpoint(f"{name} is not a regular file")


def _check_header(path: Path, step: int) -> None:
    try:
        with safe_open(path, "pt") as file:
            noted = (file.metadata() or {}).get("step", str(step))  # earlier versions did not record it
    except SafetensorError:
        raise InvalidCheckpoint(f"{path.name} is not a safetensors file") from None
    if noted != str(step):
        raise InvalidCheckpoint(f"{path.name} is of step {noted:.20}")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidCheckpoint(f"{path.name} cannot be read ({reason:.120})") from None
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{path.name} has no keys")
    return content


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
