"""Measure what this project promises, as ratios from one run: ``python scripts/bench.py``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.bench import MEASUREMENTS, Row
from trainer.errors import RunError
from trainer.hardware import Hardware, detect


def machine(hardware: Hardware) -> dict[str, object]:
    """Return what the figures depend on; the load is that of other work, in processes, over the last minute."""
    facts = hardware.facts()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {key: facts[key] for key in ("name", "device", "cpu_cores", "threads", "torch", "python")} | {"load": load}


def measure(names: list[str], hardware: Hardware, repeats: int) -> list[Row]:
    """Run the measurements, showing each one's rows as soon as they are there."""
    rows: list[Row] = []
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mantissa-bench-") as folder:
            found = MEASUREMENTS[name](hardware, repeats, Path(folder))
        print(f"\n{name} ({time.monotonic() - began:.0f} s)")
        for row in found:
            print(row.text(), flush=True)
        rows += found
    return rows


def main() -> int:
    """Parse the command line, measure, and turn errors into exit codes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median is shown (default: 5)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps (default: auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} must be at least 1")
    try:
        hardware = detect(options.device)
        facts = machine(hardware)
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        print(f"median of {options.repeats} repeats (lowest to highest); what is compared takes turns in one process")
        rows = measure(options.only, hardware, options.repeats)
        if options.json:
            content = {"machine": facts, "repeats": options.repeats, "rows": [row.to_dict() for row in rows]}
            options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
