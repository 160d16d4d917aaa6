"""Measure the project's performance targets, as ratios from one run: ``python benchmarks/bench.py``.

  only=memory,precision   run only these measurements (default: all):
                          precision, kernels, trainer, peers, nanogpt_steps, optimizers, diagnostics, memory, max_batch,
                          startup, parallel, documented
  repeats=5               repeats; the median is shown; with one repeat nothing is kept
  device=auto             as for train.py
  modes=fp16              precisions to measure although their matmuls are too slow here
  text=FILE               text for nanogpt_steps, such as tinyshakespeare's; else Python's library
Each row is printed as soon as it is known, and replaces the earlier one in results/MACHINE.json, from which
``python benchmarks/results.py`` fills the tables. A measurement that fails is named, and the others go on.
Exit code: 0, 1 when a measurement fails, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import nanogpt, overhead, peers, ratios, results
from benchmarks.rows import Bench, Row
from mantissa.display import duration
from mantissa.formats import BASIC
from trainer.config.options import parse, run
from trainer.errors import UserError, nearest
from trainer.hardware import detect

MEASUREMENTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "precision": ratios.precision,
    "kernels": ratios.fp32_kernels,
    "trainer": overhead.trainer_cost,
    "peers": peers.peers,
    "nanogpt_steps": nanogpt.nanogpt_steps,
    "optimizers": ratios.optimizers,
    "diagnostics": ratios.diagnostics,
    "memory": overhead.peak_memory,
    "max_batch": ratios.max_batch,
    "startup": ratios.startup,
    "parallel": ratios.parallel,
    "documented": ratios.documented,
}


@dataclass
class BenchOptions:
    """Options of the command line."""

    only: list[str] = field(default_factory=list)
    repeats: int = 5
    device: str = "auto"
    modes: list[str] = field(default_factory=list)
    text: str = ""


def main(arguments: list[str]) -> int:
    """Run the requested measurements, print each row as soon as it is known; return 1 where a measurement failed."""
    options, _ = parse(arguments, BenchOptions)
    for option, given, known in (("only", options.only, MEASUREMENTS), ("modes", options.modes, BASIC)):
        if unknown := [name for name in given if name not in known]:
            raise UserError(f"{option}={unknown[0]} is unknown{nearest(unknown[0], known)} ({', '.join(known)})")
    if options.text and not Path(options.text).is_file():
        raise UserError(f"text={options.text}: there is no such file")
    hardware = detect(options.device)
    facts = {name: hardware.facts()[name] for name in ("name", "device", "cpu_cores", "threads", "torch", "python")}
    print(", ".join(f"{key} {value}" for key, value in (facts | {"load": os.getloadavg()[0]}).items()))
    print(f"median of {options.repeats} repeats (lowest to highest); what is compared takes turns")
    command = " ".join(["python benchmarks/bench.py", *arguments])
    failed: dict[str, str] = {}
    for name in options.only or MEASUREMENTS:
        began = time.monotonic()
        print(f"\n{name}")
        with tempfile.TemporaryDirectory(prefix="mantissa-bench-") as folder:
            bench = Bench(hardware, options.repeats, Path(folder), frozenset(options.modes), options.text)
            try:
                for row in MEASUREMENTS[name](bench):
                    print(row)
                    if options.repeats > 1 and (found := row.record()):
                        print(f"      {results.keep(results.here(hardware), command, found)}")
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
        print(f"  ({duration(time.monotonic() - began)})")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__))
