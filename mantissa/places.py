"""Which line of whose code an operator runs for."""

from __future__ import annotations

import linecache
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_TORCH, _HERE = (str(Path(path).parent) + "/" for path in (torch.__file__, __file__))
_CHECKPOINT = f"{_TORCH}utils/checkpoint.py"
_ENGINE = f"{_TORCH}autograd/graph.py"
"""Which starts a backward pass: the frames outside of it belong to the loop, and not to the operator."""


class Line(NamedTuple):
    """A line of code."""

    file: str
    number: int

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
        return f"{shown}:{self.number}: {linecache.getline(self.file, self.number).strip()}"


def of_stack() -> Line | None:
    """Return the innermost line that is neither torch's nor this library's; None: there is none in a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_code.co_filename) != _ENGINE:
        if _foreign(name):
            return Line(name, frame.f_lineno)
        frame = frame.f_back
    return None


def checkpointed() -> bool:
    """Return whether activation checkpointing runs what runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


def of_error(error: BaseException) -> Line | None:
    """Return the line of such code at which an error was raised."""
    found, trace = None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        found = Line(name, trace.tb_lineno) if _foreign(name) else found
        trace = trace.tb_next
    return found


def raised_here(error: BaseException) -> bool:
    """Return whether this library's own code raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE)


@cache
def _foreign(file: str) -> bool:
    return not file.startswith((_TORCH, _HERE, "<frozen"))
