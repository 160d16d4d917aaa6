"""The progress of training and of other work (trainer/terminal.py)."""

from __future__ import annotations

import io
import os
import re
import threading

import pytest
from rich.console import Console

from trainer import terminal as module
from trainer.terminal import Terminal, work


@pytest.mark.parametrize("in_place", [True, False])
def test_progress_stays_in_place_on_a_terminal_and_is_a_line_in_a_file(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW_S", 0.0)
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=in_place, width=120))
    terminal.bar(20, 300, lambda: "20/300  loss 2.5000")
    terminal.bar(21, 300, lambda: "too soon")

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
    work_shown = "tokenizing [all]  12/48 MB  eta 0:00"
    assert ("\x1b[2K" in shown) == in_place  # the line is erased
    assert "too soon" not in shown
    if in_place:
        assert "20/300  loss 2.5000" in shown
        assert work_shown in shown
    else:
        assert shown.splitlines() == [work_shown, "a line"]


@pytest.mark.parametrize("brief", [False, True])
def test_a_quiet_one_shows_warnings_only_and_a_brief_one_its_outcome_too(brief: bool) -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=not brief), quiet=not brief, brief=brief)
    with terminal.work("evaluating", 48, "batches") as advance:
        advance(12)
    terminal.note("a line")
    terminal.block("a block", [("a", "row")])
    terminal.bar(20, 300, lambda: "20/300")
    assert out.getvalue() == ""
    terminal.outcome("how it ended")
    assert out.getvalue() == "how it ended\n" * brief
    terminal.warn("look")
    terminal.end_progress()
    assert "look" in out.getvalue()


@pytest.mark.parametrize("columns", [None, 60])
def test_no_fact_of_a_block_is_lost_in_any_width(columns: int | None) -> None:
    out, words = io.StringIO(), [f"word{number}" for number in range(40)]
    Terminal(Console(file=out, force_terminal=columns is not None, width=columns)).block(
        "title", [("name", " ".join(words)), ("longer", "a row")]
    )
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= (columns or 100)
    assert [line[:10] for line in lines] == ["title", "  name    ", *[10 * " "] * (len(lines) - 3), "  longer  "]
    assert " ".join(lines).split() == ["title", "name", *words, "longer", "a", "row"]


def test_a_command_is_one_line_in_any_width() -> None:
    out, command = io.StringIO(), f"  python scripts/compare.py {' '.join(f'option.{n}=value' for n in range(20))}"
    terminal = Terminal(Console(file=out, force_terminal=True, width=80, color_system=None))
    terminal.note(f"go on with:\n{command}")
    terminal.warn(command)
    assert out.getvalue().splitlines() == ["go on with:", command, f"warning: {command}"]


def test_what_does_not_take_long_leaves_no_line_in_a_file() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out))
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
        Terminal(module._Console(file=pipe)).note("a line")
        assert left
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
