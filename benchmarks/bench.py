"""Measure the project's performance targets, as ratios from one run: ``python benchmarks/bench.py``.

  only=memory,precision   run only these measurements (default: all):
                          precision, trainer, peers, nanogpt, roofline, optimizers, diagnostics, ema,
                          memory, loader, generation, evaluation, startup, saving, parallel
  repeats=5               repeats; the median is shown
  device=auto             as for train.py
  modes=fp16              precisions to measure although their matrix products are too slow here
  text=FILE               text for nanogpt and roofline, such as tinyshakespeare's; else Python's library
  json=FILE               also write all measurements to FILE
  table=FILE              also write them as a page of Markdown to FILE
Each row is printed as soon as it is known; Ctrl-C keeps what is known. A measurement that fails is named, and the
others go on.
Exit code: 0, 1 when a measurement fails, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import loading, nanogpt, overhead, peers, ratios, roofline
from benchmarks.rows import MARKDOWN, Bench, Row
from mantissa.display import duration
from mantissa.formats import BASIC
from trainer.config.options import parse, run
from trainer.errors import UserError, nearest
from trainer.hardware import detect

Result = Row | peers.SideBySide
MEASUREMENTS: dict[str, Callable[[Bench], Iterator[Result]]] = {
    "precision": ratios.precision,
    "trainer": overhead.trainer_cost,
    "peers": peers.peers,
    "nanogpt": nanogpt.nanogpt,
    "roofline": roofline.roofline,
    "optimizers": ratios.optimizers,
    "diagnostics": ratios.diagnostics_cost,
    "ema": ratios.ema_cost,
    "memory": overhead.peak_memory,
    "loader": loading.loader,
    "generation": ratios.generation,
    "evaluation": ratios.evaluation,
    "startup": ratios.startup,
    "saving": ratios.saving,
    "parallel": ratios.parallel,
}
MINUTES = (1, 10)
"""What a measurement with five repeats takes on two idle cores, from the shortest to the longest."""


@dataclass
class BenchOptions:
    """Of the command line."""

    only: list[str] = field(default_factory=list)
    repeats: int = 5
    device: str = "auto"
    modes: list[str] = field(default_factory=list)
    text: str = ""
    json: str = ""
    table: str = ""


def main(arguments: list[str]) -> int:
    """Run the requested measurements, print each row as soon as it is known; return 1 where a measurement failed."""
    options, _ = parse(arguments, BenchOptions)
    for option, given, known in (("only", options.only, MEASUREMENTS), ("modes", options.modes, BASIC)):
        if unknown := [name for name in given if name not in known]:
            raise UserError(f"{option}={unknown[0]} is unknown{nearest(unknown[0], known)} ({', '.join(known)})")
    if options.text and not Path(options.text).is_file():
        raise UserError(f"text={options.text}: there is no such file")
    for option, file in (("json", options.json), ("table", options.table)):
        if file and not Path(file).absolute().parent.is_dir():
            raise UserError(f"{option}={file}: there is no folder {Path(file).absolute().parent}; create it first")
    hardware = detect(options.device)
    facts = {name: hardware.facts()[name] for name in ("name", "device", "cpu_cores", "threads", "torch", "python")}
    facts["load"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # of all processes
    machine = ", ".join(f"{key} {value}" for key, value in facts.items())
    names = list(dict.fromkeys(options.only or MEASUREMENTS))
    low, high = (max(1, round(len(names) * minutes * options.repeats / 5)) for minutes in MINUTES)
    how = f"median of {options.repeats} repeats (lowest to highest); compared loops alternate in one process"
    results: dict[str, list[Result]] = {}
    failed: dict[str, str] = {}
    print(f"{machine}\n{how}")
    count = f"{len(names)} measurement{'s' * (len(names) > 1)}"
    print(f"{count}, roughly {low} to {high} minutes on two idle cores")
    try:
        for name in names:
            print(f"\n{name}")
            began = time.monotonic()
            results[name] = []
            with tempfile.TemporaryDirectory(prefix="mantissa-bench-") as folder:
                bench = Bench(hardware, options.repeats, Path(folder), frozenset(options.modes), options.text)
                try:
                    for result in MEASUREMENTS[name](bench):
                        results[name].append(result)
                        print(result.text())
                except Exception as error:  # the others go on
                    print(f"  {bench.failed(name, error)}")
            failed |= bench.failures
            print(f"  ({duration(time.monotonic() - began)})")
    finally:
        if options.json:
            rows = [result.to_dict() for found in results.values() for result in found]
            content = {"machine": facts, "repeats": options.repeats, "failed": failed, "rows": rows}
            Path(options.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if options.table:
            words = [argument for argument in arguments if not argument.startswith("table=")]
            head = f"# Measurements\n\n    {' '.join(['python benchmarks/bench.py', *words])}\n\n"
            head += f"The {how}. Measured on: {machine}.\n"
            Path(options.table).write_text(head + tables(results), encoding="utf-8")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return 1 if failed else 0


def tables(results: dict[str, list[Result]]) -> str:
    """Return what was measured in Markdown."""
    lines = []
    for name, found in results.items():
        lines += ["", f"## {name}", ""]
        rows = [result.markdown() for result in found if isinstance(result, Row)]
        lines += [MARKDOWN, *rows] if rows else []
        lines += [result.markdown() for result in found if not isinstance(result, Row)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(run(main, __doc__))
