"""Signals: before torch is loaded they end the process, in training they are requests to the loop.

Nothing here imports anything large: scripts/train.py needs it first.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from trainer.errors import Interrupted

OUTSIDE = "interrupted before or after training; saved files are unchanged"
"""The message after a signal that did not arrive during training."""

_HANGUP = getattr(signal, "SIGHUP", None)
_LAUNCHERS = {"LOCAL_RANK", "SLURM_JOB_ID"}
"""Variables that torchrun and SLURM set."""
_QUIET = ("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")
"""Options that print something to be read by itself, or by a program."""


class _Program:
    """What ``scripts/train.py`` has begun with; no other program that trains calls ``begin_program``."""

    is_begun = False
    start_time: float | None = None
    """On the monotonic clock; None: a run has taken it."""
    has_loading_line = False
    """Whether the line that says what is being loaded stands on a terminal."""


def is_program() -> bool:
    """Return whether this process is ``scripts/train.py``, and no other program that trains."""
    return _Program.is_begun


def begin_program(arguments: Sequence[str]) -> None:
    """Handle SIGINT and SIGTERM from now on, and print what is being loaded.

    What is imported is no garbage: Python looks for some again when ``train`` allows it, which saves half a second.
    """
    _Program.is_begun, _Program.start_time = True, time.monotonic()
    gc.disable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if _speaks() and not any(argument.partition("=")[0] in _QUIET for argument in arguments):
        print("loading torch and the recipes …", flush=True)
        _Program.has_loading_line = sys.stdout.isatty()


def erase_loading_line() -> None:
    """Erase from a terminal the line that says what is being loaded, unless a run has begun and said more."""
    if _Program.has_loading_line and _Program.start_time is not None:
        print("\x1b[A\x1b[K", end="", flush=True)
    _Program.has_loading_line = False


def take_start_time() -> float:
    """Return when the program began, on the monotonic clock, to whoever asks first; to others, what time it is."""
    began, _Program.start_time = _Program.start_time, None
    return time.monotonic() if began is None else began


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: an exception would be shown as a traceback, or be lost, in the middle of an import."""
    if _speaks():
        os.write(2, f"{OUTSIDE}\n".encode())
    os._exit(128 + number)


def _speaks() -> bool:
    """Return whether this process prints for all that torchrun started on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Signals:
    """While entered: the first SIGINT or SIGTERM in training requests a stop, and a second one ends the run at once.

    SIGHUP, which comes when the terminal is closed (often twice), requests a stop too, unless nohup ignores it. Under
    torchrun and SLURM further SIGTERMs are ignored: both send one to every process, and SIGKILL where that takes too
    long. Before training there is nothing to save, so the first one ends the run. Others, such as USR1, request a
    checkpoint. What the program that trains does itself at a signal stays so.
    """

    def __init__(self, save_on: Sequence[str] = ()) -> None:
        """Prepare the handlers; ``save_on`` names signals without their ``SIG``."""
        self.ahead: str | None = None
        """What is done before a first signal ends the run, such as ``finishing the step``; None: it ends at once."""
        self.tell: Callable[[str], None] = print
        """Shows the user a line."""
        self.stop: int | None = None
        """The number of the signal that requested the stop."""
        self._save = False
        self._save_on = [signal.Signals[f"SIG{name}"] for name in save_on]
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            own = (signal.SIG_DFL, signal.default_int_handler, _leave)
            for number in (signal.SIGINT, signal.SIGTERM, _HANGUP):
                if number is not None and signal.getsignal(number) in own:
                    self._previous[number] = signal.signal(number, self._receive_stop)
            for number in self._save_on:
                before = signal.signal(number, self._receive_save)
                self._previous.setdefault(number, before)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        requested, self._save = self._save, False
        return requested

    def _receive_stop(self, number: int, frame: FrameType | None) -> None:
        is_second = self.stop is not None
        repeats = number == _HANGUP or (number == signal.SIGTERM and bool(_LAUNCHERS & os.environ.keys()))
        if is_second and repeats:  # of a launcher, or of a terminal that was closed: no second request
            return
        if self.ahead is None:
            raise Interrupted(OUTSIDE, number)
        if is_second:
            raise Interrupted("second signal: stopped immediately", number)
        self.stop = number
        with suppress(RuntimeError):  # the signal came while a line was being written
            self.tell(f"{self.ahead}; press Ctrl-C again to stop now")

    def _receive_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True
