"""Signals: before torch is loaded they end the process, in training they are requests to the loop.

Nothing here imports anything large: scripts/train.py needs it first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from trainer.errors import Interrupted

OUTSIDE = "interrupted before or after training; saved files are unchanged"
"""The message after a signal that did not arrive during training."""

_HANGUP = {signal.SIGHUP} if sys.platform != "win32" else set()
_LAUNCHERS = {"LOCAL_RANK", "SLURM_JOB_ID"}
"""Variables that torchrun and SLURM set."""

_QUIET = ("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")
"""Options that print something to be read by itself, or by a program."""


def open_the_program(arguments: Sequence[str]) -> None:
    """Handle SIGINT and SIGTERM from now on, and print what is being loaded."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if _speaks() and not any(argument.partition("=")[0] in _QUIET for argument in arguments):
        print("loading torch and the recipes …", flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: an exception would be shown as a traceback, or be lost, in the middle of an import."""
    if _speaks():
        os.write(2, f"{OUTSIDE}\n".encode())
    os._exit(128 + number)


_NOT_THE_PROGRAM_S = (signal.SIG_DFL, signal.default_int_handler, _leave)


def _speaks() -> bool:
    """Return whether this process prints for all that torchrun started on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Signals:
    """While entered: in training, the first SIGINT or SIGTERM requests a stop, and a second one ends the run at once.

    SIGHUP, which comes when the terminal is closed (often twice), requests a stop too, unless nohup ignores it. Under
    torchrun and SLURM further SIGTERMs are ignored: both send one to every process, and SIGKILL where that takes too
    long. Before training there is nothing to save, so the first one ends the run. Others, such as USR1, request a
    checkpoint. What the program that trains does itself at a signal stays so.
    """

    def __init__(self, save_on: Sequence[str] = ()) -> None:
        """Prepare the handlers; ``save_on`` names signals without their ``SIG``."""
        self.training = False
        self.stop: int | None = None
        """The number of the signal that requested the stop."""
        self._save = False
        self._save_on = [signal.Signals[f"SIG{name}"] for name in save_on]
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            stops = [signal.SIGINT, signal.SIGTERM, *_HANGUP]
            stops = [each for each in stops if signal.getsignal(each) in _NOT_THE_PROGRAM_S]
            handlers = dict.fromkeys(stops, self._receive_stop) | dict.fromkeys(self._save_on, self._receive_save)
            for number, handler in handlers.items():
                self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive_stop(self, number: int, frame: FrameType | None) -> None:
        launched = number == signal.SIGTERM and _LAUNCHERS & os.environ.keys()
        if self.stop is not None and (launched or number in _HANGUP):
            return
        if not self.training:
            raise Interrupted(OUTSIDE, number)
        if self.stop is not None:
            raise Interrupted("second signal: stopped immediately, without saving", number)
        self.stop = number

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        if not self._save:
            return False
        self._save = False  # one more signal until here means the same checkpoint
        return True

    def _receive_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True
