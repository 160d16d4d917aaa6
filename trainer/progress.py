"""Progress of long work, wherever it is done, such as tokenizing text: a terminal shows it, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Advance = Callable[..., None]
"""Takes how much is done, and how much there is where that was not known before; it may be called often."""
Show = Callable[..., AbstractContextManager[Advance]]
"""Takes what ``work`` takes."""

_shows: list[Show] = []
"""The last one shows. Not by thread: libraries call what they are given in threads of their own."""


def work(label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Advance]:
    """Report work that may take more than a moment, while the context is entered.

    Args:
        label: what is done, such as ``tokenizing``.
        total: how much there is to do; None: not known.
        unit: of ``total``, such as ``MB``.
    """
    return _shows[-1](label, total, unit) if _shows else nullcontext(lambda *_: None)


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Show meanwhile what ``work`` reports."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.remove(show)
