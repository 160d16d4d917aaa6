"""The parts of hand-written pages that a command writes; each stands between two comments that name it."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import UserError
from trainer.files import PROJECT, write_text

Blocks = dict[Path, dict[str, str]]
"""Content by the block's name, by page below the project's folder."""


def stale(blocks: Blocks) -> dict[Path, str]:
    """Return the new text of each page whose blocks have another content than the one given, by its path.

    Raises:
        UserError: a page does not have a block's two comments, once each and in order.
    """
    found: dict[Path, str] = {}
    for page, contents in blocks.items():
        before = after = (PROJECT / page).read_text(encoding="utf-8")
        for name, content in contents.items():
            begin, end = f"<!-- {name}: made by ", f"<!-- end of {name} -->"
            head, *rest = after.split(begin)
            if len(rest) != 1 or rest[0].count(end) != 1 or end in head:
                raise UserError(f"{page} must have {begin}… --> and {end} once each, in this order")
            maker, tail = rest[0].partition("\n")[0], rest[0].partition(end)[2]
            after = f"{head}{begin}{maker}\n{content}\n{end}{tail}"
        if after != before:
            found[PROJECT / page] = after
    return found


def write(blocks: Blocks) -> list[Path]:
    """Write the blocks of pages; return the pages that changed."""
    changed = stale(blocks)
    for path, text in changed.items():
        write_text(path, text)
    return list(changed)
