"""The advice for people: one sentence, a table, and a picture of speed against memory."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evidence.advice.schema import AHEAD, BUDGET, MEASURED, MEMORY, SEVERAL, UNDECIDED, Advice, Entry
from mantissa.display import duration, size
from mantissa.page import COLORS, NOISE
from mantissa.statistics import Interval
from trainer.profiling.ledger import MIB
from trainer.tracking.plots import INK, QUIET, bare_figure

ENDED = {
    AHEAD: "one setting is ahead",
    SEVERAL: "the best settings are equal",
    UNDECIDED: "the times vary too much to decide; fresh=true measures again, best on a quieter machine",
    BUDGET: "there was no time for all of it; a larger budget_minutes continues from here",
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
        said += f"; compiling pays after {winner.pays_after_steps} steps"
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
    """Print the sentence, the table, what was not measured, and the notes."""

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"\n{sentence(advice)}\n", "bold")
    console.print(table(advice))
    for entry in advice.entries:
        if entry.status != MEASURED:
            say(f"{entry.status}: {entry.label} ({entry.reason})", "dim")
        elif entry.candidate.compiles:
            pays = f" and pays after {entry.pays_after_steps} steps" if entry.pays_after_steps is not None else ""
            say(f"compiling took {entry.compile_s:.1f} s{pays}: {entry.label}", "dim")
    for note in advice.notes:
        say(f"Note: {note}.")
    say(f"Measured for {duration(advice.spent_s)} min on {advice.hardware['name']}: {ENDED[advice.stopped]}.")
    say("")


def table(advice: Advice) -> Table:
    """Return the measured entries, the advised one first. A speed without an interval is of one process."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    shown.add_column("setting", min_width=16, overflow="fold")
    whole = [f"run of {advice.steps}"] * advice.mixed
    for name in ("speed", *whole, "step, ms", "memory"):
        shown.add_column(name, justify="right", no_wrap=True)
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
        cells = [
            escape(entry.label + f" ({said})" * bool(said)),
            "1x" if base else _times(entry.interval) if entry.interval else f"about {entry.speed:.3g}x",
            *([f"{entry.run_speed:.3g}x"] if whole else []),
            f"{1e3 * statistics.median(entry.step_s):.4g}",
            size(entry.memory_bytes) if entry.memory_bytes else "",
        ]
        shown.add_row(*cells, style="bold" if entry.label == advice.winner else None)
    if whole:
        shown.caption = f"{whole[0]}: speed in a run of {advice.steps} steps, compile time included"
        shown.caption_justify = "left"
    return shown


def picture(advice: Advice, path: Path) -> Path | None:
    """Draw peak memory to the right and throughput upwards into a PNG; None: too little was measured.

    Raises:
        OSError: it cannot be written.
    """
    shown = [entry for entry in advice.entries if entry.timed and entry.speed and entry.memory_bytes]
    if len(shown) < 2:
        return None
    figure, axes = bare_figure(9, 5)
    axes.set_title(f"{advice.recipe} on {advice.hardware.get('name', advice.machine)}", loc="left", color=INK)
    axes.set_xlabel("peak memory of a step, MiB", color=QUIET)
    axes.set_ylabel(f"throughput of steps, times that of {advice.baseline}", color=QUIET)
    axes.grid(color="#e8eaed", linewidth=0.8)
    named = {advice.baseline: COLORS[0], advice.winner: COLORS[2]}
    for entry in shown:
        point = (entry.memory_bytes or 0) / MIB, entry.speed or 0.0
        axes.plot(*point, "o", color=named.get(entry.label, NOISE))
        if entry.label in named:
            axes.annotate(entry.label, point, xytext=(6, 6), textcoords="offset points", color=INK)
    axes.margins(x=0.2, y=0.1)
    figure.savefig(path)
    return path
