"""How a recipe is trained: one file per concept. A Python program uses the names below: see docs/library.md.

They are imported when they are used: ``import trainer`` alone loads nothing.
"""

import logging
import os
import random
from importlib import import_module
from typing import Any

# Threads of torch's operators wait for each other by spinning, GNU's OpenMP for 16 ms: where another program has one of
# the cores, they spin away the other's time. With less than a millisecond a quiet machine is as fast, and a busy one up
# to twice. OpenMP reads the variable when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# transformers imports torchao where it is installed, and torch 2.15 warns of how torchao 0.18 registers its types.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

_NAMES = {
    **dict.fromkeys(("Trained", "compose", "train"), "trainer.api"),
    **dict.fromkeys(("evaluate", "generate"), "inference.api"),
    "compare": "evidence.api",
    **dict.fromkeys(("LossOutput", "Recipe"), "trainer.recipe"),
    **dict.fromkeys(("Interrupted", "RunError", "UserError"), "trainer.errors"),
}

__all__ = list(_NAMES)  # for type checkers: __init__.pyi


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    state = random.getstate()
    found = getattr(import_module(_NAMES[name]), name)
    random.setstate(state)  # rich draws from it when it is imported
    return found


def __dir__() -> list[str]:
    return [*globals(), *_NAMES]
