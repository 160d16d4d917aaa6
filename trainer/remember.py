"""What was measured of a machine once, and holds for every later run on it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.files import write_json
from trainer.hardware import Hardware

T = TypeVar("T")


def cache_folder() -> Path:
    """Return where the project keeps what it can make again: ``$MANTISSA_CACHE``, or ``~/.cache/mantissa``."""
    return Path(os.environ.get("MANTISSA_CACHE") or "~/.cache/mantissa").expanduser()


def remembered(kind: str, of: dict[str, Any], work: Callable[[], T]) -> T:
    """Return what ``work`` returned when it was first called for ``kind`` and ``of``, here or in an earlier process.

    Where the cache cannot be read or written, it is worked out every time.

    Args:
        kind: the name of a folder in the cache.
        of: everything that the result depends on, as JSON.
        work: returns JSON.

    """
    of = json.loads(json.dumps(of, sort_keys=True))
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_folder() / kind / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["of"] == of:
            result: T = known["result"]
            return result
    result = work()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"of": of, "result": result})
    return result


def processor(hardware: Hardware) -> dict[str, Any]:
    """Return what decides which kernels torch's CPU libraries choose, as a part of ``of``."""
    variables = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_DEFAULT_FPMATH_MODE")
    return {
        "cpu": hardware.name,
        "flags": sorted(hardware.cpu_flags),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }
