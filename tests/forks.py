"""Processes of Python that start at once: forked from a server that has imported torch and everything else.

``Popen`` and ``run`` stand for those of ``subprocess`` where the command is ``[sys.executable, …]`` with a script, with
``-m module`` or with ``-c code``. ``monkeypatch.setattr("mantissa.verdict.shell.subprocess", forks)`` lets a
command start its own that way. What runs is a process of its own, with its own signals, standard streams, folder,
environment and exit status; only the seconds of importing are saved, and what ``tests.shortcuts`` saves. Not for tests
of start-up itself, of another copy of the project, or of environment variables that are read while a library is
imported, other than ``READ_EARLY``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, CompletedProcess, TimeoutExpired
from typing import Any

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CalledProcessError", "CompletedProcess", "Popen", "TimeoutExpired", "run"]

PROJECT = Path(__file__).resolve().parents[1]
READ_EARLY = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_HOME", "PYTHONPATH")
"""What libraries read while they are imported; there is a server for each combination of values."""
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.run",
    "transformers.models.gpt2.modeling_gpt2",
    "trainer.run.command",
    "trainer.tracking.models",
    "trainer.config.build",
    "trainer.run.start",
    "recipes.bert",
    "recipes.gpt2",
    "recipes.llama",
    "recipes.resnet",
    "recipes.t5",
)
LARGEST_MESSAGE = 1 << 18


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` whose process is a fork of the server, which waits for it and reports its end."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *others: Any) -> None:  # fmt: skip
        assert args[0] == sys.executable, f"only for commands of this Python: {args}"
        environment = dict(os.environ if env is None else env)
        early = {name: environment.get(name) for name in READ_EARLY}
        early["PYTHONPATH"] = early["PYTHONPATH"] or str(PROJECT)  # what it imports is from where the tests are
        self._server = _server(tuple(early.items()))
        streams = [number if own == -1 else own for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = self._server.start(
                [str(each) for each in args[1:]], str(cwd or Path.cwd()), environment, streams, bool(others[5])
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid, 0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid, timeout)
        if self.returncode is None:
            raise TimeoutExpired(self.args, timeout or 0)
        return self.returncode


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


class Server:
    """The process that has imported everything, seen from the tests."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.forks", str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=PROJECT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket = ours
        self._lock = threading.RLock()
        self._ended: dict[int, int] = {}
        self._started: list[int] = []
        atexit.register(self.close)

    def start(
        self, arguments: list[str], cwd: str, environment: Mapping[str, str], streams: list[int], session: bool
    ) -> int:
        """Start ``python arguments…``, maybe in a session of its own, and return its process id."""
        request = {"arguments": arguments, "cwd": cwd, "environment": environment, "session": session}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            while not self._started:
                self._receive(None)
            return self._started.pop()

    def ended(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit status, as ``Popen.returncode``; None: it is still running after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                while self._receive(0):
                    pass
                if pid in self._ended:
                    return self._ended.pop(pid)
                left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
                if left <= 0:
                    return None
                self._receive(left)  # another thread that waits has its turn after that

    def _receive(self, timeout: float | None) -> bool:
        if not select.select([self._socket], [], [], timeout)[0]:
            return False
        message = self._socket.recv(LARGEST_MESSAGE)
        assert message, "the server of tests/forks.py has ended"
        kind, pid, status = json.loads(message)
        if kind == "started":
            self._started.append(pid)
        else:
            self._ended[pid] = status
        return True

    def close(self) -> None:
        """End it, and with it what it has started."""
        self._socket.close()
        self._process.wait()


@functools.cache
def _server(early: tuple[tuple[str, str | None], ...]) -> Server:
    environment = {name: value for name, value in os.environ.items() if name not in READ_EARLY}
    return Server(environment | {name: value for name, value in early if value is not None})


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; return it in the new process, and None in the server when the tests have ended."""
    alive: set[int] = set()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for pytest, which then closes the connection
    while True:
        ready, _, _ = select.select([connection, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            for pid in list(alive):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    alive.remove(pid)
                    connection.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())
        if connection not in ready:
            continue
        message, streams, _, _ = socket.recv_fds(connection, LARGEST_MESSAGE, 3)
        if not message:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            connection.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for descriptor in (wake, woken, *streams):
                os.close(descriptor)
            request: dict[str, Any] = json.loads(message)
            if request["session"]:
                os.setsid()
            return request
        alive.add(pid)
        for stream in streams:
            os.close(stream)
        connection.send(json.dumps(["started", pid, 0]).encode())


def _become(request: dict[str, Any]) -> None:
    """Run ``python arguments…`` in this process."""
    import numpy as np

    np.random.seed()
    # The server's own would take the new ones, perhaps pipes, for what they were.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    first, *rest = request["arguments"]
    sys.orig_argv = [sys.executable, first, *rest]
    searched = request["cwd"]
    if first == "-P":  # the current folder is not searched
        searched, (first, *rest) = str(PROJECT), rest
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


def main() -> None:
    """Serve the tests."""
    for name in IMPORTED:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from tests import shortcuts
    from tests.composing import compose_quickly
    from trainer.config import compose
    from trainer.tracking import store as mlflow_store

    compose_quickly()
    shortcuts.take()
    for recipe in sorted(path.stem for path in (compose.CONF / "recipe").glob("*.yaml")):
        compose.compose([f"recipe={recipe}"])  # imports them all, reads conf/, and the parser learns its grammar
    get_checkpoint_conversion_mapping("gpt2")  # compiles a thousand expressions
    mlflow_store.import_mlflow("sqlite:///x")
    import mlflow.models  # noqa: F401
    import sqlalchemy.dialects.sqlite  # noqa: F401

    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    _leave(0 if request is None else _status(request))


def _status(request: dict[str, Any]) -> int:
    """Run what is asked for, and return its exit status as the interpreter would."""
    try:
        _become(request)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _leave(status: int) -> None:
    """End as the interpreter does, but for the objects of all modules, which to free one by one takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
