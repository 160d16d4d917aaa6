"""Which claims are tested when: in order of value, and within a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from evidence.claims.budget import OutOfTime, Seconds, in_words, of_record, of_runs, scaled
from evidence.claims.reproduce import Reproduction, machine_name
from evidence.claims.results import Records
from trainer.files import PROJECT
from trainer.hardware import Hardware

Left = dict[str, float | None]
"""By claim, the seconds that the rest of it takes; None: not known."""
LEFT_FILE = "left.json"
"""In the folder of the runs: what the last call with a budget left to do."""
ORDER = PROJECT / "evidence" / "claims" / "order.yaml"


def ordered(claims: Collection[str], tested: Collection[str], path: Path = ORDER) -> list[str]:
    """Return claims in order of value, those without an outcome first.

    Args:
        claims: their ids.
        tested: those that have an outcome on this machine, valid or not.
        path: a YAML file with ids and the reason for each place. What is not in it comes first.
    """
    place = {name: number for number, name in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")))}
    return sorted(claims, key=lambda name: (name in tested, place.get(name, -1), name))


def estimates(records: Records, hardware: Hardware, folder: Path) -> dict[str, Seconds]:
    """Return what the runs of each claim take here: by earlier runs here, else by those of similar machines.

    Args:
        records: all outcomes.
        hardware: this machine.
        folder: of the runs, of any commit.
    """
    machine = machine_name(hardware)
    here = {name: of_record(record) for name, record in records.get(machine, {}).items()}
    for runs in folder.glob("*/runs"):
        name, _, key = runs.parent.name.rpartition("-")
        if key and not name.endswith("-reduced"):
            here[name] = here.get(name, {}) | of_runs(runs)
    found: dict[str, Seconds] = {}
    for other, outcomes in records.items():
        if other != machine and _on_gpu(outcomes) == hardware.is_gpu:
            there = {name: of_record(record) for name, record in outcomes.items()}
            found |= scaled(there, here)
    return {name: found.get(name, {}) | here.get(name, {}) for name in [*found, *here]}


def run_claims(names: Sequence[str], reproduction: Reproduction, finished: Callable[[str], None]) -> Left:
    """Test claims in this order, and return what was left for lack of time.

    With a budget, a claim that does not fit as a whole is left for later. When nothing fits as a whole any more, single
    runs are made that still fit; the next call has not to make them again.

    Args:
        names: of the claims.
        reproduction: tests them.
        finished: called with the name of each claim as soon as it has an outcome.
    """
    left, ended = _turn(names, reproduction, finished)
    if left and reproduction.budget:
        reproduction.budget.partly = True
        again = sorted((name for name in names if name in left), key=ended.__contains__)  # what is too long comes last
        left, _ = _turn(again, reproduction, finished)
    return left


def _turn(names: Sequence[str], reproduction: Reproduction, finished: Callable[[str], None]) -> tuple[Left, set[str]]:
    """Return the claims that were left, and the names of those in which a run reached its limit."""
    left: Left = {}
    ended = set()
    for name in names:
        try:
            if name not in reproduction.done:
                reproduction.test(name)
        except OutOfTime as error:
            left[name] = error.needed_s
            if error.ended:
                ended.add(name)
            if reproduction.budget and not reproduction.budget.partly:
                needs = "" if error.needed_s is None else f" needs about {in_words(error.needed_s)} more, and"
                there = in_words(max(0.0, reproduction.budget.left()))
                reproduction.report(f"\n{name}{needs} does not fit in the {there} that are left")
        else:
            finished(name)
    return left, ended


def rest_in_words(left: Left) -> str:
    """Return what is left to do, and how long it would take."""
    if not left:
        return "Nothing is left to test here."
    each = ", ".join(f"{name} ({in_words(seconds)})" for name, seconds in left.items())
    known = [seconds for seconds in left.values() if seconds is not None]
    more = ", and those of unknown length" if len(known) < len(left) else ""
    together = f" About {in_words(sum(known))} in all{more}." if known else ""
    return f"Left: {each}.{together} The same command continues."


def _on_gpu(outcomes: dict[str, dict[str, Any]]) -> bool:
    return any(str(record["hardware"]["device"]).startswith("cuda") for record in outcomes.values())
