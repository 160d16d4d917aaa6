"""Test data that is trained on, or chosen by, tests nothing: whether two lists of files share one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.errors import UserError


def check_no_overlap(key: str, files: Sequence[str], others: Sequence[str], role: str) -> None:
    """Refuse test data with a file that has another role, whatever it is called there: a link or a hard link.

    Args:
        key: the option that names the test data, for messages.
        files: of the test data.
        others: those with the other role.
        role: such as ``training``.

    Raises:
        UserError: they share a file.
    """
    known = set(map(_identity, others)) - {None}
    if shared := [file for file in files if _identity(file) in known]:
        raise UserError(f"{key}: {shared[0]} is {role} data, too; set data.test to data that is used for nothing else")


def _identity(file: str) -> tuple[int, int] | None:
    """Return what all names of a file have in common; None: a link to nothing, which is reported when it is read."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino
