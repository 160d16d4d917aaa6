"""What a server answers, as its bytes arrive: they are counted as progress, and too many of them are refused."""

from __future__ import annotations

import http.client
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LARGEST_ANSWER = 64 * 2**20
"""Bytes of an answer; MLflow's have at most some MiB. Files are downloaded elsewhere, to the disk."""
_thread = threading.local()


class _Counted(io.RawIOBase):
    """The stream of one answer."""

    def __init__(self, stream: io.RawIOBase, arrived: Callable[[], None]) -> None:
        self._stream = stream
        self._arrived = arrived
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count = self._stream.readinto(buffer)
        self._arrived()
        self._bytes += count or 0
        if self._bytes > LARGEST_ANSWER:
            raise OSError(f"the answer is larger than {LARGEST_ANSWER // 2**20} MiB")
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer that is counted in a thread that is ``watching``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if arrived := getattr(_thread, "arrived", None):
            self.fp = io.BufferedReader(_Counted(self.fp.detach(), arrived))


@contextmanager
def watching(arrived: Callable[[], None] | None = None) -> Iterator[None]:
    """Refuse answers of more than ``LARGEST_ANSWER`` in this thread, and call ``arrived`` when bytes of one arrive."""
    from urllib3.connection import HTTPConnection

    HTTPConnection.response_class = _Answer  # http.client's way to give another
    before = getattr(_thread, "arrived", None)
    _thread.arrived = arrived or before or (lambda: None)
    try:
        yield
    finally:
        _thread.arrived = before
