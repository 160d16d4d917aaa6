"""Errors by what they mean, whichever library raised them."""

from __future__ import annotations

import errno
import re

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
