"""scripts/train.py that ends itself with SIGKILL at the n-th event of a kind; tests/kills/harness.py starts it.

python tests/kills/killed.py <kind>:<n>:<rank> <file> <override> …   n = 0 counts the events into the file, to the end
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from trainer.run.command import main

CHANGES = ("os.mkdir", "os.rename", "os.link", "os.truncate")
REMOVALS = ("os.remove", "os.rmdir", "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KINDS = ("file", "removing", "export", "artifact", "evaluation", "accumulation")


def kinds_of(event: str, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """Return which kinds of events an audit event of Python is: it comes right before the system call."""
    writes = event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES)
    if not writes and event not in REMOVALS:
        return ()
    kinds = {
        "removing": not writes,
        "export": writes and "best" in str(arguments[0]),
        "artifact": "mlartifacts" in str(arguments),  # of a store on this machine, links among them
    }
    return "file", *(kind for kind, is_one in kinds.items() if is_one)


def install(kind: str, limit: int, counts: Path) -> None:
    """Count the events of every kind, and end at number ``limit`` of this one."""
    seen: Counter[str] = Counter()

    def note(kinds: tuple[str, ...]) -> None:
        seen.update(kinds)
        if limit and kind in kinds and seen[kind] >= limit:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, arguments: note(kinds_of(event, arguments)))
    register_module_forward_pre_hook(lambda module, _: note(("accumulation" if module.training else "evaluation",)))
    if not limit:
        atexit.register(lambda: counts.write_text(json.dumps(seen)))


if __name__ == "__main__":
    kind, limit, rank = sys.argv.pop(1).split(":")
    counts = Path(sys.argv.pop(1))
    if os.environ.get("RANK", "0") == rank:
        install(kind, int(limit), counts)
    sys.exit(main())
