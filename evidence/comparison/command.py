"""The command line of scripts/compare.py."""

from __future__ import annotations

import shlex

from evidence.comparison.compare import ComparisonPlan, Result, check_arms, compare
from evidence.comparison.report import report, write_report
from evidence.options import CompareOptions, margin_of, seeds_of
from evidence.runs import Arm, check_labels, redacted_arguments
from mantissa.verdict.compare import SEED_SHIFT
from trainer.config.options import parse
from trainer.errors import UserError, nearest


def main(arguments: list[str]) -> int:
    """Train the arms, report; the exit code is 1 where a run failed."""
    return int(compared(arguments).failed)


def compared(arguments: list[str]) -> Result:
    """Train the arms, report, and return the result.

    Raises:
        UserError: the arguments cannot work.
    """
    plan = planned(arguments)
    configs = check_arms(plan)
    result = compare(plan, configs, shlex.join(["python", "scripts/compare.py", *redacted_arguments(arguments)]))
    files = write_report(result)
    print(f"\n{report(result).text()}\n\nreport {files[0]}")
    return result


def planned(arguments: list[str]) -> ComparisonPlan:
    """Read the command line; what is not an option of the comparison is an override of all arms."""
    options, others = parse(arguments, CompareOptions, "overrides")
    common, pairs = options.split(others)
    arms: list[Arm] = []
    for place, (label, overrides) in enumerate(pairs):
        before = pairs[:place].count((label, overrides))
        name = f"{label}-{before + 1}" if before else label
        arms.append(Arm(name, tuple(overrides), SEED_SHIFT * before))
    labels = [arm.label for arm in arms]
    check_labels(labels)
    baseline = options.baseline or arms[0].label
    if baseline not in labels:
        raise UserError(f"baseline={baseline} is not among the arms ({', '.join(labels)}){nearest(baseline, labels)}")
    arms.sort(key=lambda arm: arm.label != baseline)  # a stable sort: the baseline comes first
    margin = margin_of(options.margin)
    return ComparisonPlan(arms, seeds_of(options.seeds), margin, common, options.output_dir, options.name)
