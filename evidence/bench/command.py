"""The command line of scripts/bench.py."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from evidence.bench.bench import MEASUREMENTS
from trainer.config.options import parse
from trainer.errors import UserError, nearest
from trainer.hardware import Hardware, detect


@dataclass
class BenchOptions:
    """Of the command line."""

    only: list[str] = field(default_factory=list)
    repeats: int = 5
    device: str = "auto"
    json: str = ""


def main(arguments: list[str]) -> int:
    """Run the requested measurements; print the rows of each as soon as they are available."""
    options, _ = parse(arguments, BenchOptions)
    if unknown := [name for name in options.only if name not in MEASUREMENTS]:
        raise UserError(
            f"only={unknown[0]} is not a measurement{nearest(unknown[0], MEASUREMENTS)} ({', '.join(MEASUREMENTS)})"
        )
    hardware = detect(options.device)
    facts = _machine(hardware)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"median of {options.repeats} repeats (lowest to highest); compared loops alternate in one process")
    rows = []
    for name in options.only or MEASUREMENTS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mantissa-bench-") as folder:
            found = MEASUREMENTS[name](hardware, options.repeats, Path(folder))
        print(f"\n{name} ({time.monotonic() - began:.0f} s)")
        for row in found:
            print(row.text())
        rows += found
    if options.json:
        content = {"machine": facts, "repeats": options.repeats, "rows": [row.to_dict() for row in rows]}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _machine(hardware: Hardware) -> dict[str, object]:
    """Return what the figures depend on; ``load`` is that of all processes over the last minute."""
    facts = hardware.facts()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {key: facts[key] for key in ("name", "device", "cpu_cores", "threads", "torch", "python")} | {"load": load}
