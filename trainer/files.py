"""Atomic file writes, JSON, locks, this repository's folder, and names in a run's."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from trainer.errors import UserError

PROJECT = Path(__file__).resolve().parents[1]
"""The folder of the repository."""


# What a run's folder holds
CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
MODE_PREFIX = "precision/"
"""Of a metric that is 1 at the first step in the mode that it names: ``precision.then``."""
LAYERS = "layers/"
"""Of the metrics of single layers, too many for MLflow, which gets a plot of them."""
SUMMARY_FILE = "summary.json"
PRECISION_FILE = "precision.json"
TRACKING_FILE = "tracking.json"
"""What MLflow gets of the run, which run it is there, and how much of it MLflow has."""
RUN_FILE = "run.json"
"""How the run began, by key. ``written_by``: which version. ``launch``: in which folder, and by which torchrun.
``command``: what was typed to start it.
``init_from``: from which run and step. ``images``: the names of their classes, their size, and what they are normalised
with."""
TOKENIZER = "tokenizer"
"""The folder with the tokenizer of the run's text."""
BEST = "best"
"""The folder with the exported best weights."""

SAME = "same"
"""``resume=same``: the run of this name with the same options; a new one where there is none. Sweeps do so."""
NO_FOLDER = (None, "auto", SAME)
"""Values of ``resume`` that name no folder: the run has to be found, if there is one."""


def command(script: str, overrides: Sequence[str] = (), launcher: Sequence[str] = ("python",)) -> str:
    """Return the line of a shell that calls one of ``scripts/`` from the current folder."""
    folder = PROJECT / "scripts"
    return shlex.join([*launcher, min(os.path.relpath(folder / script), str(folder / script), key=len), *overrides])


def default_name(recipe: str, precision: str, seed: int) -> str:
    """Return the default name of a run of this recipe, in this precision (``precision.mode``)."""
    return f"{recipe}-{precision}-s{seed}"


def is_kept(source: str) -> bool:
    """Return whether a folder is what a run keeps of a pretrained model to be resumed: config and tokenizer.

    The weights are those of the run's checkpoint.
    """
    folder = Path(source).expanduser()
    return folder.name == TOKENIZER and (folder / "config.json").is_file()


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever reads it sees the old content or the new one, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    flush(partial)  # otherwise some file systems could keep the new name and lose the content
    partial.replace(path)
    flush(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def sha256(path: Path) -> str:
    """Return the hash of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
    """
    return json.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows begin a file with a mark


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; empty where there is no such file, or a damaged one."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_config(path: Path, remedy: str = "restore it") -> dict[str, Any]:
    """Return the object that a ``config.json`` holds; empty where there is no such file.

    Raises:
        UserError: it cannot be read; ``remedy`` says what to do.
    """
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it has no keys")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from error
    return content


def add_run_facts(folder: Path, **facts: dict[str, Any]) -> None:
    """Add keys to a run's ``run.json``, or replace them."""
    write_json(folder / RUN_FILE, read_object(folder / RUN_FILE) | facts)


def run_facts(folder: Path, key: str) -> dict[str, Any]:
    """Return what a run's ``run.json`` has under a key; empty if it has nothing."""
    facts = read_object(folder / RUN_FILE).get(key)
    return facts if isinstance(facts, dict) else {}


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's ``metrics.jsonl``, each with ``step`` and ``time``; none if there is no file.

    An incomplete last line (after a kill) is skipped.

    Raises:
        UserError: a line holds something else.
    """
    if not path.exists():
        return
    number = 1
    try:
        with path.open("rb") as file:
            while (line := file.readline()).endswith(b"\n"):
                values = json.loads(line)
                yield values | {"step": int(values["step"]), "time": float(values["time"])}
                number += 1
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} line {number}: no step or time ({getattr(error, 'msg', error)}); restore it") from None


def final_status(folder: Path) -> str | None:
    """Return the status in a run's summary; None: the run was killed before it could write one."""
    status = read_object(folder / SUMMARY_FILE).get("status")
    return status if status in ("FINISHED", "FAILED", "KILLED") else None


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there, as a whole: a kill leaves no part under its name, and the next call the rest."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder.rename(old))


def flush(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output_dir(output_dir: str) -> None:
    """Refuse, with a UserError, an output folder that cannot be made or written, before anything else is done."""
    path = Path(output_dir).expanduser().absolute()
    try:
        while not path.exists():
            path = path.parent
    except OSError as error:  # such as a name that is too long
        raise UserError(f"output_dir={output_dir:.60} cannot be written ({error.strerror}); choose another") from None
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        why = "permission denied" if path.is_dir() else "it is a file"
        raise UserError(f"output_dir={output_dir} cannot be written ({path}: {why}); choose another")


@contextmanager
def locked(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Lock the file ``path`` against all other processes; the lock ends when the process ends for any reason.

    On a file system without locks nothing is held.

    Args:
        path: of the file, which is made where there is none.
        timeout_s: how long to wait for another process that holds it; negative: as long as it takes.

    Raises:
        TimeoutError: another process still holds it.
        OSError: the file cannot be made.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s)
    except NotImplementedError:
        yield
        return
    try:
        yield
    finally:
        lock.release()


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep every other process from working on a run's or a comparison's folder.

    Raises:
        UserError: another process uses it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock", timeout_s=0))
        except TimeoutError:
            raise UserError(f"{folder} is in use by another process; wait until that process ends") from None
        yield


def discard(descriptor: int) -> None:
    """Let what goes to an open stream go nowhere from now on, also what is kept in it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
