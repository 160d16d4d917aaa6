"""torchrun, with ranks that start at once: ``python tests/parallel/launch.py`` for ``python -m torch.distributed.run``.

The agent is torchrun's own, and every rank is a process of its own, as ever. But ranks are started by tests/forks.py,
whose server the agent forks before it does anything else: it has imported all that the agent has. Not for ranks that
are no commands of Python.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, util
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import forks


def fork_server(path: str, arguments: Sequence[str], descriptors: list[int]) -> int:
    """Fork what multiprocessing would start anew."""
    if pid := os.fork():
        return pid
    for descriptor in {*range(3, 256)} - {*descriptors}:
        os.closerange(descriptor, descriptor + 1)
    try:
        forkserver.main(*descriptors, [])
    finally:
        os._exit(0)


def main() -> None:
    """Start the server, and run torchrun."""
    util.spawnv_passfds = fork_server
    forks.start_server()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = forks.Popen  # type: ignore[misc]
    # The rendezvous records who called it by inspect.stack(), which for every frame goes through all imported modules.
    inspect.getmodule = lambda *_: None  # type: ignore[assignment]
    run.main()


if __name__ == "__main__":
    main()
