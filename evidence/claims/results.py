"""The committed outcomes of claims, and what is made of them: docs/results.md, and the table in docs/claims.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from evidence.claims.claims import Claim, load, names
from evidence.claims.criteria import NOT_HERE, shown
from trainer.errors import UserError
from trainer.files import PROJECT, write_text

RESULTS = PROJECT / "results"
PAGE = Path("docs") / "results.md"
SUMMARY = Path("docs") / "claims.md"
BEGIN, END = "<!-- results: made by scripts/reproduce.py -->", "<!-- end of results -->"

Records = dict[str, dict[str, dict[str, Any]]]
"""By machine, then by claim."""
Notes = dict[str, list[str]]
"""By claim."""


def read(folder: Path = RESULTS) -> Records:
    """Return all outcomes."""
    found: Records = {}
    for path in sorted(folder.glob("*/*.json")):
        found.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def verdict(record: dict[str, Any] | None, claim: Claim) -> str:
    """Return a verdict for a list, marked where it is of an earlier version of the claim's file."""
    if record is None:
        return ""
    if record["claim_sha256"] != claim.digest:
        return f"({record['verdict']}, of an earlier file)"
    return str(record["verdict"])


def read_notes(folder: Path = RESULTS) -> Notes:
    """Return notes on claims that were added after their files were fixed."""
    path = folder / "notes.yaml"
    found: Notes = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def page(records: Records, claims: dict[str, Claim], notes: Notes) -> str:
    """Return docs/results.md."""
    lines = [
        "# Published claims, tested",
        "",
        "Made by `python scripts/reproduce.py` from `results/`; do not edit. Every criterion was fixed in the claim's",
        "file under `evidence/claims/published/` before it was run: the outcome records the file's hash and the",
        "commit. Ratios are of runs of the same seed, trained in turns, each in a fresh process: the median, and in",
        "brackets Student's 95 % interval of their geometric mean (of differences: of their mean; of quantities that",
        "are not compared: the",
        "lowest and the highest). A ratio is CONFIRMED when the whole interval keeps the bounds, REFUTED when all of",
        "it breaks them, INCONCLUSIVE when it straddles one. Bounds on a quantity that is not compared have to hold",
        "for every run. `within` is an equivalence test: [comparing.md](comparing.md). A claim is REFUTED where one",
        "criterion is, CONFIRMED where all are; those without bounds, or about arms that a machine cannot run, do not",
        "count.",
        "",
    ]
    for machine, outcomes in records.items():
        lines += [f"- `{machine}`: {_machine(outcomes)}"]
    for name, claim in claims.items():
        lines += ["", f"## {name}", "", f"> {claim.statement}", "", f"{claim.source}."]
        if claim.published:
            lines += [f"Published: {claim.published}."]
        if claim.label:
            lines += [f"**{claim.label[0].upper()}{claim.label[1:]}.**"]
        if claim.traps:
            lines += ["", *(f"- Trap: {trap}" for trap in claim.traps)]
        if name in notes:
            lines += ["", *(f"- Note, after the file was fixed: {note}" for note in notes[name])]
        tested = {machine: outcomes[name] for machine, outcomes in records.items() if name in outcomes}
        for machine, record in tested.items():
            lines += ["", *_outcome(machine, record, claim)]
        if not tested:
            lines += ["", "Not run yet."]
    return "\n".join(lines) + "\n"


def summary(records: Records, claims: dict[str, Claim]) -> str:
    """Return the tables of docs/claims.md, one for each machine: what has been tested there, by what decided."""
    lines: list[str] = []
    for machine, outcomes in records.items():
        lines += [*([""] if lines else []), f"On `{machine}` ({_machine(outcomes)}):", ""]
        lines += ["| claim | as published | verdict | measured (criterion) |", "|---|---|---|---|"]
        for name, claim in claims.items():
            record = outcomes.get(name)
            if record is None or record["verdict"] == NOT_HERE:
                continue
            decided = (finding for finding in record["findings"] if finding["verdict"] not in ("", NOT_HERE))
            measured = "; ".join(map(_short, decided))
            lines.append(_row((f"[{name}](results.md#{name})", claim.statement, record["verdict"], measured)))
    return "\n".join(lines)


def update(root: Path = PROJECT) -> list[Path]:
    """Write docs/results.md, and the table of docs/claims.md between two markers; return the files that changed."""
    claims = {name: load(name) for name in names()}
    records = read(root / "results")
    head, found, rest = (root / SUMMARY).read_text(encoding="utf-8").partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not (found and ended):
        raise UserError(f"{SUMMARY} has lost the line {BEGIN if not found else END}, between which the table belongs")
    wanted = {
        root / PAGE: page(records, claims, read_notes(root / "results")),
        root / SUMMARY: f"{head}{BEGIN}\n{summary(records, claims)}\n{END}{tail}",
    }
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        write_text(path, wanted[path])
    return changed


def _machine(outcomes: dict[str, dict[str, Any]]) -> str:
    record = next(iter(outcomes.values()))
    hardware = record["hardware"]
    gib = hardware["memory_bytes"] / 2**30
    flags = f", {', '.join(hardware['cpu_flags'])}" if hardware["cpu_flags"] else ""
    cores = f"{hardware['cpu_cores']} cores{flags}, " if hardware["device"] == "cpu" else ""
    torch_versions = sorted({record["hardware"]["torch"] for record in outcomes.values()})
    return f"{hardware['name']}, {cores}{gib:.0f} GiB, torch {', '.join(torch_versions)}"


def _outcome(machine: str, record: dict[str, Any], claim: Claim) -> list[str]:
    stale = "" if record["claim_sha256"] == claim.digest else " (of an earlier version of the claim's file)"
    lines = [f"**{record['verdict']}**{stale} on `{machine}`"]
    if record["verdict"] == NOT_HERE:
        return [f"{lines[0]}: needs {', '.join(record['needs'])}."] if record.get("needs") else [f"{lines[0]}."]
    commit = record["git"].get("commit", "unknown")[:10]
    lines[0] += f", {record['date']}, commit {commit}{_threads(record['hardware'])}."
    rows = ["| quantity | measured | criterion | published | |", "|---|---|---|---|---|"]
    for finding in record["findings"]:
        note = "; ".join(filter(None, (finding["verdict"], finding["note"], finding["why"])))
        cells = (finding["quantity"], shown(finding), finding["bounds"], finding["published"], note)
        rows.append(_row(cells))
    lines += ["", *rows, ""]
    lines += record["why"]
    lines += [f"Without the arm {name} ({why})." for name, why in record.get("left_out", {}).items()]
    if record.get("needs"):
        lines += [f"A part of it needs {', '.join(record['needs'])}."]
    lines += [f"Failed: {failure}." for failure in record.get("failures", [])]
    return lines


def _short(finding: dict[str, Any]) -> str:
    """Return the measure with its arms, or their number; the page has all of them."""
    criterion = finding["criterion"]
    compared, sign = (criterion.get("over"), "/") if criterion.get("over") else (criterion.get("minus"), " − ")
    names = ", ".join(criterion["arm"]) if len(criterion["arm"]) < 3 else f"{len(criterion['arm'])} arms"
    if compared:
        names = f"{names}{sign}{compared[0]}" if len(compared) == 1 else f"mean of {len(compared)} ratios"
    return f"{criterion['measure'].replace('_', ' ')} {names}: {shown(finding)} ({finding['bounds']})"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _threads(hardware: dict[str, Any]) -> str:
    """Return the number of threads where it is not one for every core."""
    count = hardware["threads"]
    usual = hardware["device"] != "cpu" or count == hardware["cpu_cores"]
    return "" if usual else f", {count} thread{'s' * (count != 1)}"
