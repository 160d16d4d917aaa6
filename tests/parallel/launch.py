"""torchrun, with ranks that start at once: ``python tests/parallel/launch.py`` for ``python -m torch.distributed.run``.

The agent is torchrun's own, and every rank is a process of its own and the agent's child, as ever. But a rank is a fork
of a process that the agent forks before it does anything else, and so has imported all that the agent has: much, where
tests/forks.py started it. Not for ranks that are no commands of Python.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = str(Path(__file__).resolve().parents[2])
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # see prctl(2)

sys.path.insert(0, PROJECT)

from tests import forks  # noqa: E402


def _prctl(option: int, value: Any) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


class Rank(subprocess.Popen[Any]):
    """``subprocess.Popen`` of ``python -u …``, forked."""

    origin: socket.socket
    """Leads to the process that forks."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Mapping[str, str], *others: Any) -> None:  # fmt: skip
        assert list(args[:2]) == [sys.executable, "-u"], args
        request = {"arguments": list(args[2:]), "cwd": os.getcwd(), "environment": dict(env)}
        self.origin.send(json.dumps(request).encode())
        self.pid = int(self.origin.recv(64))
        self._child_created = True


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; return it in the new process, and None here when the agent has ended."""
    while message := connection.recv(forks.LARGEST_MESSAGE):
        reading, writing = os.pipe()
        between = os.fork()
        if between:
            os.close(writing)
            os.waitpid(between, 0)  # an orphan is the agent's child from now on
            connection.send(os.read(reading, 64))
            os.close(reading)
            continue
        if pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        for descriptor in (reading, writing):
            os.close(descriptor)
        connection.close()
        request: dict[str, Any] = json.loads(message)
        os.setsid()  # as torchrun starts them
        _prctl(PR_SET_NAME, f"rank {request['environment']['RANK']}".encode())
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # -u
        return request
    return None


def main() -> None:
    """Fork the process that forks, and run torchrun."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    Rank.origin, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        Rank.origin.close()
        request = _serve(theirs)
        if request is None:
            os._exit(0)
        forks._leave(forks._status(request))
    theirs.close()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = Rank  # type: ignore[misc]
    # The rendezvous records who called it by inspect.stack(), which for every frame goes through all imported modules.
    inspect.getmodule = lambda *_: None  # type: ignore[assignment]
    run.main()


if __name__ == "__main__":
    main()
