"""The committed outcomes of claims, and what is made of them: docs/results.md, and the tables of other pages."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml

from evidence import blocks
from evidence.claims.claims import NULL_ARM, PROBE, QUIET, Claim, load, names
from evidence.claims.criteria import NOT_HERE, RELATED, shown
from evidence.claims.reproduce import OUTCOMES, bf16_instructions, plain
from evidence.measures import TIMED
from evidence.runs import Outcome
from mantissa.quality import NULL_SHIFT
from trainer.config.compose import key_of
from trainer.files import PROJECT, write_text
from trainer.hardware import Hardware

RESULTS = PROJECT / "results"
PAGE = Path("docs") / "results.md"
SUMMARY = Path("docs") / "claims.md"
FRONT = Path("README.md")
SHOWN = ("bignet_memory", "half_everywhere", "clip_order")
"""The claims of the README, which have verdicts."""
UNJUDGED = "no verdict"
"""By the present file, of arms that it does not have, or without arms that it judges by."""

Record = dict[str, Any]
Records = dict[str, dict[str, list[Record]]]
"""By machine, then by claim, the newest last."""
Notes = dict[str, list[str]]
"""By claim."""
_NOT_THE_ARMS = {*map(key_of, QUIET), "profiler", "device"}
"""Options that the claim's file does not set."""


def read(folder: Path = RESULTS) -> Records:
    """Return all outcomes; the machine that could test most claims comes first."""
    found: Records = {}
    for path in sorted(folder.glob(f"*/{OUTCOMES}")):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):  # a line that was cut short is no outcome
                record = json.loads(line)
                found.setdefault(path.parent.name, {}).setdefault(record["claim"], []).append(record)

    def tested(machine: str) -> int:
        return sum(records[-1]["verdict"] != NOT_HERE for records in found[machine].values())

    return {machine: found[machine] for machine in sorted(found, key=tested, reverse=True)}


def runs_of(record: Record) -> list[Outcome]:
    """Return the runs of an outcome as far as criteria read them."""
    failures = dict(failure.split(": ", 1) for failure in record.get("failures", []))
    runs = []
    for name, arm in record.get("arms", {}).items():
        for place, shifted in enumerate(arm["seeds"]):
            seed = shifted - NULL_SHIFT * (name == NULL_ARM)
            measures = {measure: values[place] for measure, values in arm["measures"].items()}
            # JSON has no infinity: a run that ended without a loss had one that was not finite.
            measures |= {loss: math.inf for loss in ("loss", "best_loss") if measures.get(loss, 0) is None}
            summary = {"status": "FINISHED", "measures": measures}
            summary |= {"fp32_arithmetic": record.get("not_timed", {}).get(name), "hardware": record["hardware"]}
            failure = failures.get(f"{name}, seed {seed}", "")
            others = arm["others_cpu"][place] if "others_cpu" in arm else None
            runs.append(Outcome(name, seed, Path(), int(bool(failure)), failure, summary=summary, others_cpu=others))
    return runs


def machine_of(record: Record) -> Hardware:
    """Return the machine of an outcome."""
    facts = record["hardware"]
    capability = facts["capability"] and tuple(facts["capability"])
    known = (facts["name"], facts["memory_bytes"], facts["cpu_cores"], capability, frozenset(facts["cpu_flags"]))
    return Hardware(torch.device(facts["device"]), *known)


def judged(record: Record, claim: Claim) -> tuple[str, list[dict[str, Any]], str]:
    """Return verdict and findings by the claim's present file, and a remark on what an earlier file gave."""
    then, findings = record["verdict"], record.get("findings", [])
    if record["claim_sha256"] == claim.digest or then == NOT_HERE:
        return then, findings, ""
    bounds = dict.fromkeys(finding["bounds"] for finding in findings if finding["verdict"] not in ("", NOT_HERE))
    remark = f"recorded as {then} by an earlier file" + (f", with {', '.join(bounds)}" if bounds else "")
    if has_the_arms(record, claim):
        now, found = claim.judge(runs_of(record), machine_of(record))
        return now, list(map(plain, found)), remark
    now = RELATED if claim.only_related(machine_of(record)) else UNJUDGED
    left = [finding | {"verdict": NOT_HERE * (finding["verdict"] == NOT_HERE)} for finding in findings]
    return now, left, f"{remark}, of other arms"


def has_the_arms(record: Record, claim: Claim) -> bool:
    """Whether the recorded runs are those of the claim's present file, and all that decide there."""
    if not all(_is_arm(name, arm, record, claim) for name, arm in record["arms"].items()):
        return False
    lack = {*record.get("left_out", {}), *record.get("too_slow", {}), *claim.arms_lack(machine_of(record))}
    for criterion in (criterion for criterion in claim.criteria if criterion.decides):
        untested = lack | set(record.get("not_timed", {}) if criterion.measure in TIMED else ())
        if not untested & set(criterion.arms) and not record["arms"].keys() >= set(criterion.arms):
            return False
    return True


def _is_arm(name: str, arm: dict[str, Any], record: Record, claim: Claim) -> bool:
    """Whether the runs of an arm were those of the claim's present file."""
    name = claim.null_arm if name == NULL_ARM else name
    if name not in claim.arms:
        return False

    def own(words: list[str]) -> set[str]:
        return {word.removeprefix(PROBE) for word in words if key_of(word) not in {*_NOT_THE_ARMS, *claim.asks}}

    return own(claim.words(name, record["hardware"]["device"] != "cpu")) == own(arm["overrides"])


def measured(outcomes: list[Record]) -> list[Record]:
    """Return those in which something was measured, the newest first."""
    return [record for record in reversed(outcomes) if record["verdict"] != NOT_HERE]


def repeats(record: Record, earlier: list[Record]) -> bool:
    """Whether an outcome without a measurement says what the newest one says."""
    same = ("verdict", "claim_sha256", "needs", "left_out", "not_timed")
    untested = record["verdict"] == NOT_HERE
    return untested and bool(earlier) and all(record.get(key) == earlier[-1].get(key) for key in same)


def read_notes() -> Notes:
    """Return notes on claims that were added after their files were fixed."""
    found: Notes = yaml.safe_load((RESULTS / "notes.yaml").read_text(encoding="utf-8"))
    return found


def page(records: Records, claims: dict[str, Claim], notes: Notes) -> str:
    """Return docs/results.md."""
    lines = [
        "# Published claims, tested",
        "",
        "Generated by `python scripts/reproduce.py` from `results/*/claims.jsonl`; do not edit. Outcomes are only",
        "appended: all of `python scripts/reproduce.py claim=<name>` are here, the newest first, with date, commit and",
        "age relative to the newest of all. A claim's file fixes the criteria before a run, and the outcome records",
        "the file's hash. If the file has changed since, the outcome is judged again by the present file, and the",
        "recorded verdict stands beside the new one. If the file now decides by other arms, there is no verdict.",
        "",
        "An outcome has a verdict only if it tests the claim's own statement, on the hardware that the claim is about.",
        f"Otherwise it is a **{RELATED}**, with the reason instead of a verdict. On that hardware, a single published",
        "figure counts as reproduced within 20 % (40 % less: 32 to 48 % less), and a loss within 1 %.",
        "",
        "Ratios compare runs with the same seed, trained alternately, each in a fresh process. The table shows the",
        "median and, in brackets, Student's 95 % interval of the geometric mean (for differences: of the mean; for",
        "quantities that are not compared: the lowest and the highest value). Losses within 10 % of each other are",
        "shown as differences. Equal runs have no interval. A ratio is CONFIRMED if the whole interval is within the",
        "bounds, REFUTED if the whole interval is outside of them, INCONCLUSIVE if it contains a bound. Bounds on a",
        "quantity that is not compared must hold for every run. `within` is an equivalence test:",
        "[comparing.md](comparing.md). A claim is REFUTED if one of its criteria is REFUTED, CONFIRMED if all are",
        "CONFIRMED. Criteria without bounds, or about arms that a machine cannot run, do not count. An arm is one of",
        "the compared settings; null_arm is the baseline with other seeds. A caution names a known way to misread the",
        "published figure.",
        "",
    ]
    for machine, outcomes in records.items():
        lines += [f"- `{machine}`: {_machine(outcomes)}"]
    newest_of_all = newest()
    for name, claim in claims.items():
        lines += ["", f"## {name}", "", f"> {claim.statement}", "", f"{claim.source}."]
        if claim.published:
            lines += [f"Published: {claim.published}."]
        if claim.combines:
            lines += [f"Measured in {' and '.join(f'[{part}](#{part})' for part in claim.combines)}."]
        if claim.related:
            lines += [f"**Only a {RELATED}**: {claim.related}."]
        if claim.traps:
            lines += ["", *(f"- Caution: {trap}" for trap in claim.traps)]
        if name in notes:
            lines += ["", *(f"- Note, added later: {note}" for note in notes[name])]
        untested: dict[str, list[str]] = {}
        for machine, outcomes in records.items():
            for record in reversed(outcomes.get(name, [])):
                if record["verdict"] != NOT_HERE:
                    lines += ["", *_outcome(machine, record, claim, newest_of_all)]
                else:
                    untested.setdefault(_untested(record), []).append(
                        f"`{machine}` ({when(record['date'], record['git'], newest_of_all)})"
                    )
        if untested:
            lines += [""]
        lines += [f"- {NOT_HERE}, {why}: {', '.join(places)}." for why, places in untested.items()]
        if not claim.combines and not any(name in outcomes for outcomes in records.values()):
            lines += ["", "Not run yet."]
    return "\n".join(lines) + "\n"


def summary(records: Records, claims: dict[str, Claim]) -> str:
    """Return a table of claims with what decided them, a column for each machine.

    Claims that no machine could test are left out.
    """
    rows = [("claim", "as published", *map(_title, records.values())), ("---",) * (2 + len(records))]
    newest_of_all = newest()
    for name, claim in claims.items():
        here = [outcomes.get(name, []) for outcomes in records.values()]
        if any(record["verdict"] != NOT_HERE for outcomes in here for record in outcomes):
            cells = (_cell(outcomes, claim, newest_of_all) for outcomes in here)
            statement = f"{claim.statement}<br>*{claim.related}*" if claim.related else claim.statement
            rows.append((f"[{name}]({PAGE.name}#{name})", statement, *cells))
    return "\n".join(map(_row, rows))


def headlines(records: Records, claims: dict[str, Claim]) -> str:
    """Return a line for each claim: the verdict of each machine's newest outcome, counted, and the statement."""
    lines = []
    for name, claim in claims.items():
        here = [measured(outcomes.get(name, [])) for outcomes in records.values()]
        tested = [each[0] for each in here if each]
        counts = Counter((judged(each, claim)[0], each["hardware"]["device"] == "cpu") for each in tested)
        verdicts = [
            f"**{verdict}** on {count} {'CPU' if cpu else 'GPU'}{'s' * (count != 1)}"
            for (verdict, cpu), count in counts.most_common()
        ]
        lines.append(f"- {', '.join(verdicts)}, last on {max(each['date'] for each in tested)}: *{claim.statement}*")
    return "\n".join(lines)


def tables(records: Records, claims: dict[str, Claim]) -> dict[Path, str]:
    """Return what stands between the two markers of each page that shows outcomes."""
    machines = [f"- {_title(outcomes)}: `{machine}`, {_machine(outcomes)}" for machine, outcomes in records.items()]
    few = {name: claims[name] for name in SHOWN if name in claims}
    verdicts, related = (
        {name: each for name, each in claims.items() if bool(each.related) is is_} for is_ in (False, True)
    )
    kinds = [summary(records, verdicts), "", "Related measurements, with the reason why there is no verdict:", ""]
    return {
        SUMMARY: "\n".join([*kinds, summary(records, related), "", "The machines:", "", *machines]),
        FRONT: headlines(records, few),
    }


def update() -> list[Path]:
    """Write docs/results.md, and the tables of other pages between two markers; return the files that changed.

    Raises:
        UserError: a page lacks a marker.
    """
    claims = {name: load(name) for name in names()}
    records = read()
    wanted = {PROJECT / PAGE: page(records, claims, read_notes())}
    wanted |= blocks.stale({path: {"results": table} for path, table in tables(records, claims).items()})
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        write_text(path, wanted[path])
    return changed


def newest(folder: Path = RESULTS) -> str:
    """Return the date of the newest result of every kind and machine."""
    dates = (re.findall(rb'"date": "(\d{4}-\d\d-\d\d)"', path.read_bytes()) for path in folder.glob("*/*.jsonl"))
    return max(chain.from_iterable(dates), default=b"").decode()


def when(date: str, git: Mapping[str, Any], newest: str) -> str:
    """Return date, commit, and age beside the newest result of all: what every page says of every result."""
    days = (datetime.date.fromisoformat(newest or date) - datetime.date.fromisoformat(date)).days
    changed = " with changes" if git.get("dirty") == "true" else ""
    age = f", {days} day{'s' * (days != 1)} before the newest" if days else ""
    return f"{date}, {git.get('commit', 'unknown')[:9]}{changed}{age}"


def _facts(outcomes: dict[str, list[Record]]) -> list[dict[str, Any]]:
    return [record["hardware"] for records in outcomes.values() for record in records]


def _title(outcomes: dict[str, list[Record]]) -> str:
    """Return the name of a machine for the head of a column."""
    hardware = _facts(outcomes)[0]
    name = re.sub(r"\((R|TM)\)| CPU\b| Processor\b| @.*", "", hardware["name"], flags=re.IGNORECASE)
    if hardware["device"] != "cpu":
        return name
    return ", ".join(filter(None, [name, f"{hardware['cpu_cores']} cores", bf16_instructions(hardware["cpu_flags"])]))


def _cell(outcomes: list[Record], claim: Claim, newest: str) -> str:
    """Return every verdict with what was measured, the newest first, or what is missing."""
    if not (tested := measured(outcomes)):
        return f"not testable: {_untested(outcomes[-1])}" if outcomes else "not tested yet"
    cells = []
    for record in tested:
        verdict, findings, remark = judged(record, claim)
        decided = [finding for finding in findings if finding["verdict"] not in ("", NOT_HERE)]
        found = "; ".join(map(_short, decided or [finding for finding in findings if finding["values"]][:_MOST]))
        verdict = "" if claim.related else f"**{verdict}** "
        cells.append(
            f"{verdict}{found} *({'; '.join(filter(None, (remark, when(record['date'], record['git'], newest))))})*"
        )
    return "<br>".join(cells)


_MOST = 2
"""Quantities of a related measurement in a table."""


def _machine(outcomes: dict[str, list[Record]]) -> str:
    facts = _facts(outcomes)
    hardware = facts[0]
    gib = hardware["memory_bytes"] / 2**30
    flags = f", {', '.join(hardware['cpu_flags'])}" if hardware["cpu_flags"] else ""
    cores = f"{hardware['cpu_cores']} cores{flags}, " if hardware["device"] == "cpu" else ""
    torch_versions = sorted({each["torch"] for each in facts})
    return f"{hardware['name']}, {cores}{gib:.0f} GiB, torch {', '.join(torch_versions)}"


def _outcome(machine: str, record: Record, claim: Claim, newest: str) -> list[str]:
    verdict, findings, remark = judged(record, claim)
    lines = [
        f"**{verdict}**{f' ({remark})' if remark else ''} on `{machine}`, {when(record['date'], record['git'], newest)}"
    ]
    lines[0] += f"{_threads(record['hardware'])}."
    if verdict == RELATED and not claim.related:
        lines[0] += f" Without a verdict: {claim.only_related(machine_of(record)) or record['related']}."
    rows = ["| quantity | measured | criterion | published | verdict |", "|---|---|---|---|---|"]
    for finding in findings:
        if not finding["values"] and finding["verdict"] in ("", NOT_HERE):
            continue  # the reason is below
        note = "; ".join(filter(None, (finding["verdict"], finding["note"], finding["why"])))
        cells = (finding["quantity"], shown(finding), finding["bounds"], finding["published"], note)
        rows.append(_row(cells))
    lines += ["", *rows, ""] if len(rows) > 2 else []
    lines += record["why"]
    lines += _left_out(record)
    if record.get("needs"):
        lines += [f"A part of it needs {', '.join(record['needs'])}."]
    lines += [f"Failed: {failure}." for failure in record.get("failures", [])]
    return lines


def _untested(record: Record) -> str:
    """Return what was missing."""
    why = [f"needs {', '.join(record['needs'])}"] if record.get("needs") else []
    why += [f"needs {needs}" for needs in record.get("left_out", {}).values()]
    why += [*record.get("not_timed", {}).values(), *record.get("too_slow", {}).values(), *record.get("why", [])]
    return "; ".join(dict.fromkeys(why)).rstrip(".")


def _left_out(record: dict[str, Any]) -> list[str]:
    """Return a sentence for each reason why arms were not run, or not timed."""
    lacks = {name: f"needs {needs}" for name, needs in record.get("left_out", {}).items()}
    not_run = _by_reason(lacks | record.get("too_slow", {}))
    return [f"Not run, {why}: {', '.join(names)}." for why, names in not_run] + not_timed(record)


def not_timed(record: dict[str, Any]) -> list[str]:
    """Return a sentence for each reason why the speed of arms was not tested."""
    return [
        f"The speed of {', '.join(names)} is not testable: {why}."
        for why, names in _by_reason(record.get("not_timed", {}))
    ]


def _by_reason(reasons: dict[str, str]) -> list[tuple[str, list[str]]]:
    return [(why, [name for name in reasons if reasons[name] == why]) for why in dict.fromkeys(reasons.values())]


def _short(finding: dict[str, Any]) -> str:
    """Return the measure with its arms, or their number; the page has all of them."""
    criterion = finding["criterion"]
    compared, sign = (criterion.get("over"), "/") if criterion.get("over") else (criterion.get("minus"), " − ")
    names = ", ".join(criterion["arm"]) if len(criterion["arm"]) < 3 else f"{len(criterion['arm'])} arms"
    if compared:
        names = f"{names}{sign}{compared[0]}" if len(compared) == 1 else f"mean of {len(compared)} ratios"
    return f"{criterion['measure'].replace('_', ' ')} {names}: {shown(finding)}" + (
        f" ({finding['bounds']})" if finding["bounds"] else ""
    )


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _threads(hardware: dict[str, Any]) -> str:
    """Return the number of threads where it is not one for every core."""
    count = hardware["threads"]
    usual = hardware["device"] != "cpu" or count == hardware["cpu_cores"]
    return "" if usual else f", {count} thread{'s' * (count != 1)}"
