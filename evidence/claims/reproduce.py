"""Tests published claims: trains the arms of a claim, and prints the published figure beside the measured one."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from contextlib import redirect_stdout
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import shorten

from evidence.claims.claims import Claim, Criterion, load, names
from evidence.measures import TIMED, in_use, measured
from evidence.options import ReproduceOptions
from evidence.runs import DIVERGED, Outcome, Runner, merge_overrides
from mantissa.compare import percent, times
from mantissa.statistics import INCONCLUSIVE, Interval, ratio_interval
from trainer.config.compose import compose, key_of
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.files import read_json, write_json
from trainer.hardware import Hardware, detect
from trainer.run.provenance import git_facts, versions
from trainer.terminal import on_error_stream, work

CONFIRMED, REFUTED, NOT_HERE, NO_VERDICT = "CONFIRMED", "REFUTED", "NOT TESTABLE HERE", "no verdict"
FINDINGS_FILE = "claim.json"
_short = partial(shorten, placeholder=" …")


@dataclass
class Finding:
    """The result of a criterion."""

    criterion: Criterion
    verdict: str = ""
    """Verdict by this criterion; empty: it does not decide."""
    found: Interval | None = None
    """Geometric mean of finite ratios with its 95 % interval; of other values median, lowest and highest."""
    values: list[float] = field(default_factory=list)
    why: str = ""
    """Reason why there is no verdict."""


def evaluate(criterion: Criterion, outcomes: list[Outcome]) -> Finding:
    """Measure one criterion on the runs of a claim, and judge it if it decides."""
    runs = [{run.seed: run for run in outcomes if run.arm == name} for name in criterion.arms]
    finding = Finding(criterion)
    for seed in sorted(set.intersection(*map(set, runs))):
        own = [measured(of_arm[seed], criterion.measure) for of_arm in runs]
        if None in own:
            failed = next(of_arm[seed] for of_arm, value in zip(runs, own, strict=True) if value is None)
            finding.why = f"{failed.arm}, seed {seed}, {'was not measured' if failed.finished else failed.reason}"
            continue
        value = own[0] / own[1] if criterion.over and own[1] else own[0]  # type: ignore[operator]
        if value is None or math.isnan(value) or (criterion.over and not min(own)):  # type: ignore[type-var]
            finding.why = f"seed {seed} cannot be compared: neither run finite, or a ratio with 0"
        else:
            finding.values.append(value)
    if criterion.measure in TIMED:
        finding.why = finding.why or in_use(run for of_arm in runs for run in of_arm.values())
    if values := finding.values:
        if criterion.over and len(values) > 1 and all(0 < value < math.inf for value in values):
            finding.found = ratio_interval(values)
        else:
            finding.found = Interval(statistics.median(values), min(values), max(values), 1.0, len(values))
    if criterion.decides:
        finding.verdict = _verdict(finding)
    return finding


def _verdict(finding: Finding) -> str:
    criterion, values, found = finding.criterion, finding.values, finding.found
    if len(values) < (2 if criterion.over else 1):
        finding.why = finding.why or "too few runs for an interval"
    if finding.why or found is None:
        return INCONCLUSIVE
    low = -math.inf if criterion.at_least is None else criterion.at_least
    high = math.inf if criterion.at_most is None else criterion.at_most
    if low <= found.low and found.high <= high:
        return CONFIRMED
    if criterion.over and found.low <= high and low <= found.high:
        return INCONCLUSIVE
    return REFUTED


def combine(verdicts: list[str]) -> str:
    """Return the verdict of a claim from those of its criteria, without those that do not decide."""
    counted = {verdict for verdict in verdicts if verdict}
    if not counted:
        return NOT_HERE
    return REFUTED if REFUTED in counted else CONFIRMED if counted == {CONFIRMED} else INCONCLUSIVE


def shown(finding: Finding) -> str:
    """Return what was measured, in words; ratios of losses near 1 as percentages of change."""
    found, criterion = finding.found, finding.criterion
    if found is None:
        return "not measured"
    if criterion.over and math.isfinite(found.high):
        change = replace(found, mean=found.mean - 1, low=found.low - 1, high=found.high - 1)
        near = "loss" in criterion.measure and max(abs(change.low), abs(change.high)) < 0.1
        return percent(change) if near else times(found)
    middle, low, high = (f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}" for value in astuple(found)[:3])
    return middle if low == high else f"{middle} [{low}, {high}]"


def main(arguments: list[str]) -> int:
    """List the claims, or test some; the exit code is 1 where a run failed.

    Raises:
        UserError: an unknown claim or option, a mistake in a claim's file, or a claim that needs another machine.
    """
    options, given = parse(arguments, ReproduceOptions, "overrides")
    hardware = detect(options.device)
    if not options.claim and not options.all:
        _list(hardware)
        return 0
    claims = [load(name) for name in (names() if options.all else dict.fromkeys(options.claim))]
    asked = {key for claim in claims for key in claim.asks}
    if others := [override for override in given if key_of(override) not in asked]:
        raise UserError(
            f"{others[0]} is not an option: a claim's file fixes all other options "
            f"({'you can set: ' + ', '.join(sorted(asked)) if asked else 'these claims have no option to set'})"
        )
    testable = []
    for claim in claims:
        why = _why_not_here(claim, hardware, given)
        if why and not options.all:
            print(_described(claim))
            raise UserError(f"claim={claim.id} is {NOT_HERE}: {why}")
        if why:
            print(_short(f"{claim.id}: {NOT_HERE}: {why}", 100))
        else:
            testable.append(claim)
            _check_overrides(claim, hardware, given)
    folder, tested = options.output_dir.absolute() / "reproduce", _test_in_short if options.all else test
    return max([tested(claim, hardware, given, Runner(_folder(folder, claim, given))) for claim in testable], default=0)


def _test_in_short(claim: Claim, hardware: Hardware, given: list[str], runner: Runner) -> int:
    """Test a claim as ``test`` does, which prints to a file here, and print what was found in a line."""
    runner.folder.mkdir(parents=True, exist_ok=True)
    log = runner.folder / "test.log"
    with log.open("w", encoding="utf-8") as file, on_error_stream(), work(claim.id), redirect_stdout(file):
        failed = test(claim, hardware, given, runner)
    found = read_json(runner.folder / FINDINGS_FILE)
    measured = [f"{row['value']:.3g}{row['unit']} {row['quantity']}" for row in found["findings"][:1]]
    words = [f"a run failed, see {log}"] if failed else [f"published {claim.published}", *measured]
    print(_short(f"{claim.id}: {'; '.join([found['verdict'], *words])}", 200 if failed else 100), flush=True)
    return failed


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
    """Return the folder of a claim's runs: another one for other arms, another commit or another torch."""
    parts = [claim.setups, claim.arms, claim.on_cuda, sorted(given), git_facts().get("commit"), versions()["torch"]]
    return parent / f"{claim.id}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]}"


def test(claim: Claim, hardware: Hardware, given: list[str], runner: Runner) -> int:
    """Train what is left to train of a claim, print and write what was found; return 1 where a run failed."""
    arms, left_out = claim.runs(claim.to_run(hardware), given, hardware), claim.untestable(hardware)
    print(f"\n{_described(claim)}\n{len(arms)} arms × {claim.repeats}, alternating; {runner.runs}")
    outcomes = runner.run_all(arms, list(range(claim.repeats)))
    findings = []
    for number, criterion in enumerate(claim.criteria):
        why = left_out.get(number)
        findings.append(Finding(criterion, why=f"not testable: {why}") if why else evaluate(criterion, outcomes))
    related = claim.only_related(hardware)
    for finding in findings:
        finding.verdict = "" if related else finding.verdict
    verdict = NO_VERDICT if related else combine([finding.verdict for finding in findings])
    print(f"\n{claim.id}: {verdict}{f' ({related})' if related else ''}; published: {claim.published}")
    for finding in findings:
        criterion = finding.criterion
        words = [f"published {criterion.published}" if criterion.published else "", finding.verdict, criterion.note]
        bounds = f"criterion {criterion.bounds()}" if criterion.decides and not related else ""
        print("  ".join(filter(None, (f"  {criterion.quantity()}: {shown(finding)}", bounds, *words, finding.why))))
    failures = [f"{run.arm}, seed {run.seed}: {run.reason}" for run in outcomes if run.exit_code not in (0, DIVERGED)]
    for failure in failures:
        print(f"  failed: {failure}")
    _write(runner.folder / FINDINGS_FILE, claim, verdict, findings)
    return int(bool(failures))


def _write(path: Path, claim: Claim, verdict: str, findings: list[Finding]) -> None:
    """Write what was found, for ``benchmarks/results.py``."""
    rows = [
        {
            "quantity": finding.criterion.quantity(),
            "value": finding.found.mean,
            "low": finding.found.low,
            "high": finding.found.high,
            "unit": "x" if finding.criterion.over else "",
            "published": finding.criterion.published,
            "verdict": finding.verdict,
        }
        for finding in findings
        if finding.found and math.isfinite(finding.found.mean) and not finding.why
    ]
    command = " ".join(["python scripts/reproduce.py", f"claim={claim.id}", *(f"{key}=…" for key in claim.asks)])
    write_json(path, {"claim": claim.id, "verdict": verdict, "command": command, "findings": rows})


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
    print("\nTest one with claim=…, which says it in full, or all that this machine can with all=true.")
