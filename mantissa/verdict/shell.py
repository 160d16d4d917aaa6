"""Runs commands, each in a process group of its own, and leaves none of their processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

STOP_TIMEOUT_S = 10.0
"""Seconds that a command has to end by itself once it was told to; then it is killed."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None
    """Exit code, minus a signal's number where one killed it; None: it was ended at its limit."""
    seconds: float
    """Seconds from its start to its end."""
    output: str
    """Text that it printed, with its errors where these are not apart."""
    errors: str = ""
    """Errors that it printed, where these are apart."""

    def last_lines(self) -> str:
        """Return the last three lines that it printed, separated by slashes; errors come last."""
        lines = [line.strip()[:200] for text in (self.output, self.errors) for line in text.splitlines()]
        return " / ".join([line for line in lines if line][-3:])


def run(
    command: str | Sequence[str],
    output: Path | None = None,
    *,
    errors_apart: bool = False,
    limit_s: float | None = None,
    stop_s: float = STOP_TIMEOUT_S,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command until it ends, and end whatever it has left running.

    ``run([sys.executable, "train.py"], Path("run.log"), limit_s=60)`` keeps what was printed in a file;
    ``run(command).output`` has it as a text. Ctrl-C, or any other exception here, ends the command first: SIGTERM goes
    to all of its processes, as from a terminal; after ``stop_s`` they are killed, with descendants in groups of their
    own, such as the ranks of torchrun.

    Args:
        command: words, or a text for the shell.
        output: file for what it prints, which is replaced; None: a temporary one.
        errors_apart: whether what it prints as errors goes to ``Ended.errors``, and to a file beside ``output`` with
            the suffix ``.err``; else it is among the rest, in the order printed.
        limit_s: seconds after which it is ended; None: none.
        stop_s: seconds that it may take to end when it is told to.
        cwd: folder to run in; None: the current one.
        env: whole environment; None: that of this process.
    """
    began = time.monotonic()
    with TemporaryDirectory() as folder, ExitStack() as files:
        path = output or Path(folder, "output")
        paths = [path, path.with_suffix(".err")] if errors_apart else [path]
        streams = [files.enter_context(path.open("w+b")) for path in paths]
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1] if errors_apart else subprocess.STDOUT,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            code = process.returncode
            _end(process, stop_s)
        seconds = time.monotonic() - began
        texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in streams]
    return Ended(code, seconds, *(text.decode("utf-8", "replace") for text in texts))


def _end(process: subprocess.Popen[bytes], stop_s: float) -> None:
    """Tell the processes of a group to end, and kill what is left of them."""
    try:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(stop_s)
    finally:  # also at a second interruption, and what an ended command left running
        descendants = [] if process.returncode is not None else _descendants(process.pid)
        for number in descendants:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _descendants(leader: int) -> list[int]:
    """Return the ids of a process's descendants, on Linux; the group is stopped, so that it replaces none of them."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGSTOP)
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = [leader]
    for parent in family:
        family += [child for child, of in parents.items() if of == parent]
    return family[1:]
