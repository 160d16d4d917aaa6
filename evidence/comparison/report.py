"""The report of a comparison: for the terminal, as Markdown, and as one self-contained page of HTML."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from evidence.comparison import plots as compare_plots
from evidence.comparison.compare import Result
from evidence.comparison.judge import ArmResult, Ratio
from evidence.measures import IN_USE
from mantissa.display import columns, loss, mebibytes
from mantissa.page import Plot, Report, Section, measured_on
from mantissa.quality import METHOD, NOT_JUDGED, PAIRS, failed, percent, times, told, verdict_at
from mantissa.statistics import Interval, mean_interval
from trainer.devices import kind_of
from trainer.files import write_text

QUALITY = ("quality", "difference", "valid. loss")
COST = ("speedup", "memory ratio", "throughput", "peak memory")
HEAD = ("arm", *QUALITY, *COST)
"""The verdicts first: they are in sight wherever a table ends."""


def write_report(result: Result, command: list[str]) -> list[Path]:
    """Write ``report.md``, ``report.html`` and the plots as PNG beside them; return the files, the page first."""
    folder = result.comparison.folder
    figures = compare_plots.figures(result)
    for name, (_, figure) in figures.items():
        figure.savefig(folder / f"{name}.png")
    images = "".join(f"![{title}]({name}.png)\n\n" for name, (title, _) in figures.items())
    write_text(folder / "report.md", markdown(result, command, images))
    write_text(folder / "report.html", _page(result, command, list(figures.values())))
    return [folder / name for name in ("report.html", "report.md", *(f"{name}.png" for name in figures))]


def rows(result: Result) -> list[tuple[str, ...]]:
    """Return the table: its head, and a row for each arm."""
    unit = result.facts["unit"]
    lines = [
        (
            f"{arm.label} (baseline)" if arm.label == result.comparison.baseline else arm.label,
            "noise" if arm.is_null and arm.quality.verdict else arm.quality.verdict,
            _difference(arm),
            _mean(None, arm.quality.values, loss),
            _ratio(result, arm, arm.speed),
            _ratio(result, arm, arm.memory),
            _mean(arm.speed.value, arm.speed.values, lambda v: f"{v:,.0f} {unit}/s")
            + (" in fp32 arithmetic" if arm.arithmetic else ""),
            _mean(arm.memory.value, arm.memory.values, lambda v: f"{mebibytes(v)} MiB"),
        )
        for arm in result.arms
    ]
    return [HEAD, *lines]


def table(result: Result) -> str:
    """Return two tables for a terminal of 80 columns or little more: the cost of each arm, and its quality."""
    lines = rows(result)
    first = 1 + len(QUALITY)
    costs, qualities = [(line[0], *line[first:]) for line in lines], [line[:first] for line in lines]
    return f"{columns(costs)}\n\n{columns(qualities)}"


def lead(result: Result) -> list[str]:
    """Return what one would tell a colleague of each arm, in a sentence or two."""
    return [_told(result, arm) for arm in result.arms if arm.label != result.comparison.baseline and not arm.is_null]


def _told(result: Result, arm: ArmResult) -> str:
    costs: list[str] = []
    not_judged: dict[str, list[str]] = {}  # quantities by the reason
    for name, quantity in (("speed", arm.speed), ("memory", arm.memory)):
        if quantity.why and quantity.values:
            not_judged.setdefault(quantity.why, []).append(name)
        elif quantity.ratio:
            text, word = _cost(name, quantity.ratio)
            costs.append(text if costs else f"{text} {word} {result.comparison.baseline}")
    loss_is = _loss_is(arm, f"{100 * result.comparison.margin:g} %")
    if arm.quality.verdict == NOT_JUDGED:
        not_judged.setdefault(arm.quality.why, []).append("validation loss")
    clauses = "; ".join(filter(None, (" and ".join(costs), loss_is)))
    parts = [f"{arm.label}{'' if costs else ':'} {clauses}." if clauses else f"{arm.label}:"]
    if not_judged:
        reasons = (f"{' and '.join(names)} ({why})" for why, names in not_judged.items())
        parts.append(f"{NOT_JUDGED}: {'; '.join(reasons)}.")
    return " ".join(parts)


def _loss_is(arm: ArmResult, margin: str) -> str:
    quality = arm.quality
    match quality.verdict:
        case "EQUIVALENT":
            return f"its validation loss is the same within {margin}"
        case "INCONCLUSIVE":
            return f"whether its validation loss is the same within {margin} is open"
        case "WORSE" | "BETTER" as verdict:
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


def sentences(result: Result) -> list[str]:
    """Return one sentence for each arm with its numbers, and one for each failure."""
    found = []
    base = result.comparison.baseline
    for arm in result.arms:
        found += failed(arm.label, arm.failures)
        if arm.is_null and arm.seeds:
            found.append(_null_sentence(arm, base))
        elif not arm.is_null and arm.label != base:
            found.append(_sentence(result, arm))
    return [*found, *told(result.looks)]


def _sentence(result: Result, arm: ArmResult) -> str:
    quality = arm.quality
    named = (("speed", arm.speed), ("memory", arm.memory))
    clauses = [_change(name, quantity) for name, quantity in named if quantity.ratio]
    if arm.skipped_steps:
        clauses.append(
            f"{arm.skipped_steps} of {result.facts['steps'] * len(arm.seeds):,} steps skipped for an overflow"
        )
    clauses.append(f"{f'validation loss {_difference(arm)}'.strip()}: {verdict_at(quality)}")
    if quality.why:
        clauses.append(quality.why)
    return f"{arm.label}: {'; '.join(clauses)}."


def _change(name: str, quantity: Ratio) -> str:
    """Return a ratio as ``speed -5.1 % [-7.9, -2.3]``."""
    ratio = quantity.ratio
    assert ratio
    if ratio.low == ratio.high == 1:
        return f"{name} the same"
    mean, low, high = (100 * (value - 1) for value in (ratio.mean, ratio.low, ratio.high))
    text = f"{name} {mean:+.1f} %" + f" [{low:+.1f}, {high:+.1f}]" * (high - low >= 0.5)
    if quantity.why:
        return f"{text}: {NOT_JUDGED}"
    return text if ratio.excludes(1) else f"{text}: no clear difference"


def method(result: Result) -> list[str]:
    """Return the paragraphs on how it was measured."""
    facts, seeds = result.facts, ", ".join(map(str, result.comparison.seeds))
    memory, warmup = "the peak that the GPU's allocator has allocated", "first step"
    if not kind_of(facts["hardware"]["device"]).own_memory:
        memory = "every tensor alive at the peak of one optimizer step, by a ledger (compiled models run eagerly in it)"
        warmup = "first log interval"
    return [
        f"{facts['steps']} optimizer steps, seeds {seeds}. With one seed, all arms have the same "
        "initial weights and data order. They run one after another, each in a fresh process, and their order "
        "alternates from seed to seed.",
        f"Throughput leaves out the {warmup}, evaluation and checkpoints. Memory is {memory}.",
        "Ratios are geometric means over the pairs, with Student's 95 % interval of the logarithms in brackets.",
        METHOD,
        f"NOT JUDGED: fewer than {PAIRS} pairs, or the null arm's 95 % interval excludes equality. Speed is not judged "
        f"either if other processes used {IN_USE:.0%} of the CPUs or more; the loss does not depend on them.",
    ]


def markdown(result: Result, command: list[str], images: str) -> str:
    """Return ``report.md``."""
    lines = [f"# {result.comparison.name}", "", "\n\n".join(lead(result)), "", f"    {shlex.join(command)}", ""]
    lines += [f"- {sentence}" for sentence in sentences(result)]
    head, *below = rows(result)
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in below]
    lines += ["", images, "## How it was measured", "", _origin(result), *method(result), ""]
    return "\n".join(lines)


def _page(result: Result, command: list[str], plots: list[Plot]) -> str:
    report = Report(
        "Comparison",
        result.comparison.name,
        lead(result),
        shlex.join(command),
        _origin(result),
        [
            Section("Results", table=rows(result)),
            Section("Plots", plots=plots),
            Section("In numbers", items=sentences(result)),
            Section("How it was measured", method(result)),
        ],
    )
    return report.html()


def _origin(result: Result) -> str:
    return measured_on(*(result.facts[key] for key in ("hardware", "versions", "git")))


def _mean(interval: Interval | None, values: list[float], show: Callable[[float], str]) -> str:
    if not values:
        return "not measured"
    middle = show(sum(values) / len(values))
    if interval is None or min(values) == max(values):
        return middle
    half = (interval.high - interval.low) / 2 / interval.mean
    return f"{middle} ± {100 * half:.1f} %" if half < 1 else f"{middle} ± over 100 %"


def _ratio(result: Result, arm: ArmResult, quantity: Ratio) -> str:
    if quantity.why and quantity.values:
        return NOT_JUDGED
    if quantity.ratio is not None:
        return times(quantity.ratio)
    return "1" if quantity.values and arm.label == result.comparison.baseline else "not measured"


def _difference(arm: ArmResult) -> str:
    interval = arm.quality.shown(arm.is_null)
    return f"{percent(interval)} ({100 * interval.level:.3g} %)" if interval else ""


def _null_sentence(arm: ArmResult, base: str) -> str:
    parts = []
    if len(arm.quality.differences) > 1:
        parts.append(f"final losses by {percent(mean_interval(arm.quality.differences))}")
    if arm.speed.ratio:
        parts.append(f"speed by {times(arm.speed.ratio)}")
    differs = " and in ".join(parts) or "nothing that was measured"
    return f"Noise: {base} with other seeds differs from {base} in {differs}."
