"""Files that are written whole or not at all, and where the project's own are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
"""The folder of the repository."""


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment for a child that runs a module of this project.

    The project's folder comes before what ``PYTHONPATH`` holds: packages may be installed in such a folder only.
    """
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)}


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever reads it sees the old content or the new one, also after a kill."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def flush(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
