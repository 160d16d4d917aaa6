"""Measure the project's performance targets, as ratios from one run: ``python benchmarks/bench.py``.

  only=memory,precision   run only these measurements (default: all):
                          precision, trainer, peers, nanogpt, roofline, optimizers, diagnostics, ema,
                          memory, loader, startup, saving, parallel
  repeats=5               repeats; the median is shown
  device=auto             as for train.py
  modes=fp16              precisions to measure although their matrix products are too slow here
  text=FILE               text for nanogpt and roofline, such as tinyshakespeare's; else Python's library
  table=FILE              also write what was measured as a page of Markdown to FILE
Each row is printed as soon as it is known. A measurement that fails is named, and the others go on.
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

from rich.console import Console

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
    "startup": ratios.startup,
    "saving": ratios.saving,
    "parallel": ratios.parallel,
}


@dataclass
class BenchOptions:
    """Of the command line."""

    only: list[str] = field(default_factory=list)
    repeats: int = 5
    device: str = "auto"
    modes: list[str] = field(default_factory=list)
    text: str = ""
    table: str = ""


def main(arguments: list[str]) -> int:
    """Run the requested measurements, print each row as soon as it is known; return 1 where a measurement failed."""
    options, _ = parse(arguments, BenchOptions)
    for option, given, known in (("only", options.only, MEASUREMENTS), ("modes", options.modes, BASIC)):
        if unknown := [name for name in given if name not in known]:
            raise UserError(f"{option}={unknown[0]} is unknown{nearest(unknown[0], known)} ({', '.join(known)})")
    if options.text and not Path(options.text).is_file():
        raise UserError(f"text={options.text}: there is no such file")
    if not Path(options.table).absolute().parent.is_dir():
        raise UserError(f"table={options.table}: there is no such folder; create it first")
    hardware = detect(options.device)
    facts = {name: hardware.facts()[name] for name in ("name", "device", "cpu_cores", "threads", "torch", "python")}
    machine = ", ".join(f"{key} {value}" for key, value in (facts | {"load": os.getloadavg()[0]}).items())
    how = f"median of {options.repeats} repeats (lowest to highest); compared loops alternate in one process"
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{machine}\n{how}")
    page = [f"# Measurements\n\n    python benchmarks/bench.py {' '.join(arguments)}\n"]
    page.append(f"The {how}. Measured on: {machine}.")
    failed: dict[str, str] = {}
    for name in options.only or MEASUREMENTS:
        began = time.monotonic()
        console.print(f"\n{name}")
        results: list[Result] = []
        with tempfile.TemporaryDirectory(prefix="mantissa-bench-") as folder, console.status("") as status:
            bench = Bench(
                hardware, options.repeats, Path(folder), status.update, frozenset(options.modes), options.text
            )
            try:
                for result in MEASUREMENTS[name](bench):
                    results.append(result)
                    console.print(result.text())
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
        console.print(f"  ({duration(time.monotonic() - began)})")
        page += ["", f"## {name}", "", *_markdown(results)]
        if options.table:
            Path(options.table).write_text("\n".join(page) + "\n", encoding="utf-8")
    for name, why in failed.items():
        console.print(f"failed: {name}: {why}")
    return 1 if failed else 0


def _markdown(results: list[Result]) -> list[str]:
    heading = [MARKDOWN] if any(isinstance(result, Row) for result in results) else []
    return heading + [result.markdown() for result in results]


if __name__ == "__main__":
    sys.exit(run(main, __doc__))
