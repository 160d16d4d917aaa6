"""Whether what a run has written is still as it was: JSON with its own hash, and folders with a list of hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import SUMMARY_FILE, read_json, regular, write_json

_SEAL = "seal"
"""The key of the hash."""
HASHES_FILE = "hashes.json"
"""In a folder: bytes and SHA-256 of every other file below it."""
_READ = (".json", ".safetensors", ".bin", ".pt", ".pth", ".model", ".jinja", ".py")
"""Endings of what a loader finds in a folder by its name: an adapter, other weights, a config, a vocabulary."""


def sha256(path: Path) -> str:
    """Return the hash of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(content: Any) -> str:
    """Return the SHA-256 of JSON, whatever the order of its keys."""
    plain = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, content: dict[str, Any], private: bool = False) -> None:
    """Replace a JSON file as a whole, with its own hash in it; ``private``: only its owner can read it."""
    write_json(path, content | {_SEAL: digest(content)}, private)


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what ``write_sealed`` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: see ``files.read_json``; or it is not what was written, or has no hash.
    """
    content = read_json(path)
    if isinstance(content, dict) and _SEAL not in content:
        raise ValueError("it was written by an earlier version")
    if not isinstance(content, dict) or content.pop(_SEAL) != digest(content):
        raise ValueError("it was changed after it was written")
    return content


def sealed_or_empty(path: Path) -> dict[str, Any]:
    """Return what ``write_sealed`` wrote; empty where there is no such file, or a changed one."""
    try:
        return read_sealed(path)
    except (OSError, ValueError):
        return {}


def final_status(folder: Path) -> str | None:
    """Return the status in a run's summary; None: the run was killed before it could write one."""
    status = sealed_or_empty(folder / SUMMARY_FILE).get("status")
    return status if status in ("FINISHED", "FAILED", "KILLED") else None


def seal_folder(folder: Path) -> None:
    """Write the hashes of the files below a folder into it."""
    (folder / HASHES_FILE).unlink(missing_ok=True)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    hashes = {str(path.relative_to(folder)): [path.stat().st_size, sha256(path)] for path in files}
    write_sealed(folder / HASHES_FILE, {"files": hashes})


def check_folder(folder: Path, key: str) -> None:
    """Refuse a folder of which a file is not as ``seal_folder`` found it; one without hashes is another program's.

    Args:
        folder: of the files.
        key: the option that names it, with its value, for the message.

    Raises:
        UserError: a file is missing, or another one, or one was added that a loader would read.
    """
    if not (folder / HASHES_FILE).exists():
        return
    remedy = f"restore it, or remove {folder / HASHES_FILE} if it was changed on purpose"
    try:
        files = read_sealed(folder / HASHES_FILE)["files"]
        for name, (size, expected) in files.items():
            path = folder / name
            if regular(path).st_size != size or sha256(path) != expected:
                raise UserError(f"{key}: {path} is not as the run wrote it; {remedy}")
        for path in sorted(folder.iterdir()):
            read = path.suffix in _READ or path.name in ("vocab.txt", "merges.txt")
            if read and path.name not in (*files, HASHES_FILE) and not path.name.startswith("."):
                raise UserError(f"{key}: {path} is not the run's, and would be read with it; move it out of {folder}")
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {folder} is not as the run wrote it ({error}); {remedy}") from None


class RunningHash:
    """The length and the SHA-256 of what was appended to a file."""

    def __init__(self) -> None:
        self._bytes, self._hash = 0, hashlib.sha256()

    def update(self, content: bytes | bytearray | memoryview) -> None:
        """Take in what was appended."""
        self._bytes += len(content)
        self._hash.update(content)

    def facts(self) -> dict[str, Any]:
        """Return ``bytes`` and ``sha256``."""
        return {"bytes": self._bytes, "sha256": self._hash.copy().hexdigest()}


def beginning(path: Path, facts: dict[str, Any]) -> RunningHash:
    """Return the hash of a file's beginning, which is as ``facts`` has it; more may follow.

    Raises:
        OSError: it cannot be read.
        ValueError: it begins with something else, or is shorter, or is no file.
    """
    found, left = RunningHash(), int(facts["bytes"])
    if left or path.exists():
        regular(path)
        with path.open("rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                found.update(block)
                left -= len(block)
    if found.facts() != facts:
        raise ValueError("it was changed after it was written")
    return found
