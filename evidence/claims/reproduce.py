"""Tests published claims: trains the arms of a claim, and prints the published figure beside the measured one."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from evidence.claims.claims import CONFIRMED, REFUTED, Claim, Criterion, load, names
from evidence.runs import Runner, code_digest, merge_overrides
from mantissa.verdict.judge import Ratio
from mantissa.verdict.report import percent, times
from mantissa.verdict.statistics import INCONCLUSIVE
from trainer.config.compose import compose, key_of
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.files import write_json
from trainer.hardware import Hardware, detect
from trainer.run.provenance import git_facts, versions

NOT_HERE, NO_VERDICT = "NOT TESTABLE HERE", "no verdict"
RESULT_FILE = "claim.json"
_short = partial(shorten, placeholder=" …")


@dataclass
class ReproduceOptions:
    """Options of scripts/reproduce.py."""

    claim: list[str] = field(default_factory=list)
    device: str = "auto"
    output_dir: Path = Path("outputs")


def main(arguments: list[str]) -> int:
    """List the claims, or test some; the exit code is 1 where a run failed.

    Raises:
        UserError: an unknown claim or option, a mistake in a claim's file, or a claim that needs another machine.
    """
    options, given = parse(arguments, ReproduceOptions, "overrides")
    hardware = detect(options.device)
    if not options.claim:
        _list(hardware)
        return 0

    # Mistakes first: an unknown claim, an option that none has, an arm that train.py would refuse.
    claims = [load(name) for name in dict.fromkeys(options.claim)]
    asked = {key for claim in claims for key in claim.asks}
    if others := [override for override in given if key_of(override) not in asked]:
        raise UserError(
            f"{others[0]} is not an option: a claim's file fixes all other options "
            f"({'you can set: ' + ', '.join(sorted(asked)) if asked else 'these claims have no option to set'})"
        )
    for claim in claims:
        if why := _why_not_here(claim, hardware, given):
            print(_described(claim))
            raise UserError(f"claim={claim.id} is {NOT_HERE}: {why}")
        _check_overrides(claim, hardware, given)

    # Then the claims, one after the other.
    folder = options.output_dir.absolute() / "reproduce"
    results = [test(claim, hardware, given, Runner(_folder(folder, claim, given))) for claim in claims]
    return int(any(result.failed for result in results))


@dataclass(frozen=True)
class Result:
    """A claim that was tested."""

    verdict: str
    failed: bool
    """Whether a run failed."""


def _why_not_here(claim: Claim, hardware: Hardware, given: list[str]) -> str:
    """Return why a claim cannot be tested on this machine, in words; empty: it can."""
    if missing := claim.lacking(hardware, given):
        return f"it needs {', '.join(missing)}"
    return "" if claim.to_run(hardware) else next(iter(claim.untestable(hardware).values()))


def _check_overrides(claim: Claim, hardware: Hardware, given: list[str]) -> None:
    """Refuse overrides that train.py would refuse, before anything is run."""
    for arm in claim.runs(claim.to_run(hardware), given, hardware):
        try:
            compose(merge_overrides(arm.overrides))
        except UserError as error:
            raise UserError(f"evidence/claims/published/{claim.id}.yaml: arm {arm.label}: {error}") from None


def _folder(parent: Path, claim: Claim, given: list[str]) -> Path:
    """Return the folder of a claim's runs: another one for other arms, other code or another torch."""
    parts = [claim.setups, claim.arms, claim.on_cuda, sorted(given), code_digest(), versions()["torch"]]
    return parent / f"{claim.id}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]}"


def test(claim: Claim, hardware: Hardware, given: list[str], runner: Runner) -> Result:
    """Train what is left to train of a claim, print the result, and write it."""
    arms = claim.runs(claim.to_run(hardware), given, hardware)
    print(f"\n{_described(claim)}\n{len(arms)} arms × {claim.repeats}, alternating; {runner.runs}")
    runs = runner.run_all(arms, list(range(claim.repeats)))

    # What is not testable here has no row; on hardware that the statement is not about it has a row, and no bounds.
    elsewhere, left_out = claim.speaks_not_of(hardware), claim.untestable(hardware)
    rows: list[tuple[Criterion, Ratio]] = []
    for number, criterion in enumerate(claim.criteria):
        row = Ratio(None, why=f"{NOT_HERE}: {left_out[number]}") if number in left_out else criterion.row(runs)
        unbounded = replace(criterion, at_least=-math.inf, at_most=math.inf)
        rows.append((unbounded if elsewhere or number in left_out else criterion, row))

    # The claim holds where all of its bounds do.
    verdicts = [criterion.verdict(row) for criterion, row in rows]
    verdict = next((one for one in (REFUTED, INCONCLUSIVE, CONFIRMED) if one in verdicts), NO_VERDICT)
    print(f"\n{claim.id}: {verdict}{f' ({elsewhere})' if elsewhere else ''}; published: {claim.published}")
    for criterion, row in rows:
        print(_line(criterion, row))
    failed = [run for of_arm in runs.values() for run in of_arm.values() if not run.ended]
    for run in failed:
        print(f"  failed: {run.arm}, seed {run.seed}: {run.failure}")
    command = " ".join(["python scripts/reproduce.py", f"claim={claim.id}", *(f"{key}=…" for key in claim.asks)])
    content: dict[str, Any] = {"claim": claim.id, "verdict": verdict, "command": command, "rows": _kept(rows)}
    content |= {"hardware": hardware.facts(), "versions": versions(), "git": git_facts()}
    write_json(runner.folder / RESULT_FILE, content)
    return Result(verdict, bool(failed))


def _line(criterion: Criterion, row: Ratio) -> str:
    """Return what was measured beside what was published."""
    interval = criterion.interval(row)
    if interval is None:
        shown = "not measured"
    elif criterion.over and math.isfinite(interval.high):
        change = replace(interval, mean=interval.mean - 1, low=interval.low - 1, high=interval.high - 1)
        shown = percent(change) if "loss" in criterion.measure else times(interval)
    else:
        shown, low, high = (f"{end:.4g}" if abs(end) < 1000 else f"{end:,.0f}" for end in astuple(interval)[:3])
        shown += f" [{low}, {high}]" if low != high else ""
    bounds = f"criterion {criterion.bounds()}" if criterion.decides else ""
    published = f"published {criterion.published}" if criterion.published else ""
    words = (f"  {criterion.quantity()}: {shown}", bounds, published, criterion.verdict(row), criterion.note, row.why)
    return "  ".join(filter(None, words))


def _kept(rows: list[tuple[Criterion, Ratio]]) -> list[dict[str, Any]]:
    """Return the measured rows that have no ``why``, as ``benchmarks/results.py`` keeps them."""
    return [
        {
            "quantity": criterion.quantity(),
            "value": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "unit": "x" if criterion.over else "",
            "published": criterion.published,
            "verdict": criterion.verdict(row),
        }
        for criterion, row in rows
        if (interval := criterion.interval(row)) and math.isfinite(interval.mean) and not row.why
    ]


def _described(claim: Claim) -> str:
    """Return what was published, in full."""
    return f"{claim.id}: {claim.statement} ({claim.source}; published: {claim.published})"


def _list(hardware: Hardware) -> None:
    """Print a line for every claim, first those that can be tested here."""
    groups: dict[str, list[str]] = {"testable here": []}
    longest = max(map(len, names()))
    for claim in map(load, names()):
        asked = [f"{key}=…" for key in claim.asks]
        missing = _why_not_here(claim, hardware, asked)
        statement = " ".join([_short(claim.statement, 52 - sum(map(len, asked))), *asked])
        line = f"  {claim.id:<{longest}}  {_short(claim.published, 24):<24}  {statement}"
        groups.setdefault(missing.removeprefix("it ").partition(",")[0] or "testable here", []).append(line)
    for group, lines in groups.items():
        print("\n".join([group, *lines]))
    print("\nTest one with claim=…, which says it in full.")
