"""The advice in words: one sentence, a table, and the command that takes it."""

from __future__ import annotations

import statistics

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evidence.advice import exhaustive
from evidence.advice.schema import MEASURED, Advice, Entry, compiles
from evidence.intervals import Interval
from trainer.formats import duration, size

_FEW = 3
"""Ratios from which on an interval is shown; of two it says little."""


def sentence(advice: Advice) -> str:
    """Return the advice in one sentence of measured facts."""
    winner, base = advice.entry(advice.winner), advice.baseline
    health = _health(advice)
    if advice.winner == base:
        setting = "no setting that can be advised" if advice.excluded else "no setting"
        better = f"{setting} needs less memory" if advice.goal == "memory" else f"{setting} is clearly faster"
        run = f" in a run of {advice.steps} steps" if _whole_runs(advice) else ""
        scope = f" among those measured in {duration(advice.spent_s)} min" if advice.stopped == "budget" else ""
        return f"{base}{_default(advice)}: {better} here{scope}{run}{health}{_others(advice)}"
    assert winner.speed is not None
    facts = [f"{_times(winner.speed)} as fast as {base}", _memory(winner, advice.entry(base))]
    whole = winner.run_speed if _whole_runs(advice) else None
    if compiles(base) and not compiles(advice.winner) and whole is not None:
        facts[0] = f"{_times(whole)} as fast as {base}{_included(advice)}"
    if advice.goal == "memory":
        facts.reverse()
    said = f"{advice.winner}: {', '.join(filter(None, facts))}{health}"
    if compiles(advice.winner) and winner.pays_after_steps is not None:
        said += f"; compiling pays after {winner.pays_after_steps} steps"
    if compiles(advice.winner) and whole is not None:
        said += f"; {_times(whole)} as fast{_included(advice)}"
    return said + _others(advice)


def _included(advice: Advice) -> str:
    return f" in a run of {advice.steps} steps, compile time included"


def _whole_runs(advice: Advice) -> bool:
    """Return whether settings differ in the time to compile, so that whole runs are another matter than steps."""
    kinds = {compiles(each.candidate.label) for each in advice.entries if each.status == MEASURED and each.run_speed}
    return len(kinds) > 1


def _default(advice: Advice) -> str:
    candidate = advice.entry(advice.baseline).candidate
    return "" if candidate.overrides or candidate.threads else ", train.py's default"


def _others(advice: Advice) -> str:
    if not advice.equal:
        return ""
    worse = "larger" if advice.goal == "memory" else "slower"
    if len(advice.equal) == 1:
        return f"; {advice.equal[0]} is not clearly {worse}"
    return f"; {len(advice.equal)} other settings are not clearly {worse}"  # the table marks them


def _health(advice: Advice) -> str:
    return ", numerics healthy" if advice.health.get("healthy") else ""


def _times(speed: Interval) -> str:
    return f"{speed.mean:.3g}x [{speed.low:.3g}, {speed.high:.3g}]"


def _memory(entry: Entry, base: Entry) -> str:
    if not entry.memory_bytes or not base.memory_bytes:
        return ""
    change = entry.memory_bytes / base.memory_bytes - 1
    if abs(change) < 0.01:
        return "the same memory"
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'} memory"


def _quality(advice: Advice) -> str:
    found = advice.quality
    if not found:
        return ""
    if "difference" not in found:
        return f"Quality: {found['verdict']} ({found['why']})."
    test, why = found["difference"], f"; {found['why']}" if found["why"] else ""
    shown = f"{test['mean']:+.2%} [{test['low']:+.2%}, {test['high']:+.2%}]"
    return (
        f"Quality: {found['verdict']} at a margin of {found['margin']:.1%}: the final validation loss differs by "
        f"{shown} in {found['pairs']} pairs of {found['steps']} steps{why}."
    )


def _exhaustive(advice: Advice) -> str:
    return f"Exhaustive: {exhaustive.sentence(advice.exhaustive, advice.goal)}." if advice.exhaustive else ""


def print_advice(advice: Advice, console: Console, notes: list[str]) -> None:
    """Print the sentence, the table, what was not measured, the notes and the command."""
    said = escape(sentence(advice))
    console.print(f"\n[bold]{said}[/]\n", highlight=False, soft_wrap=True)
    console.print(table(advice))
    for line in _compiled(advice):
        console.print(escape(line), style="dim", highlight=False, soft_wrap=True)
    for entry in advice.entries:
        if entry.status != MEASURED:
            line = f"{entry.status}: {entry.candidate.label} ({entry.reason})"
            console.print(escape(line), style="dim", highlight=False, soft_wrap=True)
    for note in notes:
        console.print(f"Note: {escape(note)}.", highlight=False, soft_wrap=True)
    device = escape(advice.hardware["name"])
    console.print(f"Measured for {duration(advice.spent_s)} min on {device}: {_ENDED[advice.stopped]}.", soft_wrap=True)
    for line in filter(None, (_quality(advice), _exhaustive(advice))):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print()


_ENDED = {
    "one is ahead": "one setting is ahead",
    "several are equal": "the best settings are equal",
    "budget": "there was no time for all of it; a larger budget_minutes continues from here",
}


def table(advice: Advice) -> Table:
    """Return the measured entries, the advised one first."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    shown.add_column("setting", min_width=16, overflow="fold")
    whole = (f"run of {advice.steps}",) if _whole_runs(advice) else ()
    for name in ("speed", *whole, "step, ms", "memory"):
        shown.add_column(name, justify="right", no_wrap=True)
    for entry in advice.entries:
        if entry.status == MEASURED:
            style = "bold" if entry.candidate.label == advice.winner else None
            shown.add_row(_named(entry.candidate.label, advice), *_cells(entry, advice), style=style)
    if whole:
        shown.caption = f"{whole[0]}: speed{_included(advice)}"
        shown.caption_justify = "left"
    return shown


def _named(label: str, advice: Advice) -> str:
    roles = {
        "advised": label == advice.winner,
        "default": label == advice.baseline and bool(_default(advice)),
        f"not clearly {'larger' if advice.goal == 'memory' else 'slower'}": label in advice.equal,
    }
    said = ", ".join(role for role, has in roles.items() if has)
    return escape(label + f" ({said})" * bool(said))


def _cells(entry: Entry, advice: Advice) -> list[str]:
    speed = "1x" if entry.candidate.label == advice.baseline else ""
    if not speed and entry.speed is not None:
        speed = _times(entry.speed) if entry.speed.count >= _FEW else f"about {entry.speed.mean:.2g}x"
    whole = [f"{entry.run_speed.mean:.3g}x" if entry.run_speed else ""] if _whole_runs(advice) else []
    return [
        speed,
        *whole,
        f"{1e3 * statistics.median(entry.step_s):.4g}" if entry.step_s else "",
        size(entry.memory_bytes) if entry.memory_bytes else "",
    ]


def _compiled(advice: Advice) -> list[str]:
    """Return a line for each compiled entry: how long it took, and when that pays."""
    lines = []
    for entry in advice.entries:
        if entry.status == MEASURED and compiles(entry.candidate.label):
            lines.append(f"compiling took {entry.compile_s:.1f} s{_pays(entry)}: {entry.candidate.label}")
    return lines


def _pays(entry: Entry) -> str:
    if entry.never_pays:
        return " and never pays"
    return f" and pays after {entry.pays_after_steps} steps" if entry.pays_after_steps is not None else ""
