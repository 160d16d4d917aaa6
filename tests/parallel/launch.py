"""torchrun, with ranks that start at once: ``python tests/parallel/launch.py`` for ``python -m torch.distributed.run``.

The agent is torchrun's own, and every rank is a process of its own and the agent's child, as ever. But it is a fork of
the agent, and so has imported all that the agent has: much, where tests/forks.py started it. Not for ranks that are no
commands of Python.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import forks

PR_SET_NAME = 15  # see prctl(2)


class Rank(subprocess.Popen[Any]):
    """``subprocess.Popen`` of ``python -u …``, forked."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Mapping[str, str], *others: Any) -> None:  # fmt: skip
        assert list(args[:2]) == [sys.executable, "-u"], args
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()  # as torchrun starts them
            ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {env['RANK']}".encode(), 0, 0, 0)
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # -u
            forks.leave(forks.become(list(args[2:]), os.getcwd(), env))
        self._child_created = True


def main() -> None:
    """Run torchrun."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = Rank  # type: ignore[misc]
    # The rendezvous records who called it by inspect.stack(), which for every frame goes through all imported modules.
    inspect.getmodule = lambda *_: None  # type: ignore[assignment]
    run.main()


if __name__ == "__main__":
    main()
