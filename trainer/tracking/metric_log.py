"""The metric log of a run, ``metrics.jsonl``: one line of JSON for each logged step, with ``step`` and ``time``."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("mantissa")


class MetricLog:
    """Appends lines to a file. If the disk is full, lines are kept in memory and retried; nothing is raised.

    Args:
        path: of the file.
        saved: of a run that is resumed: ``written`` when its checkpoint was saved; what follows in the file is removed.
    """

    def __init__(self, path: Path, saved: int | None = None) -> None:
        self._path = path
        if saved is not None and path.exists():
            os.truncate(path, saved)
        self._file = path.open("ab", buffering=0)
        self.written = self._file.tell()
        """Length of the file in bytes."""
        self._unwritten = bytearray()
        self._warned = False

    def is_there(self) -> bool:
        """Return whether the file still has its name: neither removed nor moved away, nor its folder."""
        with suppress(OSError, ValueError):  # or it is closed
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        return False

    def append(self, line: str) -> None:
        """Write a line, and those before it that could not be written."""
        self._unwritten += line.encode() + b"\n"
        self._write()

    def close(self) -> None:
        """Try to write the remaining lines, and close the file."""
        if self._file.closed:
            return
        self._write()
        with suppress(OSError):
            self._file.close()
        if lines := self._unwritten.count(b"\n"):
            log.warning("%s could not be written completely: its last %d lines are lost.", self._path, lines)

    def _write(self) -> None:
        try:
            while self._unwritten:
                count = self._file.write(self._unwritten)  # on a nearly full disk, only a part
                self.written += count
                del self._unwritten[:count]
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s cannot be written (%s). Training continues; the metrics are kept in memory.",
                    self._path,
                    error.strerror,
                )
            self._warned = True
