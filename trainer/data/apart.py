"""Test data that is trained on, or chosen by, tests nothing: whether two lists of files share one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from trainer.errors import UserError


def check_apart(key: str, files: Sequence[str], others: Sequence[str], role: str) -> None:
    """Refuse test data with a file that has another role, whatever it is called there: a link or a hard link.

    Args:
        key: the option that names the test data, for messages.
        files: of the test data.
        others: those with the other role.
        role: such as ``training``.

    Raises:
        UserError: they share a file.
    """
    known = set(_real(others))
    shared = [file for file, real in zip(files, _real(files), strict=True) if real in known]
    if not shared:
        stats = [os.stat(file) for file in files]
        if any(stat.st_nlink > 1 for stat in stats):  # only then, for there may be millions of others
            inodes = {(stat.st_dev, stat.st_ino) for stat in map(os.stat, others)}
            shared = [file for file, stat in zip(files, stats, strict=True) if (stat.st_dev, stat.st_ino) in inodes]
    if shared:
        raise UserError(f"{key}: {shared[0]} is {role} data, too; set data.test to data that is used for nothing else")


def _real(files: Sequence[str]) -> Iterator[str]:
    """Yield the real paths. Only of links is every part of the path looked up, else that of each folder once."""
    folders: dict[str, tuple[str, set[str]]] = {}
    for file in files:
        folder, name = os.path.split(file)
        if folder not in folders:
            with os.scandir(folder or ".") as entries:
                folders[folder] = os.path.realpath(folder), {entry.name for entry in entries if entry.is_symlink()}
        real, links = folders[folder]
        yield os.path.realpath(file) if name in links else os.path.join(real, name)
