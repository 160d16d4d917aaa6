"""How much of what MLflow is given was sent. MLflow tells nobody, so the positions in its open files are looked up."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Upload:
    """The files of a run on their way to MLflow, one file or folder after the other."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes of all of them."""
        self._part: Path | None = None
        self._bytes = self._before = 0
        self._read: dict[str, int] = {}

    def begin(self, part: Path) -> int:
        """Go on with a file or folder; return its bytes."""
        self._before += self._bytes
        self._part, self._bytes, self._read = part, size_of(part), {}
        return self._bytes

    def sent(self) -> int:
        """Return how many bytes were sent; of a file in between as far as it was read, where the system tells that."""
        if self._part is not None:
            self._read |= _positions(self._part)
        return min(self._before + min(sum(self._read.values()), self._bytes), self.total)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _positions(path: Path) -> dict[str, int]:
    """Return how far each file at a path, or below, was read that this process has open."""
    found, place, opened = {}, str(path.absolute()), Path("/proc/self/fd")
    for number in os.listdir(opened) if opened.is_dir() else ():
        with suppress(OSError):  # it was closed meanwhile
            name = os.readlink(opened / number)
            if name == place or name.startswith(f"{place}/"):
                found[name] = int(Path(f"/proc/self/fdinfo/{number}").read_text().split(maxsplit=2)[1])
    return found
