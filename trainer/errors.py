"""The errors that end a run early, each with its exit code, and helpers for their messages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mantissa.errors import is_out_of_memory as is_out_of_memory
from mantissa.errors import most_like as most_like
from mantissa.errors import nearest as nearest


class RunError(Exception):
    """A run that ends early for a known reason; the message is shown without a traceback."""

    exit_code = 1
    shared = False
    """Whether every process of the job raises it at the same point, so that one reports it and all stay in step."""
    status = "FAILED"
    """MLflow's, of a run that it ends in training."""

    def __init__(self, message: str, *, shared: bool | None = None) -> None:
        super().__init__(message)
        if shared is not None:
            self.shared = shared

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows, which asks for it."""
        return [f"{type(self).__name__}: {self}"]


class UserError(RunError):
    """An option or a file of the user cannot work.

    Args:
        problem: what is there, and what is wanted.
        remedies: what to type, each a line of a shell: overrides that take the place of those with the same keys; an
            empty one leaves the mistake out. Each works by itself. What is not known whole, such as a path, is no
            remedy, but part of the problem.
        mistake: arguments, or their keys alone, that every remedy takes the place of as well.
        shared: see ``RunError.shared``.
    """

    exit_code = 2

    def __init__(self, problem: str, *remedies: str, mistake: str = "", shared: bool | None = None) -> None:
        typed = " or ".join(filter(None, remedies))
        to_do = [f"set {typed}"] if typed else []
        to_do += [f"leave {'it' if mistake in problem else mistake} out"] if "" in remedies else []
        super().__init__("; ".join(filter(None, [problem, ", or ".join(to_do)])), shared=shared)
        self.problem, self.remedies, self.mistake = problem, remedies, mistake


def no_effect(given: str, why: str, *remedies: str, mistake: str = "", shared: bool | None = None) -> UserError:
    """Return the error of an option that would do nothing: ``GIVEN has no effect: WHY; leave it out``.

    Args:
        given: what was typed, ``key=value`` or the key alone.
        why: what makes it so, without a full stop.
        remedies: what gives it an effect, as overrides.
        mistake: the arguments to leave out, where they are not ``given``.
        shared: see ``RunError.shared``.
    """
    return UserError(f"{given} has no effect: {why}", *remedies, "", mistake=mistake or given, shared=shared)


class NonFiniteError(RunError):
    """Training was no longer finite; the update with the non-finite values was not applied."""

    exit_code = 3
    shared = True


class OutOfMemory(RunError):
    """The device, or the machine, had less memory than the run needs.

    Args:
        message: for the user.
        smaller: the microbatch with which a run that has trained nothing can start again; 0: there is none.
        shared: see ``RunError.shared``.
    """

    exit_code = 4

    def __init__(self, message: str, smaller: int = 0, *, shared: bool | None = None) -> None:
        super().__init__(message, shared=shared)
        self.smaller = smaller


class Interrupted(KeyboardInterrupt):
    """A signal requested the run to stop.

    Not an ``Exception``: it can be raised in the middle of any library call, and many libraries catch every
    ``Exception`` and continue (``shutil.rmtree`` with ``ignore_errors`` in Python 3.11, for example).
    """

    shared = True
    """See ``RunError.shared``."""
    _render_traceback_ = RunError._render_traceback_

    folder: Path | None = None
    """Folder of the run that a program's ``trainer.train`` was training, for ``train(resume=folder)``. None: it had not
    begun."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int]]:
        return type(self), (str(self), self.exit_code - 128)


@contextmanager
def on_every_rank() -> Iterator[None]:
    """Mark a mistake that every process of the job finds, so that one reports it."""
    try:
        yield
    except UserError as error:
        error.shared = True
        raise


def check_number(key: str, value: int | str | None, least: int = 1) -> None:
    """Raise UserError where an option is neither a whole number of at least ``least``, nor ``auto``, nor left out."""
    if isinstance(value, str) and value != "auto":
        raise UserError(f"{key}={value} must be a whole number, or auto")
    if isinstance(value, int) and value < least:
        raise UserError(f"{key}={value} must be at least {least}")


def check_seed(seed: int) -> None:
    """Raise UserError where a seed is not one that every library takes."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must lie between 0 and {2**32 - 1}")


def check_range(key: str, value: float, interval: str) -> None:
    """Raise UserError where a number lies outside an interval, such as ``[0, 1)`` or ``(0, inf)``."""
    low, high = map(float, interval[1:-1].split(","))
    above = value > low or (interval[0] == "[" and value == low)
    below = value < high or (interval[-1] == "]" and value == high)
    if not (above and below):
        least = f"{'at least' if interval[0] == '[' else 'above'} {low:g}"
        most = "finite" if high == math.inf else f"{'at most' if interval[-1] == ']' else 'below'} {high:g}"
        raise UserError(f"{key}={value} must be {least} and {most}")


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError where an option is none of its choices."""
    names = list(choices)
    if value not in names:
        near = most_like(value, names)
        raise UserError(f"{key}={value} is unknown ({', '.join(names)})", *([f"{key}={near}"] if near else []))


def check_folder_name(key: str, name: str) -> None:
    """Raise UserError where an option cannot name a folder; an empty one does."""
    if "/" in name or name in (".", "..") or not (name.isprintable() and len(name.encode()) < 250):
        shown = name[:60] if name.isprintable() else repr(name[:60])
        raise UserError(f"{key}={shown} must be the name of a folder: one short line, without a slash")


def redacted(text: str) -> str:
    """Return a text without what may be secret in its addresses: what stands before ``@host``, and their queries."""
    without_user = re.sub(r"://(?!/)\S*@", "://***@", text)
    return re.sub(r"(://[^\s?#;]*[?#;])[^\s'\"]+", r"\1***", without_user)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, redacted, of at most 300 characters.

    Errors of MLflow, SQLAlchemy and the Hub have many lines, and some repeat the address with its password.
    """
    text = redacted(str(error).strip()[:4000])
    if found := re.search(r"Max retries exceeded.*?(?:\[Errno -?\d+\] ([\w ]+)|(timed out))", text, re.DOTALL):
        return f"no connection: {found[1] or found[2]}"
    return text.splitlines()[0][:300] if text else type(error).__name__
