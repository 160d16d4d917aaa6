"""The process runner: what it returns, and that nothing of a command outlives it."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from mantissa.verdict import shell


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
def test_all_processes_of_an_interrupted_command_are_ended(start: str, tmp_path: Path) -> None:
    """Also those that ignore SIGTERM, and those in a session of their own, as the ranks of torchrun are."""
    interrupt = f"until grep -q do_wait /proc/{os.getpid()}/wchan; do sleep 0.01; done; kill -INT {os.getpid()}"
    command = f"trap '' TERM; {start}sh -c 'echo $$; sleep 1000 & echo $!; {interrupt}; wait'"
    with pytest.raises(KeyboardInterrupt):
        shell.run(command, tmp_path / "out", stop_s=0.1)
    assert [ends(int(process)) for process in (tmp_path / "out").read_text().split()] == [True, True]


def test_a_command_is_ended_at_its_limit() -> None:
    assert shell.run("sleep 1000", limit_s=0.1).code is None


def test_what_an_ended_command_leaves_running_ends_too() -> None:
    ended = shell.run("sleep 1000 & echo $!")
    assert ended.code == 0
    assert ends(int(ended.output))
