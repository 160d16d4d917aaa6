"""The progress of work that is no training step (trainer/run/terminal.py)."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from trainer.progress import shown_by, work
from trainer.run.terminal import Terminal


class Shown(io.StringIO):
    """Notes when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_takes_long_shows_its_progress_also_in_a_thread_of_a_library(in_place: bool) -> None:
    out = Shown()
    terminal = Terminal(Console(file=out, force_terminal=in_place, width=80), logged=False)
    terminal.patience_s = terminal.again_s = 0.001
    with shown_by(terminal.work), work("opening the data"):
        assert out.written.wait(300)

        def tokenize() -> None:
            with work("tokenizing", unit="MB") as advance:
                advance(12, 48)
                while "12/48" not in out.getvalue():
                    out.written.clear()
                    assert out.written.wait(300)

        thread = threading.Thread(target=tokenize)
        thread.start()
        thread.join()
    assert "opening the data  0:00" in out.getvalue()
    assert "tokenizing  12/48 MB  eta 0:0" in out.getvalue()
    assert ("\x1b[2K" in out.getvalue()) == in_place  # the line is erased


def test_what_does_not_take_long_shows_nothing() -> None:
    out = Shown()
    terminal = Terminal(Console(file=out), logged=False)
    terminal.patience_s = 1e6
    with terminal.work("evaluating", 48, "batches") as advance:
        advance(48)
    with work("nobody watches") as advance:
        advance(1)
    assert not out.written.is_set()
