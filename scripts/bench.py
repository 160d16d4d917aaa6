"""Measure what this project promises, as ratios from one run: ``python scripts/bench.py``.

  only=memory,precision   some of the measurements (default: all)
  repeats=5               of which the median is shown
  device=auto             as for train.py
  json=FILE               also write everything measured to FILE
Exit code: 0, 2 for a mistake.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from evidence.bench.bench import MEASUREMENTS, Row
from trainer.config.options import no_more, parse, whole_number
from trainer.errors import RunError, UserError, nearest
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


def chosen(only: str) -> list[str]:
    """Return the measurements of ``only=a,b``; all of them for an empty one. Raises UserError for an unknown one."""
    names = [name.strip() for name in only.strip("[]").split(",") if name.strip()]
    if unknown := [name for name in names if name not in MEASUREMENTS]:
        raise UserError(
            f"only={unknown[0]} is no measurement{nearest(unknown[0], MEASUREMENTS)} ({', '.join(MEASUREMENTS)})"
        )
    return names or list(MEASUREMENTS)


def main() -> int:
    """Parse the command line, measure, and turn errors into exit codes."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{__doc__}\nMeasurements: {', '.join(MEASUREMENTS)}")
        return 0
    try:
        options, others = parse(sys.argv[1:], {"only": "", "repeats": "5", "device": "auto", "json": ""})
        no_more(others)
        only, repeats = chosen(options["only"]), whole_number(options, "repeats")
        hardware = detect(options["device"])
        facts = machine(hardware)
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        print(f"median of {repeats} repeats (lowest to highest); what is compared takes turns in one process")
        rows = measure(only, hardware, repeats)
        if options["json"]:
            content = {"machine": facts, "repeats": repeats, "rows": [row.to_dict() for row in rows]}
            Path(options["json"]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
