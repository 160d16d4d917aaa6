"""The report of a comparison: for the terminal, as a page, and its plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from evidence.comparison.compare import Result
from evidence.comparison.plots import figures
from mantissa.display import counted, mebibytes
from mantissa.verdict.judge import Quality, Ratio, Row
from mantissa.verdict.page import Plot, Report, Section, measured_on
from mantissa.verdict.report import (
    EQUAL_LOSS,
    METHOD,
    about_looks,
    failures,
    mean_loss,
    reach_cells,
    reach_sentence,
    times,
    with_level,
)
from mantissa.verdict.statistics import BETTER, EQUIVALENT, INCONCLUSIVE, NOT_JUDGED, WORSE, Interval
from trainer.precision.kernels import in_short

QUALITY = ("arm", "quality", "difference", "steps to equal loss", "time to equal loss")
COST = ("arm", "speedup", "memory ratio", "throughput", "peak memory", "valid. loss")


def report(result: Result, plots: Sequence[Plot] = ()) -> Report:
    """Return the report: what one would tell a colleague, the numbers, and how they were measured."""
    sections = [
        Section("Quality", table=quality_rows(result)),
        Section("Cost", table=cost_rows(result)),
        Section("Notes", items=notes(result)),
        Section("Plots", plots=plots),
        Section("How it was measured", method(result), folded=True),
    ]
    origin = measured_on(*(result.facts[key] for key in ("hardware", "versions", "git")))
    arms = " and ".join(arm.label for arm in result.plan.arms[1:])
    title = f"{arms} against {result.plan.baseline}, {result.facts['recipe']}"
    return Report("Comparison", title, lead(result), result.facts["command"], origin, sections)


def write_report(result: Result) -> Path:
    """Write the page, the text, and the plots as PNG; return the page."""
    folder, drawn = result.plan.folder, figures(result)
    page = report(result, list(drawn.values())).write(folder)
    for name, (_, figure) in drawn.items():
        figure.savefig(folder / f"{name}.png")
    return page


def quality_rows(result: Result) -> list[tuple[str, ...]]:
    """Return the head, and for each arm its verdict, and what it takes to the baseline's final loss."""
    table: list[tuple[str, ...]] = [QUALITY]
    for label, row in result.rows.items():
        verdict = row.quality.verdict
        difference, reached = with_level(row.quality.interval), reach_cells(row.reach, not verdict)
        table.append((label, verdict or "(baseline)", difference, *reached))
    return table


def cost_rows(result: Result) -> list[tuple[str, ...]]:
    """Return the head, a row for each arm, and the drift of speed: that of the baseline's last run over its first."""
    table: list[tuple[str, ...]] = [COST]
    for label, row in result.rows.items():
        speed, memory = row.ratios["speed"], row.ratios["memory"]
        rate = _mean(speed.value, speed.values, lambda value: f"{value:,.0f} {result.facts['unit']}/s")
        rate += in_short(result.arithmetic(label))
        peak = _mean(memory.value, memory.values, lambda value: f"{mebibytes(value)} MiB")
        is_baseline = label == result.plan.baseline
        ratios = _ratio(speed, is_baseline), _ratio(memory, is_baseline)
        table.append((label, *ratios, rate, peak, mean_loss(result.runs[label]) or "not measured"))
    speeds = result.rows[result.plan.baseline].ratios["speed"].values
    if len(speeds) > 1:
        table.append((f"drift of {result.plan.baseline}", f"{speeds[-1] / speeds[0]:.2f}x", "", "", "", ""))
    return table


def lead(result: Result) -> list[str]:
    """Return what one would tell a colleague of each arm, in a sentence or two."""
    return [_arm(result, label, row) for label, row in result.rows.items() if label != result.plan.baseline]


def _arm(result: Result, label: str, row: Row) -> str:
    baseline = result.plan.baseline

    # What it costs, in a clause each; only the first says what it is compared with.
    costs: list[str] = []
    not_judged: dict[str, list[str]] = {}  # quantities by the reason
    for name, quantity in row.ratios.items():
        if quantity.why and quantity.values:
            not_judged.setdefault(quantity.why, []).append(name)
        elif quantity.ratio:
            text, word = _cost(name, quantity.ratio)
            costs.append(text if costs else f"{text} {word} {baseline}")

    # Whether it trains as well, and what it takes to be as good.
    loss_is = _loss_is(row.quality, f"{100 * result.plan.margin:g} %")
    if row.quality.verdict == NOT_JUDGED:
        not_judged.setdefault(row.quality.why, []).append("validation loss")
    clauses = "; ".join(filter(None, (" and ".join(costs), loss_is)))
    parts = [f"{label}{'' if costs else ':'} {clauses}." if clauses else f"{label}:"]
    parts += filter(None, [reach_sentence(row.reach, f"final loss of {baseline}")])

    # What is open, and why.
    if not_judged:
        reasons = (f"{' and '.join(names)} ({why})" for why, names in not_judged.items())
        parts.append(f"{NOT_JUDGED}: {'; '.join(reasons)}.")
    return " ".join(parts)


def _loss_is(quality: Quality, margin: str) -> str:
    verdict = quality.verdict
    if verdict == EQUIVALENT:
        return f"its validation loss is the same within {margin}"
    if verdict == INCONCLUSIVE:
        return f"whether its validation loss is the same within {margin} is open"
    if verdict in (WORSE, BETTER):
        by = f" by {abs(100 * quality.test.difference.mean):.2g} %" if quality.test else f": {quality.why}"
        return f"its validation loss is {verdict.lower()}{by}"
    return ""


def _cost(name: str, ratio: Interval) -> tuple[str, str]:
    """Return a predicate of an arm, and the word before what it is compared with."""
    size = abs(100 * (ratio.mean - 1))
    change = f"{size:.0f} %" if size >= 1 else f"{size:.1g} %"
    if name != "speed":
        if ratio.low == ratio.high == 1:
            return f"needs as much {name}", "as"
        text, word = f"needs {change} {'less' if ratio.mean < 1 else 'more'} {name}", "than"
    elif 0.5 < ratio.mean < 1.5:
        text, word = f"is {change} {'faster' if ratio.mean > 1 else 'slower'}", "than"
    else:
        text, word = f"is {ratio.mean:.2g}x as fast", "as"
    return (text, word) if ratio.excludes(1) else (f"shows no clear difference in {name}", "from")


def notes(result: Result) -> list[str]:
    """Return a sentence for each failure, each verdict that needs a word, skipped steps, and the looks."""
    sentences = []
    for label, row in result.rows.items():
        sentences += failures(label, result.failures(label))
        if skipped := result.skipped_steps(label):
            steps = result.facts["steps"] * len(result.finished(label))
            sentences.append(f"{label} skipped {skipped:,} of {steps:,} steps for an overflow.")
        if worse := result.worse_than_before(label):
            runs = f"{len(worse)} of {counted(len(result.finished(label)), 'run')}"
            sentences.append(f"{label}: the final loss is higher than before training in {runs}.")
        if row.quality.why and row.quality.verdict != NOT_JUDGED:
            sentences.append(f"{label}: {row.quality.why}.")
    return [*sentences, *about_looks(result.looks)]


def method(result: Result) -> list[str]:
    """Return the paragraphs on how it was measured."""
    return [
        f"{result.facts['steps']} optimizer steps, seeds {', '.join(map(str, result.plan.seeds))}. With one seed, all "
        "arms have the same initial weights and data order. They run one after another, each in a fresh process, and "
        "their order alternates from seed to seed. Ratios are geometric means over the pairs, with Student's 95 % "
        "interval of the logarithms in brackets. docs/comparing.md says what is measured.",
        METHOD,
        f"{EQUAL_LOSS} Time is the steps times the run's seconds per step in training, without start and evaluation.",
    ]


def _mean(interval: Interval | None, values: list[float], show: Callable[[float], str]) -> str:
    if not values:
        return "not measured"
    middle = show(sum(values) / len(values))
    if interval is None or min(values) == max(values):
        return middle
    half = (interval.high - interval.low) / 2 / interval.mean
    return f"{middle} ± {100 * half:.1f} %" if half < 1 else f"{middle} ± over 100 %"


def _ratio(quantity: Ratio, is_baseline: bool) -> str:
    if quantity.why and quantity.values:
        return NOT_JUDGED
    if quantity.ratio is not None:
        return times(quantity.ratio)
    return "1" if quantity.values and is_baseline else "not measured"
