"""The command line of scripts/reproduce.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evidence.claims import results, submission
from evidence.claims.claims import Claim, load, names
from evidence.claims.criteria import NOT_HERE, shown
from evidence.claims.reproduce import Reproduction, machine_name, ordered, save
from evidence.options import ReproduceOptions, seconds_of
from evidence.runs import TRAIN, OutOfTime, merged
from trainer.config.compose import compose, key_of
from trainer.config.options import parse
from trainer.errors import UserError
from trainer.hardware import Hardware, detect

_WIDE = 200
"""Columns of a table that goes to no terminal."""


def main(arguments: list[str]) -> int:
    """List the claims, or test some and record the outcomes; the exit code is 1 where a run failed.

    Raises:
        UserError: an unknown claim or option, or a claim that needs another machine.
    """
    options, given = parse(arguments, ReproduceOptions, "overrides")
    if options.add:
        print(f"appended to {submission.add(Path(options.add), results.RESULTS)}")
    if options.pages or options.add:
        print("\n".join(f"written: {path}" for path in results.update()) or "the pages are up to date")
        return 0
    claims = {name: load(name) for name in names()}
    hardware, records = detect(options.device), results.read()
    if not options.claim and not options.all:
        console = Console()
        _list(claims, records, machine_name(hardware), console if console.is_terminal else Console(width=_WIDE))
        return 0
    here = records.get(machine_name(hardware), {})
    if options.all:
        wanted = ordered([name for name, claim in claims.items() if not claim.combines], here)
    else:
        wanted = list(dict.fromkeys(part for name in options.claim for part in load(name).combines or [name]))
    until = time.monotonic() + seconds_of(options.budget) if options.budget else None
    _check_given(wanted, given)
    if not options.all:
        for name in wanted:
            _check(load(name), hardware, given, options)
    folder = options.output_dir.absolute() / "reproduce"
    reproduction = Reproduction(hardware, folder, given, reduced=options.reduced, until=until)
    if options.submit and reproduction.git.get("dirty") != "false":
        raise UserError("submit=true needs a commit without changes, which others can run; see git status")
    if (options.all or options.submit) and not options.reduced:
        latest = {name: outcomes[-1] for name, outcomes in here.items()}
        reproduction.done |= _known(claims, latest, reproduction.git if options.submit else None)
    code = _run(wanted, claims, reproduction, here)
    if options.submit:
        for record in (reproduction.done[name] for name in wanted if name in reproduction.done):
            if record["verdict"] != NOT_HERE:
                print(f"to send: {submission.write(record, options.output_dir.absolute() / 'submit')}")
    return code


def _run(
    wanted: list[str], claims: dict[str, Claim], reproduction: Reproduction, earlier: dict[str, list[results.Record]]
) -> int:
    """Test claims, print and write each outcome at once, say what is left; return the exit code."""
    done = reproduction.done
    known, new = set(done), []
    left: list[str] = []
    for name in wanted:
        if name in known:
            print(f"{name}: {done[name]['verdict']}, of {done[name]['date']}")
            continue
        try:
            reproduction.test(name)
        except OutOfTime:
            left.append(name)
            continue
        new.append(name)
        _print(done[name], claims[name], reproduction.reduced)
        if not reproduction.reduced:
            if not results.repeats(done[name], earlier.get(name, [])):
                print(f"written to {save(done[name], results.RESULTS)}")
            if done[name]["verdict"] != NOT_HERE:  # of those there are many at once
                results.update()
    if new and not reproduction.reduced:
        results.update()
    if reproduction.until is not None:
        tested = [f"{name} {done[name]['verdict']}" for name in new if done[name]["verdict"] != NOT_HERE]
        print(f"\nDone: {', '.join(tested) or 'no claim'}.")
        print(f"Left: {', '.join(left)}. The same command continues." if left else "Nothing is left to test here.")
    return int(any(done[name].get("failures") for name in new))


def _check_given(wanted: list[str], given: list[str]) -> None:
    """Refuse overrides that no claim asks for, before anything is run."""
    asked = {key for name in wanted for key in load(name).asks}
    if others := [override for override in given if key_of(override) not in asked]:
        raise UserError(
            f"{others[0]} is not an option: a claim's file fixes all other options "
            f"({'you can set: ' + ', '.join(sorted(asked)) if asked else 'these claims have no option to set'})"
        )


def _check(claim: Claim, hardware: Hardware, given: list[str], options: ReproduceOptions) -> None:
    """Refuse what this machine cannot run, and overrides that train.py would refuse, before anything is run."""
    if options.reduced:
        claim.reduce()
    if missing := claim.lacking(hardware, given):
        raise UserError(f"claim={claim.id} is {NOT_HERE}: it needs {', '.join(missing)}")
    arms = list(claim.arms) if options.reduced else claim.to_run(hardware)
    if not arms:
        why = next(iter(claim.not_timed(hardware).values()), "its arms need another machine")
        raise UserError(f"claim={claim.id} is {NOT_HERE}: {why}")
    for arm in claim.runs(arms, given, hardware.device.type, memory_ledger=False):
        if arm.script == TRAIN:
            try:
                compose(merged(arm.overrides))
            except UserError as error:
                raise UserError(f"evidence/claims/published/{claim.id}.yaml: arm {arm.label}: {error}") from None


def _known(
    claims: dict[str, Claim], outcomes: dict[str, dict[str, Any]], git: dict[str, str] | None
) -> dict[str, dict[str, Any]]:
    """Return the outcomes that are still valid: of the present files of the claims, without a failed run.

    ``git``: only those of this commit. They were made in this checkout: those that came with it are of earlier commits.
    """
    return {
        name: record
        for name, record in outcomes.items()
        if name in claims
        and record["git"] == (git or record["git"])
        and record["claim_sha256"] == claims[name].digest
        and record["verdict"] != NOT_HERE
        and not record.get("failures")
        and not record.get("too_slow")  # its arms can run now
    }


def _list(claims: dict[str, Claim], records: results.Records, here: str, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("claim", "statement and source", "needs"):
        table.add_column(column, overflow="fold")
    for name in records:
        table.add_column(f"{name} ({'this machine' if name == here else 'another machine'})", overflow="fold")
    for name, claim in claims.items():
        verdicts = []
        for place, outcomes in records.items():
            every = outcomes.get(name, [])
            judged = [results.judged(outcome, claim) for outcome in results.measured(every) or every[-1:]]
            each = [f"{verdict} ({remark})" if remark else verdict for verdict, _, remark in judged]
            verdicts.append("\n".join(each).replace("HERE", "HERE" if place == here else "THERE"))
        words = f"{escape(claim.statement)} [dim]({escape(claim.source)})[/]"
        needs = ", ".join([*claim.combines, *claim.needs, *(f"{key}=…" for key in claim.asks)])
        table.add_row(name, words, needs or "any", *verdicts)
    console.print(table)
    if here not in records:
        console.print("No claim has been tested on this machine yet; the verdicts above are of other machines.")
    console.print(f"This machine: {here}. Test one claim with claim=…, or all claims that it can with all=true.")


def _print(record: dict[str, Any], claim: Claim, reduced: bool) -> None:
    print(f"\n{record['claim']}: {record['verdict']}" + (f" ({record['related']})" if record.get("related") else ""))
    if record.get("needs"):
        print(f"  needs {', '.join(record['needs'])}")
    for sentence in results.not_timed(record):
        print(f"  {sentence}")
    for finding in record.get("findings", []):
        bounds = f"  criterion {finding['bounds']}" if finding["bounds"] else ""
        published = f"  published {finding['published']}" if finding["published"] else ""
        judged = "" if reduced else finding["verdict"]
        print(f"  {finding['quantity']}: {shown(finding)}{bounds}{published}  {judged}".rstrip())
        if finding["why"] and not reduced:
            print(f"    {finding['why']}")
    for sentence in record.get("why", []):
        print(f"  {sentence}")
    for failure in record.get("failures", []):
        print(f"  failed: {failure}")
