"""The process runner: what it returns, and that nothing of a command outlives it."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from mantissa import shell


def ends(process: int) -> bool:
    """Whether a process, of any parent, has ended or does so."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    with open(descriptor, "rb"):
        return bool(select.select([descriptor], [], [], 10)[0])


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("echo one; echo two >&2; exit 3", 3, "one\ntwo\n"),
        ([sys.executable, "-c", "import os; print(os.getcwd(), os.environ['X'])"], 0, "{folder} y\n"),
        ("kill -9 $$", -9, ""),
    ],
)
def test_a_command_ends_with_its_code_and_what_it_printed(
    command: str | list[str], code: int, output: str, tmp_path: Path
) -> None:
    ended = shell.run(command, cwd=tmp_path, env=os.environ | {"X": "y"})
    assert (ended.code, ended.output) == (code, output.format(folder=tmp_path))


def test_files_keep_what_is_printed_and_errors_may_be_apart(tmp_path: Path) -> None:
    ended = shell.run("echo one; echo two >&2", tmp_path / "a.out", errors_apart=True)
    assert (ended.output, ended.errors, ended.last_lines()) == ("one\n", "two\n", "one / two")
    assert ((tmp_path / "a.out").read_text(), (tmp_path / "a.err").read_text()) == ("one\n", "two\n")


@pytest.mark.parametrize("start", ["", "exec setsid -w "])
def test_all_processes_of_a_command_are_ended(start: str) -> None:
    """Also those that ignore SIGTERM, and those in a session of their own, as the ranks of torchrun are."""
    left: list[int] = []

    def on_line(line: str) -> bool:
        left.append(int(line))
        return len(left) == 2

    command = f"trap '' TERM; {start}sh -c 'echo $$; sleep 1000 & echo $!; wait'"
    assert shell.run(command, stop_s=0.1, on_line=on_line).code is None
    assert all(map(ends, left))
    assert shell.run("sleep 1000", limit_s=0.1).code is None


def test_what_an_ended_command_leaves_running_ends_too() -> None:
    ended = shell.run("sleep 1000 & echo $!")
    assert ended.code == 0
    assert ends(int(ended.output))


def test_lines_are_seen_while_the_command_runs_and_may_end_it() -> None:
    lines: list[str] = []

    def on_line(line: str) -> bool:
        lines.append(line)
        return line == "two"

    ended = shell.run("echo one; echo two; sleep 1000", on_line=on_line)
    assert (ended.code, lines) == (None, ["one", "two"])
    assert shell.run("printf 'one\\ntwo'; exit 1", on_line=lines.append).code == 1
    assert lines[2:] == ["one", "two"]


def test_an_exception_here_ends_the_command() -> None:
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shell.run("echo $$; sleep 1000", on_line=interrupt)
    assert ends(started[0])
