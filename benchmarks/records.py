"""What was measured, in files that only grow: a line of ``results/<machine>/*.jsonl`` is a result with its origin."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from evidence.claims.reproduce import machine_name
from evidence.claims.results import newest, when
from trainer.files import PROJECT
from trainer.hardware import Hardware
from trainer.run.provenance import git_facts

RESULTS = PROJECT / "results"
ADVICE, BENCH, CERTIFICATES, COMPARISONS, KERNELS, RESUMES = (
    f"{kind}.jsonl" for kind in ("advice", "bench", "certificates", "comparisons", "kernels", "resumes")
)
SIMULATION = "simulation"
"""Holds what was simulated, in the place of a machine."""
FROM_A_PAGE = "from the page"
"""Says that a result is known from an earlier page alone."""

Result = dict[str, Any]


def append(name: str, command: str, hardware: Hardware, content: Result) -> Path:
    """Add a result to a file of its machine, with the command, date, commit and hardware; return the file."""
    git = git_facts()
    origin = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git.get("commit", "unknown"),
        "dirty": git.get("dirty"),
        "hardware": hardware.facts(),
    }
    return add_line(RESULTS / machine_name(hardware) / name, content | origin)


def add_line(path: Path, result: Result) -> Path:
    """Append a result to a file, which is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False) + "\n")
    return path


def read(name: str) -> dict[str, list[Result]]:
    """Return the results of each machine that has such a file, in the order measured."""
    found = sorted(path for path in RESULTS.glob(f"*/{name}") if path.parent.name != SIMULATION)
    return {path.parent.name: list(map(json.loads, path.read_text(encoding="utf-8").splitlines())) for path in found}


def origin(result: Result) -> str:
    """Return a result's date, commit and age, and what is against it."""
    said = when(result["date"], result.get("git", result), newest(RESULTS))
    against = [FROM_A_PAGE] * ("page" in result) + ([result["note"]] if "note" in result else [])
    return ", ".join([said, *against])
