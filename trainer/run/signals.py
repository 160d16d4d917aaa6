"""Signals: before torch is loaded they end the process, in training they are requests to the loop.

Nothing here imports anything large: scripts/train.py needs it first.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from trainer.errors import Interrupted

OUTSIDE = "interrupted before or after training; saved files are unchanged"
"""The message after a signal that did not arrive during training."""

AT_ONCE = "second signal: stopped immediately"

_HANGUP = {signal.SIGHUP} if sys.platform != "win32" else set()
_LAUNCHERS = {"LOCAL_RANK", "SLURM_JOB_ID"}
"""Variables that torchrun and SLURM set."""

_QUIET = ("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")
"""Options that print something to be read by itself, or by a program."""
USUAL_THRESHOLDS = gc.get_threshold()
"""Python's, for its search for garbage."""
_opened: list[float] = []
_shown: list[bool] = []  # whether the line that says what is being loaded is on a terminal
_is_open = False


def taken_opening() -> float:
    """Return when the program was opened, on the monotonic clock, to whoever asks first; to others, what time it is."""
    return _opened.pop() if _opened else time.monotonic()


def is_open() -> bool:
    """Return whether this process is a program of this project, not somebody else's that calls it."""
    return _is_open


def open_the_program(arguments: Sequence[str]) -> None:
    """Handle SIGINT and SIGTERM from now on, and print what is being loaded.

    What is imported is no garbage; until ``train`` allows it, little is looked for, which would take half a second.
    """
    global _is_open
    _is_open = True
    _opened.append(time.monotonic())
    gc.set_threshold(200_000)
    atexit.register(_skip_teardown)  # the first that is registered is the last that runs
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if _speaks() and not any(argument.partition("=")[0] in _QUIET for argument in arguments):
        print("loading torch and the recipes …", flush=True)
        _shown.append(sys.stdout.isatty())


def take_back() -> None:
    """Remove from a terminal the line that says what is being loaded, unless a run has begun and said more."""
    if _shown and _shown.pop() and _opened:
        print("\x1b[A\x1b[K", end="", flush=True)


_ended: list[int] = []


def close_the_program(code: int) -> NoReturn:
    """Exit with this code, after what is registered with atexit, but without taking apart all that was imported."""
    _ended.append(code)
    sys.exit(code)


_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def _skip_teardown() -> None:
    """Python would free half a million objects one by one, which takes a second; the system frees them at once."""
    if _ended:  # else what raised SystemExit knows the code, and Python exits with it
        gc.unfreeze()
        for each in gc.get_objects():  # also files that nobody has closed
            if issubclass(type(each), _WRITERS):  # isinstance would ask objects that warn about it
                with suppress(OSError, ValueError):
                    each.flush()
        os._exit(_ended[0])


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: an exception would be shown as a traceback, or be lost, in the middle of an import."""
    if _speaks():
        os.write(2, f"{OUTSIDE}\n".encode())
    os._exit(128 + number)


_NOT_THE_PROGRAM_S = (signal.SIG_DFL, signal.default_int_handler, _leave)


def _speaks() -> bool:
    """Return whether this process prints for all that torchrun started on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


_forks_apart: list[bool] = []
"""Whether processes that are forked no longer wake this one at their signals."""


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
        self._previous: dict[signal.Signals, Any] = {}
        self._leaving = threading.Event()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            stops = [signal.SIGINT, signal.SIGTERM, *_HANGUP]
            stops = [each for each in stops if signal.getsignal(each) in _NOT_THE_PROGRAM_S]
            handlers = dict.fromkeys(stops, self._receive_stop) | dict.fromkeys(self._save_on, self._receive_save)
            for number, handler in handlers.items():
                self._previous[number] = signal.signal(number, handler)
        if self._previous:
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._woken = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            if not _forks_apart:
                os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
                _forks_apart.append(True)
            threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            signal.set_wakeup_fd(self._woken)
            os.close(self._writing)

    def _watch(self, reading: int) -> None:
        """Answer the first signal at once, and end a process of ``open_the_program`` where the main thread does not.

        That handles signals between two lines of Python; a tokenizer, for example, is trained in a single call.
        """
        answered = False
        while received := os.read(reading, 1):
            if received[0] not in self._previous or received[0] in self._save_on:
                continue
            if not answered and (self.ahead is not None or self.stop is not None):
                self.tell(f"{self.ahead or 'finishing the run'}; press Ctrl-C again to stop now")
                answered = True
            elif _is_open and not self._is_repeated(received[0]) and not self._leaving.wait(1):
                if _speaks():
                    os.write(2, f"{OUTSIDE if self.ahead is None else AT_ONCE}\n".encode())
                os._exit(128 + received[0])
        os.close(reading)

    def _is_repeated(self, number: int) -> bool:
        """Return whether a second signal may be no second request: a launcher's, or of a terminal that was closed."""
        return number in _HANGUP or (number == signal.SIGTERM and bool(_LAUNCHERS & os.environ.keys()))

    def _receive_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop is not None and self._is_repeated(number):
            return
        if self.ahead is None or self.stop is not None:
            self._leaving.set()
            raise Interrupted(OUTSIDE if self.ahead is None else AT_ONCE, number)
        self.stop = number

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        if not self._save:
            return False
        self._save = False  # one more signal until here means the same checkpoint
        return True

    def _receive_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True
