"""What was measured, in files that only grow: a line of ``results/<machine>/*.jsonl`` is a result with its origin."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from evidence.claims.reproduce import machine_name
from trainer.files import PROJECT
from trainer.hardware import Hardware
from trainer.run.provenance import git_facts

RESULTS = PROJECT / "results"
BENCH, CERTIFICATES, COMPARISONS, KERNELS = (
    f"{kind}.jsonl" for kind in ("bench", "certificates", "comparisons", "kernels")
)
OLD_DAYS = 2
"""Days before its machine's newest result from which on a result is called old."""

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
    found = sorted(RESULTS.glob(f"*/{name}"))
    return {path.parent.name: list(map(json.loads, path.read_text(encoding="utf-8").splitlines())) for path in found}


def origin(result: Result, newest: str) -> str:
    """Return a result's date and commit, and what is against it.

    Args:
        result: a line of a file.
        newest: date of its machine's newest result.
    """
    days = (datetime.date.fromisoformat(newest) - datetime.date.fromisoformat(result["date"])).days
    notes = [result["date"], f"{result['commit'][:9]}{' with changes' * (result.get('dirty') == 'true')}"]
    if "page" in result:
        notes.append(FROM_A_PAGE)
    notes += [result["note"]] if "note" in result else []
    notes += [f"{days} days older than the newest"] if days >= OLD_DAYS else []
    return ", ".join(notes)


def newest(results: list[Result]) -> str:
    """Return the date of the newest result."""
    return max((str(result["date"]) for result in results), default="")
