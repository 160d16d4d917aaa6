"""Progress of long work, wherever it is done, such as tokenizing text: a terminal shows it, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

Advance = Callable[..., None]
"""Takes how much is done, and how much there is where that was not known before; it may be called often."""
Show = Callable[..., AbstractContextManager[Advance]]
"""Takes what ``work`` takes."""

_show: ContextVar[Show | None] = ContextVar("show", default=None)


def work(label: str, total: float | None = None, unit: str = "") -> AbstractContextManager[Advance]:
    """Report work that may take more than a moment, while the context is entered.

    Args:
        label: what is done, such as ``tokenizing``.
        total: how much there is to do; None: not known.
        unit: of ``total``, such as ``MB``.
    """
    show = _show.get()
    return show(label, total, unit) if show else nullcontext(lambda *_: None)


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Show meanwhile what ``work`` reports."""
    before: Any = _show.set(show)
    try:
        yield
    finally:
        _show.reset(before)
