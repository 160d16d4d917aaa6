"""The command line of scripts/bench.py."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from evidence.bench.bench import MEASUREMENTS
from evidence.bench.measurement import Bench, Result, StatusLine
from evidence.bench.turns import MARKDOWN, Row
from mantissa.display import duration
from mantissa.formats import BASIC
from trainer.config.options import parse
from trainer.errors import UserError, nearest
from trainer.hardware import Hardware, detect

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
    _check("only", options.only, list(MEASUREMENTS), "measurement")
    _check("modes", options.modes, list(BASIC), "mode")
    if options.text and not Path(options.text).is_file():
        raise UserError(f"text={options.text}: there is no such file")
    for option, file in (("json", options.json), ("table", options.table)):
        if file and not Path(file).absolute().parent.is_dir():
            raise UserError(f"{option}={file}: there is no folder {Path(file).absolute().parent}; create it first")
    hardware = detect(options.device)
    facts = _machine(hardware)
    names = list(dict.fromkeys(options.only or MEASUREMENTS))
    results: dict[str, list[Result]] = {}
    failed: dict[str, str] = {}
    with StatusLine(Console(highlight=False)) as shown:
        shown.print(", ".join(f"{key} {value}" for key, value in facts.items()))
        shown.print(f"median of {options.repeats} repeats (lowest to highest); compared loops alternate in one process")
        shown.print(_announcement(names, options.repeats))
        try:
            for number, name in enumerate(names, 1):
                shown.stage = f"{name}, {number} of {len(names)}"
                bench = Bench(hardware, options.repeats, Path(), shown.report, frozenset(options.modes), options.text)
                _measure(name, bench, results.setdefault(name, []), failed, shown)
        finally:
            if options.json:
                content = {"machine": facts, "repeats": options.repeats, "failed": failed}
                rows = [result.to_dict() for found in results.values() for result in found]
                Path(options.json).write_text(json.dumps(content | {"rows": rows}, indent=2) + "\n", encoding="utf-8")
            if options.table:
                command = " ".join(["python scripts/bench.py", *(each for each in arguments if each[:6] != "table=")])
                Path(options.table).write_text(page(command, facts, options.repeats, results), encoding="utf-8")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return 1 if failed else 0


def _measure(name: str, bench: Bench, results: list[Result], failed: dict[str, str], shown: StatusLine) -> None:
    """Print and collect what a measurement yields; a failure is named, and the others go on."""
    began = shown.clock()
    shown.print(f"\n{name}")
    shown.report("")
    try:
        with tempfile.TemporaryDirectory(prefix="mantissa-bench-") as folder:
            bench.folder = Path(folder)
            for result in MEASUREMENTS[name](bench):
                results.append(result)
                shown.print(result.text())
        if bench.complete is not None:
            raise KeyboardInterrupt
    except Exception as error:
        shown.print(f"  {bench.failed(name, error)}")
    except KeyboardInterrupt:
        if bench.complete:
            shown.print(f"  interrupted: the last rows are of the {bench.complete} repeats that were complete")
        raise
    finally:
        failed |= bench.failures
    shown.print(f"  ({duration(shown.clock() - began)})")


def page(command: str, facts: dict[str, object], repeats: int, results: dict[str, list[Result]]) -> str:
    """Return what was measured as a page of Markdown."""
    machine = ", ".join(f"{key} {value}" for key, value in facts.items())
    how = f"The median of {repeats} repeats (lowest to highest); compared loops alternate in one process."
    lines = ["# Measurements", "", f"    {command}", "", f"{how} Measured on: {machine}."]
    for name, found in results.items():
        lines += ["", f"## {name}", ""]
        rows = [result.markdown() for result in found if isinstance(result, Row)]
        lines += [MARKDOWN, *rows] if rows else []
        lines += [result.markdown() for result in found if not isinstance(result, Row)]
    return "\n".join(lines).rstrip() + "\n"


def _check(option: str, given: list[str], known: list[str], what: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"{option}={unknown[0]} is not a {what}{nearest(unknown[0], known)} ({', '.join(known)})")


def _announcement(names: list[str], repeats: int) -> str:
    """Return how many measurements there are, and how long they take."""
    low, high = (max(1, round(len(names) * minutes * repeats / 5)) for minutes in MINUTES)
    count = f"{len(names)} measurements" if len(names) > 1 else "1 measurement"
    return f"{count}, roughly {low} to {high} minutes on two idle cores"


def _machine(hardware: Hardware) -> dict[str, object]:
    """Return what the figures depend on; ``load`` is that of all processes over the last minute."""
    facts = hardware.facts()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {key: facts[key] for key in ("name", "device", "cpu_cores", "threads", "torch", "python")} | {"load": load}
