"""Errors by what they mean, whichever library raised them."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from numbers import Integral, Real
from typing import Any

# Messages of torch's CPU allocator, C++, oneDNN, cuBLAS, cuDNN, NCCL, Triton and MPS. (CUDA's has a type.)
_NO_MEMORY = re.compile(
    "can't allocate memory|not enough memory|Cannot allocate memory|bad_alloc"
    # Not "a primitive descriptor": that is an operation that oneDNN does not have.
    "|could not create a (primitive(?! desc)|memory object)"
    "|STATUS_ALLOC_FAILED|was unable to find an engine|(CUDA|HIP) error: out of memory|MPS backend out of memory"
    "|Cuda failure \\d* ?'out of memory'|Triton Error \\[(CUDA|HIP)\\]: out of memory"
    # The handle of cuBLAS, or a plan of cuDNN, finds no memory beside what torch's allocator holds.
    "|BLAS_STATUS_NOT_INITIALIZED|No execution plans support the graph"
)

_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}


class UsageError(Exception):
    """An argument of a user cannot work: the message names it and what to give instead."""


class FormatError(Exception):
    """A model cannot be replayed, or cannot compute in a format, or with these modules in fp32."""


class NotFiniteError(Exception):
    """A step of a watched training was not finite: the message says where, and why."""


def check_type(name: str, value: object, fits: bool, what: str) -> None:
    """Refuse, by a ``UsageError``, an argument of a type that does not fit; ``what``: what it must be."""
    if not fits:
        raise UsageError(f"{name} must be {what}, and is of type {type(value).__name__}")


def check_number(name: str, value: object, such_as: float, below: float = float("inf")) -> None:
    """Refuse, by a ``UsageError``, what is no number above 0, or is not whole where ``such_as`` is."""
    whole = isinstance(such_as, int)
    fits, what = isinstance(value, Integral if whole else Real), f"a {'whole ' * whole}number, such as {such_as}"
    check_type(name, value, fits, what)
    if not 0 < value < below:  # type: ignore[operator]
        raise UsageError(f"{name}={value} must be more than 0 and less than {below}, such as {such_as}")


def names_in(name: str, given: Any) -> list[str]:
    """Return names as a list, of a single one, too; ``name``: of the argument. Raises UsageError."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for each in names:
        check_type(f"each of {name}", each, isinstance(each, str), "a name")
    return names


def most_like(typed: str, valid: Iterable[str]) -> str:
    """Return the name of which one sign was mistyped, or the order, or a number follows; empty: there is none.

    Another digit is another thing: nobody who types fp12 means fp16.
    """
    names, nearness = list(valid), (_same_letters, _one_differs, _is_numbered)
    return next((name for is_near in nearness for name in names if is_near(typed, name)), "")


def _same_letters(typed: str, name: str) -> bool:
    return sorted(typed.lower()) == sorted(name.lower())


def _one_differs(typed: str, name: str) -> bool:
    changes = SequenceMatcher(None, typed.lower(), name.lower()).get_opcodes()
    changes = [change for change in changes if change[0] != "equal"]
    (_, start, end, first, last), *others = changes
    return not others and max(end - start, last - first) == 1 and not typed[start:end].isdigit()


def _is_numbered(typed: str, name: str) -> bool:
    return typed.rstrip("0123456789") == name  # as resnet50


def nearest(typed: str, valid: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean 'bf16'?"`` or an empty string if none is similar; ``prefix`` is shown, not compared."""
    near = most_like(typed, valid)
    return f"; did you mean {prefix + near!r}?" if near else ""


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, of at most 300 characters."""
    return f"{type(error).__name__}: " + str(error).strip().partition("\n")[0][:300]


def refusal(error: BaseException) -> str:
    """Return what the system refuses a user's path, such as the right to write there; empty: it is another error."""
    if not (isinstance(error, OSError) and error.errno in _REFUSALS):
        return ""
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; correct that, or give another path"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # a process or a mapping that could not be made
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
