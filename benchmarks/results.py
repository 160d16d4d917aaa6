"""Keep the newest value of each measurement in results/MACHINE.json, and show them: ``python benchmarks/results.py``.

  python benchmarks/results.py                         fill the tables of README.md and docs/results.md
  python benchmarks/results.py outputs/compare/NAME    first keep what a finished comparison measured,
  python benchmarks/results.py outputs/reproduce/NAME  or a tested claim

A measurement of code with uncommitted changes is not kept: others could not run it.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from trainer.config.options import run
from trainer.errors import UserError
from trainer.files import PROJECT, read_json, write_text
from trainer.hardware import Hardware, detect
from trainer.run.provenance import git_facts, versions

RESULTS = PROJECT / "results"
FRONT = "precisions"
"""The comparison that README shows."""


def machine_name(hardware: Hardware) -> str:
    """Return the name of this machine's file: the device's name; of a CPU also its bf16 instructions and cores."""
    name = re.sub(r"\((r|tm)\)|cpu @.*", "", hardware.name.lower())
    parts = [re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"]
    if not hardware.is_gpu:
        instructions = {"amx_bf16": "amx", "avx512_bf16": "avx512-bf16"}
        parts += [name for flag, name in instructions.items() if flag in hardware.cpu_flags][:1]
        parts.append(f"{hardware.cpu_cores}-cores")
    return "-".join(parts)


def keep(hardware: Hardware, command: str, measured: dict[str, dict[str, Any]]) -> str:
    """Put measurements in the place of earlier ones of the same name; return what was done, in words.

    Args:
        hardware: where they were measured.
        command: what measures them again.
        measured: by name ``value``, ``low``, ``high`` and ``unit``; a comparison's loss also has a ``verdict``.
    """
    commit = os.environ.get("MANTISSA_COMMIT")  # in a copy of the project without git
    git = {"commit": commit, "dirty": "false"} if commit else git_facts()
    if git.get("dirty") != "false":
        return "not kept: commit your changes first, so that others can run what was measured"
    path = RESULTS / f"{machine_name(hardware)}.json"
    kept = read_json(path)["measurements"] if path.exists() else {}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    origin = {"command": command, "date": today, "commit": git["commit"]}
    found = {"machine": path.stem, "hardware": hardware.facts(), "versions": versions()}
    found["measurements"] = kept | {name: values | origin for name, values in measured.items()}
    write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return f"kept in {path.relative_to(PROJECT)}"


def value(interval: dict[str, float], unit: str) -> dict[str, Any]:
    """Return an interval as it is kept."""
    return {"value": interval["mean"], "low": interval["low"], "high": interval["high"], "unit": unit}


def read_folder(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the command that a folder is of, and what it measured. Raises UserError: it holds no such thing."""
    if (path := folder / "claim.json").is_file():
        found = read_json(path)
        return found["command"], {f"{found['claim']}: {row.pop('quantity')}": row for row in found["findings"]}
    if not (path := folder / "comparison.json").is_file():
        raise UserError(f"{folder} holds no finished comparison and no claim; name outputs/compare/NAME, for example")
    found, measured = read_json(path), dict[str, dict[str, Any]]()
    for arm in found["arms"]:
        name = f"{found['name']}, {arm['label']} / {found['baseline']}"
        for quantity in ("speed", "memory"):
            if ratio := arm[quantity]["ratio"]:
                measured[f"{name}, {quantity}"] = value(ratio, "x")
        if test := arm["quality"]["test"]:
            percent = {end: 100 * test["difference"][end] for end in ("mean", "low", "high")}
            measured[f"{name}, validation loss"] = value(percent, "%") | {"verdict": test["verdict"]}
    return found["command"], measured


def shown(found: dict[str, Any] | None) -> str:
    """Return a measurement in a cell of a table."""
    if found is None:
        return ""
    numbers = (found[end] for end in ("value", "low", "high"))
    middle, low, high = (f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}" for number in numbers)
    unit = found["unit"] if found["unit"] in ("", "x") else f" {found['unit']}"
    interval = f" [{low}, {high}]" if low != high else ""
    return f"{middle}{unit}{interval} {found.get('verdict', '')}".strip()


def blocks() -> dict[Path, str]:
    """Return the table of each page."""
    machines = [read_json(path) for path in sorted(RESULTS.glob("*.json"))]
    front = ["| machine | precision | speed over fp32 | memory | validation loss |", "|---|---|---|---|---|"]
    for machine in machines:
        of = machine["measurements"]
        for arm in dict.fromkeys(name.split(", ")[1] for name in of if name.startswith(f"{FRONT}, ")):
            cells = [shown(of.get(f"{FRONT}, {arm}, {what}")) for what in ("speed", "memory", "validation loss")]
            front.append(f"| {' | '.join((machine['machine'], arm.removesuffix(' / fp32'), *cells))} |")
    every = ["| measurement | published | " + " | ".join(machine["machine"] for machine in machines) + " |"]
    every.append("|---|---|" + "---|" * len(machines))
    for name in sorted({name for machine in machines for name in machine["measurements"]}):
        own = [machine["measurements"].get(name) for machine in machines]
        published = next((one["published"] for one in own if one and "published" in one), "")
        every.append(f"| {' | '.join((name, published, *map(shown, own)))} |")
    return {PROJECT / "README.md": "\n".join(front), PROJECT / "docs" / "results.md": "\n".join(every)}


def filled(page: str, table: str) -> str:
    """Return the text of a page with a table between its two markers."""
    begin, end = "<!-- results: made by benchmarks/results.py -->", "<!-- end of results -->"
    return f"{page.partition(begin)[0]}{begin}\n{table}\n{end}{page.partition(end)[2]}"


def main(arguments: list[str]) -> int:
    """Keep what was measured in these folders, and fill the blocks."""
    for folder in arguments:
        command, measured = read_folder(Path(folder))
        print(keep(detect("auto"), command, measured))
    for path, table in blocks().items():
        write_text(path, filled(path.read_text(encoding="utf-8"), table))
    return 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__))
