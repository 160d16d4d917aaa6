"""The first seconds of scripts/train.py, before torch is there: a word about what takes so long, and Ctrl-C.

Nothing here imports anything large.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType

OUTSIDE = "interrupted outside of training; what was saved before is untouched"
"""What the user reads after a signal that did not come in training."""

_QUIET = ("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")
"""Options that print something to be read by itself, or by a program."""


def open_the_program(arguments: Sequence[str]) -> None:
    """Answer SIGINT and SIGTERM from now on, and say what is loaded."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if _speaks() and not any(argument.partition("=")[0] in _QUIET for argument in arguments):
        print("loading torch and the recipes …", flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: an exception would be shown as a traceback, or be lost, in the middle of an import."""
    if _speaks():
        os.write(2, f"{OUTSIDE}\n".encode())
    os._exit(128 + number)


def _speaks() -> bool:
    """Tell whether this process speaks for those that torchrun started on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
