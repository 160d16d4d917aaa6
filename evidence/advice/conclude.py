"""From measurements to the advice: the winner, what is equal to it, and when compiling pays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evidence.advice.candidates import Setting
from evidence.advice.plan import TIME_FOR_MEMORY, Plan, in_words
from evidence.advice.rounds import interval
from evidence.advice.schema import LEFT_OUT, MEASURED, Candidate, Entry, compiles
from evidence.intervals import Interval

BUSY = 0.20
"""Spread of the null pairs from which on the machine is too busy to see small differences."""


MOST_FAULTS = 3
"""Settings with a fault, after which no other one is examined."""
PROMISING = 1.05
"""Where the final round does not confirm the first choice, the next one has a final round, too, if the interval of some
setting lies above this: once, since each further round could confirm by chance."""


@dataclass
class Conclusion:
    """The part of the advice that follows from the log."""

    baseline: str
    winner: str
    entries: list[Entry]
    equal: list[str]
    noise: float
    notes: list[str] = field(default_factory=list)
    """What else the user should know, in sentences."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Labels that may not be advised, with the reasons."""
    unconfirmed: str = ""
    """Why the choice is not the winner, as a sentence; empty: it is."""


def objections(
    plan: Plan, chosen: Setting, check_up: Callable[[Candidate], dict[str, Any]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Say what speaks against advising the setting that the final round has timed.

    Args:
        plan: with a log that has a final round.
        chosen: what it timed.
        check_up: of a candidate by the doctor, see ``evidence.advice.checkup.check``.

    Returns:
        Labels that are not to be advised, with the reasons; and the health of the chosen setting, if it was examined.
    """
    found = conclude(plan, chosen)
    entry, default = found.entries[0], plan.label(plan.space.baseline)
    label, last = entry.candidate.label, plan.label(chosen)
    if label == found.baseline and last != label and not plan.unconfirmed and _promising(plan, last):
        plan.unconfirmed.add(last)
        return {last: found.unconfirmed}, {}
    if label == default:
        return {}, {}
    if label == last and (slower := _slower_than_eager(plan, chosen)):
        return {label: slower}, {}
    health = check_up(entry.candidate)
    if not health["faults"]:
        return {}, health
    plan.faults[label] = health["faults"]
    others = plan.log.records.keys() - {default} if len(plan.faults) >= MOST_FAULTS else set()
    enough = f"{len(plan.faults)} settings have a fault, so no further one is examined or advised"
    return dict.fromkeys(sorted(others), enough) | {label: in_words(label, health["faults"])}, {}


def _slower_than_eager(plan: Plan, chosen: Setting) -> str:
    """Return why the final round speaks for the same setting without compiling; empty: it does not."""
    eager = plan.eager(chosen)
    if eager is None or plan.goal != "speed":
        return ""
    label, other = plan.label(chosen), plan.label(eager)
    found = interval(plan.ratios(label, other, plan.log.final))
    if found is None or found.high >= 1:
        return ""
    return (
        f"{label} is not advised, because in the final round it was {found.mean:.2f}x [{found.low:.2f}, "
        f"{found.high:.2f}] as fast as {other} in a run of {plan.steps} steps, compile time included"
    )


def _promising(plan: Plan, but: str) -> bool:
    """Return whether a setting other than ``but`` was clearly faster than the reference before the final round."""
    others = (plan.label(setting) for setting in plan.ranked() if plan.label(setting) != but)
    known = (interval(plan.ratios(label, _reference(plan))) for label in others)
    return plan.goal == "speed" and any(found is not None and found.low > PROMISING for found in known)


def _reference(plan: Plan) -> str:
    assert plan.reference is not None
    return plan.label(plan.reference)


def conclude(plan: Plan, chosen: Setting) -> Conclusion:
    """Return what the measurements say.

    The chosen setting wins if the final round, which played no part in the choice, confirms it: the whole interval of
    its speed in the user's run lies above the reference's (for goal=memory: it needs less memory, in at most
    ``TIME_FOR_MEMORY`` times the time). Otherwise the reference does. On a busy machine it must also lie above the
    interval of the null pairs.

    Args:
        plan: with a log that has a final round.
        chosen: what the final round timed.
    """
    base, winner, noise = _reference(plan), plan.label(chosen), plan.noise
    entries = {entry.candidate.label: entry for entry in _entries(plan, base)}
    notes, unconfirmed = list(dict.fromkeys(plan.excluded.values())), ""
    null = interval(plan.null_ratios) if noise > BUSY else None
    if winner != base and (why := _unconfirmed(plan, entries[winner], entries[base], null)):
        unconfirmed = f"{winner} was the best until the final round, which did not confirm it: {why}"
        notes.append(unconfirmed)
        winner = base
    if longer := _longer_run(plan, entries, winner):
        notes.append(longer)
    if null is not None:
        notes.append(
            f"this machine is busy: blocks of the same setting, in two processes, differed by up to {noise:.0%} "
            f"({null.mean:.2f}x [{null.low:.2f}, {null.high:.2f}] on average), so only a setting whose whole interval "
            f"lies above {max(1.0, null.high):.2f}x counts as faster; for small differences, repeat it with fresh=true "
            "when nothing else runs"
        )
    contenders = [plan.label(setting) for setting in plan.contenders()]
    equal = [each for each in contenders if each != winner] if winner in contenders else []
    excluded = {name: why for name, why in plan.excluded.items() if name not in plan.unconfirmed}
    order = sorted(entries.values(), key=lambda entry: _order(entry, winner, plan.goal))
    return Conclusion(base, winner, [*order, *plan.space.left_out], equal, noise, notes, excluded, unconfirmed)


def _entries(plan: Plan, base: str) -> list[Entry]:
    """Return an entry of every setting that was started, or for which there was no time."""
    log, found = plan.log, []
    for setting in plan.known():
        candidate, record = plan.space.candidate(setting), log.records[plan.label(setting)]
        entry = Entry(candidate, record.status, record.reason, memory_bytes=record.memory_bytes)
        entry.rounds = sum(bool(done.times.get(candidate.label)) for done in log.rounds)
        entry.step_s = log.times(candidate.label)
        rounds = log.final if any(done.times.get(candidate.label) for done in log.final) else None
        if candidate.label == base:
            entry.speed = entry.run_speed = Interval(1.0, 1.0, 1.0, 0.95, len(entry.step_s))
        elif entry.status == MEASURED:
            entry.speed = interval(log.ratios(candidate.label, base, rounds))
            entry.run_speed = interval(plan.ratios(candidate.label, base, rounds))
        if plan.goal == "memory":
            entry.run_speed = None
        entry.compile_s = log.compile_s(candidate.label)
        if entry.step_s:
            _pays(plan, entry)
        found.append(entry)
    for label in sorted(plan.late - log.records.keys()):
        late = plan.setting(label)
        if late is not None:
            found.append(Entry(plan.space.candidate(late), LEFT_OUT, "the budget had no time for it"))
    return found


def _pays(plan: Plan, entry: Entry) -> None:
    """Add after how many steps compiling has saved the time it took."""
    gain = _gain(plan, entry.candidate.label)
    if gain is None:
        return
    saved = statistics.median(entry.step_s) * (gain - 1)
    entry.never_pays = saved <= 0
    entry.pays_after_steps = None if entry.never_pays else math.ceil(plan.compile_s / saved)


def _longer_run(plan: Plan, entries: dict[str, Entry], winner: str) -> str:
    """Return from how many steps on compiling the winner would pay, as a sentence; empty: it does, or nothing says so.

    It is estimated by the setting whose steps gain the most from compiling.
    """
    if plan.goal != "speed" or compiles(winner):
        return ""
    gains = {label: gain for label in entries if (gain := _gain(plan, label)) is not None}
    label = max(gains, key=gains.__getitem__, default=winner)
    if gains.get(label, 1.0) < PROMISING:
        return ""
    saved_s = statistics.median(entries[winner].step_s) * (1 - 1 / gains[label])
    needed = math.ceil(plan.compile_s / saved_s)
    if needed <= plan.steps:
        return ""
    return (
        f"compiling takes {plan.compile_s:.0f} s and makes a step {gains[label]:.2f}x as fast ({label}); if it does "
        f"the same for {winner}, it saves time in a run of about {needed} steps or more; this advice is for "
        f"{plan.steps} steps, so for a longer run call advise.py with steps="
    )


def _gain(plan: Plan, label: str) -> float | None:
    """Return how many times as fast compiling makes a step; None: it does not compile, was not timed, or has failed."""
    setting = plan.setting(label)
    eager = None if setting is None else plan.eager(setting)
    excluded = plan.excluded.keys() - plan.unconfirmed
    if eager is None or label in excluded or not plan.log.ok(label):
        return None
    names = (label, plan.label(eager))
    ratios = plan.log.ratios(*names, plan.log.final) or plan.log.ratios(*names)
    return statistics.median(ratios) if ratios else None


def _unconfirmed(plan: Plan, entry: Entry, base: Entry, null: Interval | None) -> str:
    """Return why the final round does not confirm that an entry is better than the baseline; empty: it does.

    ``null``: the interval of the null pairs, on a busy machine; what lies within it is no difference.
    """
    speed, label, over = entry.run_speed or entry.speed, entry.candidate.label, base.candidate.label
    if speed is None:
        return "it failed there"
    shown = f"{speed.mean:.2f}x [{speed.low:.2f}, {speed.high:.2f}] as fast as {over}"
    if plan.goal == "memory":
        slow = speed.mean < 1 / TIME_FOR_MEMORY
        more = (entry.memory_bytes or 0) >= (base.memory_bytes or 0)
        return shown if slow else "it needs no less memory" if more else ""
    if compiles(label) or compiles(over):
        shown += f" in a run of {plan.steps} steps, compile time included"
    return shown if speed.low <= max(1.0, null.high if null else 1.0) else ""


def _order(entry: Entry, winner: str, goal: str) -> tuple[float, ...]:
    if entry.candidate.label == winner:
        return (0,)
    speed = entry.run_speed or entry.speed
    if entry.status != MEASURED or speed is None:
        return (2, 0)
    return (1, float(entry.memory_bytes or 0) if goal == "memory" else -speed.mean)
