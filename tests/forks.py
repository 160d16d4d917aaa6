"""Processes of Python that start at once: forked from multiprocessing's server, which has imported everything.

``Popen`` and ``run`` stand for those of ``subprocess`` where the command is ``[sys.executable, …]`` with a script, with
``-m module`` or with ``-c code``, also after ``-u`` or ``-P``. What runs is a process of its own, with its own signals,
standard streams, folder, environment and exit status; only the seconds of importing are saved, and what
``tests.shortcuts`` saves. Not for tests of start-up itself, nor of environment variables that are read while a library
is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, CompletedProcess, TimeoutExpired
from typing import Any

import pytest

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CalledProcessError", "CompletedProcess", "Popen", "TimeoutExpired", "run"]

PROJECT = Path(__file__).resolve().parents[1]
PR_SET_NAME = 15  # see prctl(2)
SERVER = forkserver.ForkServer()  # multiprocessing's own is that of the product's loading processes
SERVER.set_forkserver_preload(["tests.preloaded"])


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` whose process is a fork of the server, which waits for it and reports its end."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Mapping[str, str] | None, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int,
                       p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
                       *others: Any) -> None:  # fmt: skip
        assert args[0] == sys.executable, f"only for commands of this Python: {args}"
        streams = [number if own == -1 else own for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        environment = dict(os.environ if env is None else env)
        command = Command([str(word) for word in args[1:]], str(cwd or Path.cwd()), environment, bool(others[5]))
        try:
            start_server()
            self._end, begin = SERVER.connect_to_new_process(streams)
            with open(begin, "wb") as pipe:
                pickle.dump({}, pipe)  # multiprocessing has nothing to prepare
                pickle.dump(command, pipe)
            self.pid = forkserver.read_signed(self._end)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended(0)

    def _wait(self, timeout: float | None) -> int:
        if self._ended(timeout) is None:
            raise TimeoutExpired(self.args, timeout or 0)
        return int(self.returncode)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    self.returncode = forkserver.read_signed(self._end)
                    os.close(self._end)
        return self.returncode


@functools.cache
def start_server() -> None:
    """Start it, unless it runs."""
    # The server has the path of modules from its environment: what it imports is from where the tests are.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        SERVER.ensure_running()


def run(
    command: list[str], *, capture_output: bool = False, check: bool = False, timeout: float | None = None, **given: Any
) -> CompletedProcess[Any]:
    """Do what ``subprocess.run`` does."""
    if capture_output:
        given |= {"stdout": PIPE, "stderr": PIPE}
    with Popen(command, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


if sys.platform != "linux":  # elsewhere a fork of a process with this many libraries is not safe
    Popen, run = subprocess.Popen, subprocess.run  # type: ignore[misc,assignment]


# --- in the new process


@dataclass
class Command:
    """``python words…``; stands for the process of multiprocessing that the server would begin."""

    words: list[str]
    cwd: str
    environment: dict[str, str]
    session: bool

    def _bootstrap(self, parent_sentinel: int) -> None:
        for number, stream in enumerate(forkserver.get_inherited_fds()):
            os.dup2(stream, number)
            os.close(stream)
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # that of the tests
        # The server's own would take the new ones, perhaps pipes, for what they were.
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        if self.session:
            os.setsid()
        if rank := self.environment.get("RANK"):  # a name, by which tests find it
            ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {rank}".encode(), 0, 0, 0)
        leave(become(self.words, self.cwd, self.environment))


def become(words: list[str], cwd: str, environment: Mapping[str, str]) -> int:
    """Run ``python words…`` in this process, and return its exit status as the interpreter would."""
    import numpy as np

    np.random.seed()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    first, *rest = words
    sys.orig_argv = [sys.executable, *words]
    searched = cwd
    if first == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        first, *rest = rest
    if first == "-P":  # the current folder is not searched
        searched, (first, *rest) = str(PROJECT), rest
    sys.path.insert(0, str(PROJECT))
    try:
        if first == "-m":
            sys.path[0], sys.argv = searched, ["-m", *rest[1:]]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.path[0], sys.argv = "", ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            assert not first.startswith("-"), f"python {first} is not known here"
            sys.path[0], sys.argv = str(Path(first).resolve().parent), [first, *rest]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def leave(status: int) -> None:
    """End as the interpreter does, but for the objects of all modules, which to free one by one takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
