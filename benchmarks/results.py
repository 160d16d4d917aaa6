"""Keep the newest value of each measurement in results/MACHINE.json, and show them: ``python benchmarks/results.py``.

  python benchmarks/results.py                         fill the pages' tables, draw docs/images/compare.png
  python benchmarks/results.py outputs/compare/NAME    first keep what a finished comparison measured,
  python benchmarks/results.py outputs/reproduce/NAME  or a tested claim

A measurement of code with uncommitted changes is not kept: others could not run it. results/tables.yaml says which
measurements a table has, and names them and the machines in words.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import picture
from mantissa.verdict.statistics import EQUIVALENT
from trainer.config.options import run
from trainer.errors import UserError
from trainer.files import PROJECT, read_json, write_text
from trainer.hardware import Hardware
from trainer.run.provenance import git_facts, versions

RESULTS = PROJECT / "results"
Machines = dict[str, dict[str, dict[str, Any]]]
"""What was measured by its name, of each machine by its title."""


@dataclass(frozen=True)
class Origin:
    """Where and when something was measured."""

    hardware: dict[str, Any]
    """See ``Hardware.facts``."""
    versions: dict[str, Any]
    git: dict[str, str]
    """See ``git_facts``."""
    date: str

    @property
    def machine(self) -> str:
        """Name of the machine's file: the device's name; of a CPU also its bf16 instructions and cores."""
        name = re.sub(r"\((r|tm)\)|cpu @.*", "", self.hardware["name"].lower())
        parts = [re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"]
        if self.hardware["device"] == "cpu":
            instructions = {"amx_bf16": "amx", "avx512_bf16": "avx512-bf16"}
            parts += [name for flag, name in instructions.items() if flag in self.hardware["cpu_flags"]][:1]
            parts.append(f"{self.hardware['cpu_cores']}-cores")
        return "-".join(parts)


def here(hardware: Hardware) -> Origin:
    """Return the origin of what is measured now, by this checkout."""
    # In a copy of the project without git the user names the commit.
    git = {"commit": commit, "dirty": "false"} if (commit := os.environ.get("MANTISSA_COMMIT")) else git_facts()
    return Origin(hardware.facts(), versions(), git, _date(datetime.datetime.now().timestamp()))


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date().isoformat()


def keep(origin: Origin, command: str, measured: dict[str, dict[str, Any]]) -> str:
    """Put measurements in the place of earlier ones of the same name; return what was done, in words.

    Args:
        origin: where they were measured.
        command: what measures them again.
        measured: by name ``value``, ``low``, ``high`` and ``unit``; a comparison's loss also has a ``verdict`` and the
            ``margin`` that it is of.
    """
    if not origin.git:
        return "not kept: there was no git; name the commit: MANTISSA_COMMIT=…"
    if origin.git["dirty"] != "false":
        return "not kept: it was measured with uncommitted changes, which others cannot run; commit, and measure again"
    path = RESULTS / f"{origin.machine}.json"
    kept = read_json(path)["measurements"] if path.exists() else {}
    of_each = {"command": command, "date": origin.date, "commit": origin.git["commit"]}
    found = {"machine": path.stem, "hardware": origin.hardware, "versions": origin.versions}
    found["measurements"] = kept | {name: values | of_each for name, values in measured.items()}
    write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return f"kept in {path.relative_to(PROJECT)}"


def value(interval: dict[str, float], unit: str) -> dict[str, Any]:
    """Return an interval as it is kept."""
    return {"value": interval["mean"], "low": interval["low"], "high": interval["high"], "unit": unit}


def read_folder(folder: Path) -> tuple[Origin, str, dict[str, dict[str, Any]]]:
    """Return the origin and the command of a folder, and what it measured. Raises UserError: it holds no such thing."""
    path = next((path for name in ("claim.json", "comparison.json") if (path := folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder} holds no finished comparison and no claim; name outputs/compare/NAME, for example")
    found = read_json(path)
    origin = Origin(found["hardware"], found["versions"], found["git"], _date(path.stat().st_mtime))
    if "claim" in found:
        measured = {f"{found['claim']}: {row.pop('quantity')}": row for row in found["rows"]}
        return origin, found["command"], measured
    measured = {}
    for arm in found["arms"]:
        name = f"{found['name']}, {arm['label']} / {found['baseline']}"
        for quantity in ("speed", "memory"):
            if ratio := arm[quantity]["ratio"]:
                measured[f"{name}, {quantity}"] = value(ratio, "x")
        if test := arm["quality"]["test"]:
            percent = {end: 100 * test["difference"][end] for end in ("mean", "low", "high")}
            measured[f"{name}, validation loss"] = value(percent, "%") | {
                "verdict": test["verdict"],
                "margin": found["margin"],
            }
    return origin, found["command"], measured


def shown(name: str, found: dict[str, Any]) -> str:
    """Return a measurement in a cell of a table: the ratio of two losses that are near each other as a change."""
    ends, unit = [found[end] for end in ("value", "low", "high")], found["unit"]
    if unit == "x" and "loss" in name and ends[0] < 1.1:
        ends, unit = [100 * (ratio - 1) for ratio in ends], "%"
    is_change, is_large = unit == "%" and "loss" in name, abs(ends[0]) >= (10 if unit == "x" else 100)
    digits = "+z.2f" if is_change else ",.0f" if is_large else ".2f" if unit == "x" else ".3g"
    middle, low, high = (f"{end:{digits}}" for end in ends)
    interval = f"[{low}, {high}] " if low != high else ""
    return f"{middle}{' ' if unit != 'x' else ''}{unit} {interval}{found.get('verdict', '')}".replace("  ", " ").strip()


def brief(name: str, found: dict[str, Any]) -> str:
    """Return a measurement in a cell of README's table: bold with its interval, or its verdict in words."""
    cell, verdict = shown(name, found), found.get("verdict")
    if verdict == EQUIVALENT:
        return f"same within {100 * found['margin']:g} %"
    return f"{cell.partition(' [')[0]} {verdict.lower()}" if verdict else re.sub(r"^(\S+) \[", r"**\1** [", cell)


def forms(table: dict[str, Any]) -> dict[re.Pattern[str], str]:
    """Return the words of each row by the form of its measurements' names; a group in the form is the column."""
    form = table.get("form", "ROW")
    return {re.compile(form.replace("ROW", re.escape(row))): words for row, words in table["rows"].items()}


def filled_table(table: dict[str, Any], machines: Machines, cell: Callable[..., str] = shown) -> str:
    """Return a table of what was measured, without its empty rows and columns; empty where nothing was."""
    columns = dict.fromkeys([*table.get("also", []), *machines])
    rows: defaultdict[tuple[re.Pattern[str], str], dict[str, str]] = defaultdict(dict)
    named = forms(table)
    for form in named:
        for machine, measured in machines.items():
            for name, match in [(name, match) for name in measured if (match := form.fullmatch(name))]:
                column, among = (match[1], machine) if form.groups else (machine, "")
                published = {"published": measured[name].get("published", ""), "machine": among}
                rows[form, among] |= published | {column: cell(name, measured[name])}
                columns[column] = None
    if not rows:
        return ""
    used = [column for column in columns if any(row.get(column) for row in rows.values())]
    lines = [[table["head"], *used], ["---"] * (1 + len(used))]
    lines += [[named[form], *(row.get(column, "") for column in used)] for (form, _), row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_machines() -> Machines:
    """Return what was measured, by the titles of machines in their order, then by the names of other files."""
    found = {path.stem: read_json(path)["measurements"] for path in sorted(RESULTS.glob("*.json"))}
    titles = read_tables()["machines"]
    return {titles.get(name, name): found[name] for name in dict.fromkeys([*titles, *found])}


def read_tables() -> dict[str, Any]:
    """Return titles of machines, and the rows of each table with their words."""
    return dict(yaml.safe_load((RESULTS / "tables.yaml").read_text(encoding="utf-8")))


def blocks(machines: Machines) -> dict[Path, str]:
    """Return the tables of each page. What has no row is in a table of its own, by its name."""
    given = read_tables()
    front, gpu, tables = given["front"], given["gpu"], given["tables"]
    known = [form for table in [gpu, *tables] for form in forms(table)]
    names = dict.fromkeys(name for measured in machines.values() for name in measured)
    if others := [name for name in names if not any(form.fullmatch(name) for form in known)]:
        tables.append({"title": "Other measurements", "head": "", "rows": dict(zip(others, others, strict=True))})
    speeds = [name for name, words in front["rows"].items() if words.endswith("speed")]
    timed = {machine: measured for machine, measured in machines.items() if measured.keys() & set(speeds)}
    every = {table["title"]: filled_table(table, machines) for table in tables}
    on_gpu = filled_table(gpu, machines) or gpu["none"]
    pages = {
        "README.md": [filled_table(front, timed, brief), every["Other trainers"], on_gpu],
        "docs/which-precision.md": [on_gpu],
        "docs/results.md": [
            f"## {title}\n\n{table}" for title, table in ({"On a GPU": on_gpu} | every).items() if table
        ],
    }
    return {PROJECT / page: "\n\n".join(filter(None, parts)) for page, parts in pages.items()}


def filled(page: str, table: str) -> str:
    """Return the text of a page with its tables between the two markers."""
    begin, end = "<!-- results: made by benchmarks/results.py -->", "<!-- end of results -->"
    return f"{page.partition(begin)[0]}{begin}\n{table}\n{end}{page.partition(end)[2]}"


def main(arguments: list[str]) -> int:
    """Keep what was measured in these folders, fill the tables, and draw the picture."""
    for folder in arguments:
        print(keep(*read_folder(Path(folder))))
    machines = read_machines()
    for path, table in blocks(machines).items():
        write_text(path, filled(path.read_text(encoding="utf-8"), table))
    picture.draw(machines, PROJECT / "docs/images/compare.png")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__, bare=True))
