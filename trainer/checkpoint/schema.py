"""The files of a checkpoint, and whether they are whole: their names, ``manifest.json`` and ``state.json``.

``state.json`` is as the step left it, beside the tensors. The manifest holds the SHA-256 of every file, and what may
come after the step: the evaluation of its weights. What passes is what a run wrote; whether it fits the run that is
resumed is checked by ``reader``. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from trainer.errors import UserError
from trainer.files import read_json, sha256, write_json

FORMAT = 6
WEIGHTS_SINCE = 5
"""The first format whose tensors are those of ``FORMAT``: a new run can start from its weights."""
STEP_NAME = re.compile("step-[0-9]{8}")
"""The name of a checkpoint's folder."""
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
KINDS = ("model", "optimizer", "rng")
"""Kinds of files with tensors: one file of each, or one per rank."""


class InvalidCheckpoint(Exception):
    """A manifest cannot be read; the message begins with the file's name."""


class Manifest(TypedDict):
    """The content of ``manifest.json``."""

    format: int
    step: int
    score: float | None
    """Score of the weights at this step, the lowest the best; None: they were not evaluated, or it was not finite."""
    sha256: dict[str, str]
    """Hashes by the names of the files; in the file also the manifest's own, of all that it holds beside that."""
    scores: NotRequired[dict[str, Any]]
    """The run's evaluations so far, see ``Scores``; here, because weights may be evaluated after they were saved."""
    totals: NotRequired[dict[str, Any]]
    """What the run has spent so far, over all its processes."""


class State(TypedDict):
    """The content of ``state.json``."""

    step: int
    ties: dict[str, str]
    """Names under which weights are stored that share their memory with another one, by their own."""
    optimizer: dict[str, Any]
    """What the optimizer keeps beside tensors, see ``optim.state.optimizer_state``."""
    loss_scale: dict[str, float]
    """The loss scale, and what decides its next change."""
    progress: dict[str, Any]
    """What the run needs beside the training: the interval of its log, the fingerprint of its data."""


def damage(folder: Path, step: int, oldest: int) -> str | None:
    """Return what is wrong with the folder of a checkpoint of ``step``, the file's name first; None: it is whole."""
    try:
        manifest = read_manifest(folder, oldest)
        for name, expected in sorted(manifest["sha256"].items()):
            if sha256(folder / name) != expected:
                return f"{name} does not match its SHA-256"
    except InvalidCheckpoint as refused:
        return str(refused)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if manifest["step"] == step else f"{MANIFEST_FILE} is of step {manifest['step']}"


def rank_file(kind: str, rank: int, ranks: int) -> str:
    """Return the name of one rank's file."""
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def files_of(manifest: Manifest, kind: str) -> list[str]:
    """Return the files of one kind, in the order of the ranks that wrote them."""
    return sorted(name for name in manifest["sha256"] if name.startswith(kind))


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints below ``folder``, oldest first; other folders are ignored.

    They were complete when they got their names; a copy of the folder may lack files.
    """
    names = [path.name for path in folder.glob("step-*/")]
    return sorted(int(name.removeprefix("step-")) for name in names if STEP_NAME.fullmatch(name))


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is."""
    return folder / f"step-{step:08d}"


def best_step(folder: Path) -> int | None:
    """Return the step of the checkpoint with the lowest score below ``folder``, the earliest of equals.

    It may be of an earlier format: a new run can start from its weights.
    """
    scores = []
    for step in steps(folder):
        try:
            score = _manifest_of_any_format(path_of(folder, step)).get("score")
        except InvalidCheckpoint:
            continue  # damaged: reported when it is read
        if score is not None:
            scores.append((score, step))
    return min(scores)[1] if scores else None


def read_manifest(folder: Path, oldest: int = FORMAT) -> Manifest:
    """Return a checkpoint's manifest; ``oldest``: the first format that is read.

    Raises:
        InvalidCheckpoint: it cannot be read.
        UserError: it is of another format, which is no damage.
    """
    content = _manifest_of_any_format(folder)
    number, run = content.get("format"), folder.parents[1]
    if number not in range(oldest, FORMAT + 1):
        weights = run if number in range(WEIGHTS_SINCE, FORMAT) else run / "best"
        raise UserError(
            f"{folder} has the checkpoint format {number}, and this version reads format {FORMAT}; "
            f"resume with the version that wrote it, or start a new run from its weights with init_from={weights}"
        )
    return content


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint's manifest, to which its own hash is added."""
    hashes = {name: value for name, value in content["sha256"].items() if name != MANIFEST_FILE}
    content = content | {"sha256": hashes}
    hashes[MANIFEST_FILE] = _hash_of(content)
    write_json(folder / MANIFEST_FILE, content)


def _manifest_of_any_format(folder: Path) -> Manifest:
    try:
        content: Manifest = read_json(folder / MANIFEST_FILE)
        own = content["sha256"].pop(MANIFEST_FILE, None)  # None: of an earlier version, which wrote none
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidCheckpoint(f"{MANIFEST_FILE} cannot be read ({why})") from None
    except (LookupError, TypeError):
        raise InvalidCheckpoint(f"{MANIFEST_FILE} has no hashes") from None
    if own not in (None, _hash_of(content)):
        raise InvalidCheckpoint(f"{MANIFEST_FILE} does not match its SHA-256")
    return content


def _hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
