"""The files of a checkpoint, and whether they are whole: their names, ``manifest.json`` and ``state.json``.

The manifest holds the SHA-256 of every other file, and how long the run's metric log was.
What passes is what a run wrote; whether it fits the run that is resumed is checked by ``reader``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.files import read_json, sha256

FORMAT = 5
STEP_NAME = re.compile("step-[0-9]{8}")
"""The name of a checkpoint's folder."""
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
KINDS = ("model", "optimizer", "rng")
"""For each there is one file, or one file per rank."""


class InvalidCheckpoint(Exception):
    """A file of a checkpoint does not hold what it should; the message begins with the file's name."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    score: float | None
    sha256: dict[str, str]
    """By the name of the file."""
    log_bytes: int = 0
    """Length of the run's metrics.jsonl when this was saved; what follows is logged again after a resume."""
    scores: dict[str, Any] = field(default_factory=dict)
    """The run's evaluations so far; here, because weights may be evaluated after they were saved."""
    totals: dict[str, Any] = field(default_factory=dict)
    """What the run has spent so far, over all its processes."""

    def files(self, kind: str) -> list[str]:
        """Return the files of one kind, in the order of the ranks that wrote them.

        Raises:
            InvalidCheckpoint: there is none.
        """
        if not (found := sorted(name for name in self.sha256 if name.startswith(kind))):
            raise InvalidCheckpoint(f"{MANIFEST_FILE} names no {kind} file")
        return found


@dataclass(frozen=True)
class State:
    """The content of ``state.json``."""

    step: int
    ties: dict[str, str]
    """For each weight that shares its memory with another one, the name under which it is stored."""
    names: list[str]
    """The optimizer's parameters, in its order."""
    groups: list[dict[str, Any]]
    """The options of the optimizer's groups, and what the optimizer counts there."""
    scalars: dict[str, dict[str, Any]]
    """State that is not a tensor, by parameter."""
    stateless: list[str]
    """Parameters without any state."""
    progress: dict[str, Any]


def damage(folder: Path, step: int) -> str | None:
    """Return what is wrong with the folder of a checkpoint of ``step``, the file's name first; None: it is whole."""
    try:
        manifest = read_manifest(folder)
        _check_files(folder, manifest)
        for name, expected in sorted(manifest.sha256.items()):
            if sha256(folder / name) != expected:
                raise InvalidCheckpoint(f"{name} does not match its SHA-256")
        if manifest.step != step:
            raise InvalidCheckpoint(f"{MANIFEST_FILE} is of step {manifest.step}")
    except InvalidCheckpoint as refused:
        return str(refused)
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    return None


def rank_file(kind: str, rank: int, ranks: int) -> str:
    """Return the name of one rank's file."""
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints below ``folder``, oldest first; other folders are ignored."""
    found = {step_of(path.parent) for path in folder.glob(f"*/{MANIFEST_FILE}")}
    return sorted(step for step in found if step is not None)


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None: it is no such name."""
    return int(path.name.removeprefix("step-")) if STEP_NAME.fullmatch(path.name) else None


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is."""
    return folder / f"step-{step:08d}"


def best_step(folder: Path) -> int | None:
    """Return the step of the checkpoint with the lowest score below ``folder``, the earliest of equals."""
    scores = []
    for step in steps(folder):
        try:
            score = read_manifest(path_of(folder, step)).score
        except InvalidCheckpoint:
            continue  # damaged: reported when it is read
        if score is not None:
            scores.append((score, step))
    return min(scores)[1] if scores else None


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        InvalidCheckpoint: it cannot be read, was changed, or is of another format.
    """
    content = _read(folder / MANIFEST_FILE)
    if content.pop("format", None) != FORMAT:
        raise InvalidCheckpoint(f"{MANIFEST_FILE} was written by another version; this one reads format {FORMAT}")
    try:
        return Manifest(**content)
    except TypeError:
        raise InvalidCheckpoint(f"{MANIFEST_FILE} has not the keys that this version writes") from None


def read_state(folder: Path) -> State:
    """Return a checkpoint's state, of which ``progress`` has any keys.

    Raises:
        InvalidCheckpoint: it cannot be read.
    """
    content = _read(folder / STATE_FILE)
    try:
        return State(content["step"], content["ties"], **content["optimizer"], progress=content["progress"])
    except (KeyError, TypeError):
        raise InvalidCheckpoint(f"{STATE_FILE} has not the keys that this version writes") from None


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that lacks a file of its manifest, or holds another one."""
    known = {MANIFEST_FILE, *manifest.sha256}
    for name in sorted(path.name for path in folder.iterdir()):
        if name not in known and not name.startswith("."):  # such as .DS_Store, which file managers leave
            raise InvalidCheckpoint(f"{name} is not in the manifest; move it out of the checkpoint")
    for name in sorted(known):
        if not (folder / name).is_file():
            raise InvalidCheckpoint(f"{name} is missing")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it has no keys")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidCheckpoint(f"{path.name} cannot be read ({reason:.120})") from None
    return content
