"""The progress of training and of other work (trainer/terminal.py)."""

from __future__ import annotations

import io
import os
import threading

import pytest
from rich.console import Console

from trainer import terminal as module
from trainer.terminal import Terminal, work

METRICS = {"loss": 2.5, "tokens_per_s": 12_300.0, "grad_norm": 1.2, "loss_scale": 65536.0, "skipped_steps": 1.0}


@pytest.mark.parametrize("in_place", [True, False])
def test_progress_stays_in_place_on_a_terminal_and_is_a_line_each_in_a_file(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW_S", 0.0)
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=in_place, width=120), logged=False)
    terminal.progress(20, 300, METRICS | {"step_time_s": 0.15}, "tokens")

    def tokenize() -> None:  # in a thread of a library
        with work("tokenizing [all]", unit="MB") as advance:
            advance(12, 48)
            terminal._progress.refresh()

    with terminal.in_use():
        thread = threading.Thread(target=tokenize)
        thread.start()
        thread.join()
    terminal.note("a line")
    terminal.end_progress()
    shown = out.getvalue()
    step = "step  20/300  loss 2.5000  12.3k tokens/s  norm 1.2  scale 65536  skipped 1  eta 0:42"
    work_shown = "tokenizing [all]  12/48 MB  eta 0:00"
    assert ("\x1b[2K" in shown) == in_place  # the line is erased
    if in_place:
        assert step in shown
        assert work_shown in shown
    else:
        assert shown.splitlines() == [step, work_shown, "a line"]


def test_a_quiet_one_shows_warnings_only() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=True), logged=False, quiet=True)
    with terminal.work("evaluating", 48, "batches") as advance:
        advance(12)
    terminal.note("a line")
    terminal.block("a block", [("a", "row")])
    terminal.progress(20, 300, METRICS | {"step_time_s": 0.15}, "tokens")
    assert out.getvalue() == ""
    terminal.warn("look")
    terminal.end_progress()
    assert "look" in out.getvalue()


def test_what_does_not_take_long_leaves_no_line_in_a_file() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out), logged=False)
    with terminal.work("evaluating", 48, "batches") as advance:
        advance(48)
    with work("nobody watches") as advance:
        advance(1)
    terminal.end_progress()
    assert out.getvalue() == ""


def test_a_pipe_without_a_reader_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich raises SystemExit there."""
    left: list[bool] = []
    monkeypatch.setattr(module, "leave_unread", lambda: left.append(True))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as pipe:
        Terminal(module._Console(file=pipe), logged=False).note("a line")
        assert left
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
