"""A comparison in words: sentences, cells of tables, the page, and the file of its numbers."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from mantissa import display
from mantissa.verdict.comparison import Comparison
from mantissa.verdict.equal_loss import Reach
from mantissa.verdict.judge import Quality
from mantissa.verdict.page import Report, Section
from mantissa.verdict.runs import Look, Run
from mantissa.verdict.statistics import EQUIVALENT, NOT_JUDGED, Interval, look_level

METHOD = (
    "EQUIVALENT: two one-sided t-tests on the paired relative differences (Schuirmann 1987), of 4 % at "
    "the first look, so that their 92 % interval lies within the margin. WORSE and BETTER: their whole 96 % "
    "interval is beyond it. Looks with more seeds have stricter tests (alpha spending, Lan and DeMets 1983), and "
    "with several arms the intervals are wider, by Holm's correction, so that the chance of any wrong verdict, of all "
    "arms and looks, is at most 5 %. The interval beside a verdict is the one that decided."
)
EQUAL_LOSS = (
    "Equal is the baseline's final value of the same seed, within the margin: where the best so far first is as good, "
    "interpolated between two evaluations, and for the baseline, too, so that equal arms have a ratio of 1. A ratio is "
    "of all seeds or of none. Its interval, of 96 % at the first look, is wider with more arms (Holm) and looks, so "
    "that the chance that any wrongly excludes 1 is 5 %."
)
_WALL = "Wall times are of whole runs, their start included; other work on the machine is not taken out."


def report(comparison: Comparison, command: str) -> Report:
    """Return the report: failures and verdicts in sentences, a table, and how it was measured."""
    arms = [f"{label}: {text}" for label, text in comparison.arms.items()]
    method = [METHOD, EQUAL_LOSS] if _has_curves(comparison) else [METHOD]
    sections = [
        Section("Results", table=_table(comparison), sentences=[_WALL]),
        Section("Arms", items=arms, folded=True),
        Section("How it was measured", method, folded=True),
    ]
    way, turn = ("Higher", "says so") if comparison.higher_is_better else ("Lower", "turns it round")
    # The argument of ``precision_gate``, and the flag of the command.
    option = "higher_is_better, or --higher-is-better,"
    better = f"{way} {comparison.metric.rstrip(' :=')} counts as better; {option} {turn}."
    answer = [*_sentences(comparison), better, *about_looks(comparison.looks)]
    origin = f"Machine: {platform.platform()}."
    return Report("Comparison", " / ".join(comparison.arms), answer, command, origin, sections)


def write(comparison: Comparison, folder: str | Path, command: str) -> Path:
    """Write the report and ``comparison.json`` into a folder; return the page's path."""
    page = report(comparison, command).write(Path(folder), "comparison")
    content = asdict(comparison)
    content["runs"] = [run for of_arm in content["runs"].values() for run in of_arm.values()]
    rows = content.pop("rows")
    content["verdicts"] = {label: row["quality"] for label, row in rows.items()}
    content["reached"] = {label: row["reach"] for label, row in rows.items()} if _has_curves(comparison) else {}
    page.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return page


def _has_curves(comparison: Comparison) -> bool:
    return any(len(run.curve[1]) for of_arm in comparison.runs.values() for run in of_arm.values())


def _table(comparison: Comparison) -> list[tuple[str, ...]]:
    head = ["arm", "quality", "difference", comparison.metric, "wall time"]
    table = [(*head, "steps to equal") if _has_curves(comparison) else tuple(head)]
    for label, row in comparison.rows.items():
        is_baseline = label == comparison.baseline

        # How long the arm takes, and the mean of the metric.
        minutes = row.ratios["minutes"]
        if is_baseline:
            took = f"{60 * fmean(minutes.values):.1f} s" if minutes.values else ""
        else:
            took = times(minutes.ratio) if minutes.ratio else ""
        mean = mean_loss(comparison.runs[label])
        difference = with_level(_difference(row.quality, comparison.higher_is_better))
        cells = (label, row.quality.verdict or "(baseline)", difference, mean, took)
        table.append((*cells, reach_cells(row.reach, is_baseline)[0]) if _has_curves(comparison) else cells)
    return table


def _sentences(comparison: Comparison) -> list[str]:
    """Return the failures and, but for the baseline, the verdict of each arm."""
    sentences = []
    for label, row in comparison.rows.items():
        # What failed.
        failed = {seed: run.failure for seed, run in comparison.runs[label].items() if run.failure}
        sentences += failures(label, failed)
        if label == comparison.baseline:
            continue

        # The verdict, with what a reader may stumble over.
        quality, sign = row.quality, -1 if comparison.higher_is_better else 1
        difference = with_level(_difference(quality, comparison.higher_is_better))
        clauses = [f"{comparison.metric} {difference}".strip() + f": {_verdict(quality)}"]
        if quality.differences and not any(quality.differences):
            clauses.append("equal in every digit, with each seed")
        if any(change > 49 or change < -0.98 for change in (sign * change for change in quality.differences)):
            clauses.append("check that both print it in one unit")
        if quality.why:
            clauses.append(quality.why)
        verdict = f"{label}, compared with {comparison.baseline}: {'; '.join(clauses)}."

        # What it takes to be as good.
        reach = reach_sentence(row.reach, f"final {comparison.metric} of {comparison.baseline}")
        sentences.append(f"{verdict} {reach}" if reach and _has_curves(comparison) else verdict)
    return sentences


def _verdict(quality: Quality) -> str:
    """Return the verdict with the margin that it was judged by."""
    if not quality.test:
        return quality.verdict
    p = f" (p = {quality.test.p_equivalent:.2g})" if quality.verdict == EQUIVALENT else ""
    return f"{quality.verdict} at a margin of {100 * quality.test.margin:g} %{p}"


def _difference(quality: Quality, higher_is_better: bool) -> Interval | None:
    """Return the relative change of the metric, whichever direction is better; None: too few pairs."""
    interval = quality.interval
    if interval and higher_is_better:
        return replace(interval, mean=-interval.mean, low=-interval.high, high=-interval.low)
    return interval


# --- parts that all reports share ---


def failures(arm: str, reasons: Mapping[int, str]) -> list[str]:
    """Return a sentence for each reason why runs of an arm failed, which are given by seed."""
    seeds_of: dict[str, list[str]] = {}
    for seed, why in reasons.items():
        seeds_of.setdefault(why, []).append(str(seed))
    return [
        f"{arm}, {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(seeds)}, failed: {why}"
        for why, seeds in seeds_of.items()
    ]


def mean_loss(runs: Mapping[int, Run]) -> str:
    """Return the mean of an arm's final losses that are finite, and of how many runs, if not of all; empty: no loss."""
    losses = [run.values["loss"] for run in runs.values() if "loss" in run.values]
    finite = [value for value in losses if value is not None]
    if not finite:
        return "not finite" if losses else ""
    return display.loss(fmean(finite)) + (f" ({len(finite)} of {len(runs)})" if len(finite) < len(runs) else "")


def about_looks(looks: Sequence[Look]) -> list[str]:
    """Return the sentence on the last look and its level; none where nothing was judged."""
    if not looks:
        return []
    now, later = (f"{100 * look_level(number):.3g} %" for number in (len(looks), len(looks) + 1))
    return [
        f"Look {len(looks)}, {len(looks[-1]['seeds'])} seeds: α = {now}. With more seeds: α = {later}. "
        "All looks together: 5 %."
    ]


def reach_cells(reach: Reach, is_baseline: bool) -> tuple[str, str]:
    """Return steps and time to an equal loss, as a table has them: the baseline's own, and ratios to them."""
    if is_baseline:
        steps, seconds = list(filter(None, reach.steps.values())), reach.seconds.values()
        return f"{fmean(steps):.0f}" if steps else "", f"{fmean(seconds):.1f} s" if seconds else ""
    if not reach.steps_ratio:
        return reach.instead or NOT_JUDGED, ""
    return times(reach.steps_ratio), times(reach.seconds_ratio) if reach.seconds_ratio else NOT_JUDGED


def reach_sentence(reach: Reach, goal: str) -> str:
    """Return what it takes to a goal such as ``final loss of fp32``; empty: that is not judged."""
    if reach.instead:
        return f"The {goal} is {reach.instead}."
    amounts = (("steps", "fewer", reach.steps_ratio), ("time", "less", reach.seconds_ratio))
    changes = [_change(name, less, ratio) for name, less, ratio in amounts if ratio]
    return f"To the {goal}: {', '.join(changes)}." if changes else ""


def _change(name: str, less: str, ratio: Interval) -> str:
    if not ratio.excludes(1):
        return f"no clear difference in {name}"
    return f"{abs(100 * (ratio.mean - 1)):.2g} % {less if ratio.mean < 1 else 'more'} {name}"


def percent(interval: Interval) -> str:
    """Return an interval of relative differences as ``+0.01 % [-0.05, +0.07]``."""
    mean, low, high = (f"{100 * value:+.2f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} % [{low}, {high}]"


def with_level(interval: Interval | None) -> str:
    """Return an interval of relative differences with its level; empty: there is none."""
    return f"{percent(interval)} ({100 * interval.level:.3g} %)" if interval else ""


def times(interval: Interval) -> str:
    """Return an interval of ratios as ``1.02x [0.97, 1.06]``."""
    if interval.high - interval.low < 0.005:
        return f"{interval.mean:.3f}x"
    return f"{interval.mean:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"
