"""The advice for people: one sentence, a table, a plot of speed against memory; for a terminal and as a page."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evidence.advice.commands import comparison, training
from evidence.advice.schema import AHEAD, BUDGET, MEASURED, MEMORY, SEVERAL, UNDECIDED, Advice, Entry
from mantissa.display import duration, size
from mantissa.ledger import MIB
from mantissa.page import Plot, Report, Section, measured_on
from mantissa.statistics import Interval
from trainer.files import write_text
from trainer.tracking.plots import COLORS, INK, NOISE, QUIET, RULE, bare_figure

ENDED = {
    AHEAD: "one setting is ahead",
    SEVERAL: "the best settings are equal",
    UNDECIDED: "the times vary too much to decide; fresh=true measures again, best on a quieter machine",
    BUDGET: "the budget ran out; a larger budget_minutes continues from here",
}


def sentence(advice: Advice) -> str:
    """Return the advice in one sentence of measured facts."""
    winner, base = advice.entry(advice.winner), advice.entry(advice.baseline)
    healthy = ", numerics healthy" if winner.health.get("healthy") else ""
    number, worse = len(advice.equal), "larger" if advice.goal == MEMORY else "slower"
    others = ""
    if number:  # the table marks them
        others = f"; {f'{number} other settings are' if number > 1 else f'{advice.equal[0]} is'} not clearly {worse}"
    if advice.stopped == UNDECIDED:
        others += "; not decided: another setting may be more than 5 % faster"
    included = f" in a run of {advice.steps} steps, compile time included"
    if winner is base:
        setting = "no setting" + " that can be advised" * any(entry.refused for entry in advice.entries)
        better = "needs less memory" if advice.goal == MEMORY else "is clearly faster"
        scope = f" among those measured in {duration(advice.spent_s)} min" if advice.stopped == BUDGET else ""
        run = f" in a run of {advice.steps} steps" if advice.mixed else ""
        default = "" if base.candidate.overrides else ", train.py's default"
        if sum(entry.timed for entry in advice.entries) == 1 and advice.stopped == BUDGET:
            return f"{base.label}{default}: no other setting was measured in {duration(advice.spent_s)} min"
        return f"{base.label}{default}: {setting} {better} here{scope}{run}{healthy}{others}"
    assert winner.interval is not None
    whole = winner.run_interval if advice.mixed else None
    times = f"{_times(winner.interval)} as fast as {base.label}"
    if base.candidate.compiles and not winner.candidate.compiles and whole is not None:
        times = f"{_times(whole)} as fast as {base.label}{included}"
    facts = [times, _memory(winner, base)]
    if advice.goal == MEMORY:
        facts.reverse()
    said = f"{winner.label}: {', '.join(filter(None, facts))}{healthy}"
    if winner.candidate.compiles and winner.pays_after_steps is not None:
        said += f"; compiling pays off after {winner.pays_after_steps} steps"
    if winner.candidate.compiles and whole is not None:
        said += f"; {_times(whole)} as fast{included}"
    return said + others + "; not all settings were measured" * (advice.stopped == BUDGET)


def _times(speed: Interval) -> str:
    return f"{speed.mean:.3g}x [{speed.low:.3g}, {speed.high:.3g}]"


def _memory(entry: Entry, base: Entry) -> str:
    if not entry.memory_bytes or not base.memory_bytes:
        return ""
    change = entry.memory_bytes / base.memory_bytes - 1
    if abs(change) < 0.01:
        return "the same memory"
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'} memory"


def print_advice(advice: Advice, console: Console) -> None:
    """Print the sentence, the table, what was not measured, the notes, and the commands."""

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"\n{sentence(advice)}\n", "bold")
    console.print(table(advice))
    for line in remarks(advice):
        say(line, "dim")
    for note in advice.notes:
        say(f"Note: {note}.")
    say(f"{_ended(advice)}\n")
    say(f"  {training(advice)}\n")
    if advice.winner != advice.baseline:
        say(f"Does it train as well? {comparison(advice)}")


def write_report(advice: Advice, folder: Path) -> Path:
    """Write ``report.html``, and return it.

    Raises:
        OSError: they cannot be written.
    """
    plots = [drawn] if (drawn := plot(advice)) else []
    better = [Section("Does it train as well?", text=comparison(advice))] * (advice.winner != advice.baseline)
    notes = [*remarks(advice), *(f"Note: {note}." for note in advice.notes)]
    report = Report(
        "Advice",
        f"{advice.recipe} on {advice.hardware.get('name', advice.machine)}",
        [f"{sentence(advice)}."],
        advice.command,
        measured_on(advice.hardware, advice.versions, advice.git),
        [
            Section("Train with it", text=training(advice)),
            *better,
            Section("What was measured", [_ended(advice)], notes, rows(advice), plots=plots),
        ],
    )
    write_text(folder / "report.html", report.html())
    return folder / "report.html"


def remarks(advice: Advice) -> list[str]:
    """Return what was not measured and why, and what compiling took."""
    found = []
    for entry in advice.entries:
        if entry.status != MEASURED:
            found.append(f"{entry.status}: {entry.label} ({entry.reason})")
        elif entry.candidate.compiles:
            pays = f" and pays off after {entry.pays_after_steps} steps" if entry.pays_after_steps is not None else ""
            found.append(f"compiling took {entry.compile_s:.1f} s{pays}: {entry.label}")
    return found


def _ended(advice: Advice) -> str:
    return f"Measured for {duration(advice.spent_s)} min on {advice.hardware['name']}: {ENDED[advice.stopped]}."


def rows(advice: Advice) -> list[list[str]]:
    """Return the head of the table, and the measured entries, the advised one first.

    A speed without an interval is of one process.
    """
    whole = [f"run of {advice.steps}"] * advice.mixed
    found = [["setting", "speed", *whole, "step, ms", "memory"]]
    for entry in advice.entries:
        if not entry.timed:
            continue
        base = entry.label == advice.baseline
        roles = {
            "advised": entry.label == advice.winner,
            "default": base and not entry.candidate.overrides,
            f"not clearly {'larger' if advice.goal == MEMORY else 'slower'}": entry.label in advice.equal,
        }
        said = ", ".join(role for role, has in roles.items() if has)
        found.append(
            [
                entry.label + f" ({said})" * bool(said),
                "1x" if base else _times(entry.interval) if entry.interval else f"about {entry.speed:.3g}x",
                *([f"{entry.run_speed:.3g}x"] if whole else []),
                f"{1e3 * statistics.median(entry.step_s):.4g}",
                size(entry.memory_bytes) if entry.memory_bytes else "",
            ]
        )
    return found


def table(advice: Advice) -> Table:
    """Return the measured entries for a terminal."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    head, *below = rows(advice)
    shown.add_column(head[0], min_width=16, overflow="fold")
    for name in head[1:]:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in below:
        shown.add_row(*map(escape, row), style="bold" if row is below[0] else None)
    if advice.mixed:
        shown.caption = f"{head[2]}: speed in a run of {advice.steps} steps, compile time included"
        shown.caption_justify = "left"
    return shown


def plot(advice: Advice) -> Plot | None:
    """Draw peak memory to the right and throughput upwards; None: too little was measured."""
    shown = [entry for entry in advice.entries if entry.timed and entry.speed and entry.memory_bytes]
    if len(shown) < 2:
        return None
    figure, axes = bare_figure(4.8, 3.4)
    axes.set_xlabel("peak memory of a step, MiB", color=QUIET)
    axes.set_ylabel(f"speed / {advice.baseline}", color=QUIET)
    axes.grid(color=RULE, linewidth=0.8)
    named = {advice.winner: COLORS[2], advice.baseline: COLORS[0]}
    for entry in shown:
        point = (entry.memory_bytes or 0) / MIB, entry.speed or 0.0
        axes.plot(*point, "o", color=named.get(entry.label, NOISE))
        if entry.label in named:
            axes.annotate(entry.label, point, xytext=(6, 6), textcoords="offset points", color=INK)
    axes.margins(x=0.2, y=0.1)
    return f"Speed and memory of each setting: {advice.recipe}", figure
