"""Signals: before torch is loaded they end the process, in training they are requests to the loop.

Nothing here imports anything large: scripts/train.py needs it first.

State of the process: the handlers of signals, which ``begin_program`` sets for a program of ours and ``Signals`` while
a run trains; and ``_Program``, what this program has begun with.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from trainer.config.text import make_printable, say
from trainer.errors import Interrupted

OUTSIDE = "interrupted before or after training; saved files are unchanged"
"""The message after a signal that did not arrive during training."""
CLEARED = "\r\033[2K"
"""Empties a line of a terminal."""

_LAUNCHERS = {"LOCAL_RANK", "SLURM_JOB_ID"}
"""Variables that torchrun and SLURM set."""


class _Program:
    """What ``scripts/train.py`` has begun with; no other program that trains calls ``begin_program``."""

    start_time: float | None = None
    """On the monotonic clock; None: a run has taken it."""
    exit_code: int | None = None
    """None: it has not come to its end."""


def begin_program() -> None:
    """Handle SIGINT and SIGTERM from now on, and tell what is being loaded.

    What is imported is no garbage: Python looks for some again when ``train`` allows it, which saves half a second.
    """
    make_printable()
    _Program.start_time = time.monotonic()
    atexit.register(_skip_teardown)  # what is registered first is called last
    gc.disable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the program began
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (as long as the program)
    if _speaks() and sys.argv[1:] and "quiet=true" not in sys.argv and "torch" not in sys.modules:
        # Of a flag Hydra may print what does not remove it.
        in_place = sys.stderr.isatty() and not any(argument.startswith("-") for argument in sys.argv[1:])
        say("loading torch and the recipes …", end="" if in_place else "\n")


def clear_line() -> None:
    """Remove from a terminal what ``begin_program`` has told."""
    if sys.stderr.isatty():
        say("", end=CLEARED)


def end_program(code: int) -> NoReturn:
    """Exit with this code, without freeing each object first."""
    _Program.exit_code = code
    sys.exit(code)


def _skip_teardown() -> None:
    """Let the system free the memory at once: for Python, half a million objects are a second or two of work."""
    if _Program.exit_code is not None:
        with suppress(OSError, ValueError):  # closed by whoever read it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_Program.exit_code)


def take_start_time() -> float:
    """Return when the program began, on the monotonic clock, to whoever asks first; to others, what time it is."""
    began, _Program.start_time = _Program.start_time, None
    return time.monotonic() if began is None else began


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: an exception would be shown as a traceback, or be lost, in the middle of an import."""
    if _speaks():
        with suppress(OSError):
            os.write(2, f"{os.isatty(2) * CLEARED}{OUTSIDE}\n".encode())
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
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) in own:
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
        repeats = number == signal.SIGHUP or (number == signal.SIGTERM and bool(_LAUNCHERS & os.environ.keys()))
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
