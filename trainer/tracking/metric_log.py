"""The metric log of a run, ``metrics.jsonl``: one line of JSON for each logged step, with ``step`` and ``time``."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from trainer.errors import UserError
from trainer.files import write_text

log = logging.getLogger("mantissa")


class MetricLog:
    """Appends lines to a file. If the disk is full, lines are kept in memory and retried; nothing is raised."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        self._warned = False

    def is_there(self) -> bool:
        """Return whether the file still has its name: neither removed nor moved away, nor its folder."""
        with suppress(OSError):
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
                del self._unwritten[: self._file.write(self._unwritten)]  # on a nearly full disk, only a part
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s cannot be written (%s). Training continues; the metrics are kept in memory.",
                    self._path,
                    error.strerror,
                )
            self._warned = True


def truncate(path: Path, step: int) -> None:
    """Remove the lines after ``step`` from a metric log, and an incomplete last line.

    Raises:
        UserError: another line is damaged.
    """
    if not path.exists():
        return
    *lines, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            keep = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}, is damaged; remove that line and resume again") from None
        if keep:
            kept.append(line + "\n")
    if torn or len(kept) < len(lines):
        write_text(path, "".join(kept))
