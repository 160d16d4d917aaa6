"""The command line of scripts/compare.py."""

from __future__ import annotations

from evidence.comparison.compare import Comparison, Result, check_arms, compare
from evidence.comparison.mlflow import publish_comparison
from evidence.comparison.report import lead, sentences, table, write_report
from evidence.options import CompareOptions, margin_of, seeds_of
from evidence.runs import Arm, check_labels, recorded
from mantissa.quality import NULL, NULL_SHIFT
from trainer.config.options import parse
from trainer.errors import UserError, nearest
from trainer.tracking.mlflow.addresses import tracking_uri


def main(arguments: list[str]) -> int:
    """Train the arms, report; the exit code is 1 where a run failed."""
    return int(compared(arguments).failed)


def compared(arguments: list[str]) -> Result:
    """Train the arms, report, and return the result.

    Raises:
        UserError: the arguments cannot work.
    """
    comparison = planned(arguments)
    configs = check_arms(comparison)
    result = compare(comparison, configs)
    files = write_report(result, ["python", "scripts/compare.py", *recorded(arguments)])
    print("\n" + "\n\n".join(["\n".join(lead(result)), table(result), "\n".join(sentences(result))]))
    print(f"\nreport {files[0]}")
    tracking = configs[comparison.baseline].tracking
    if tracking.mlflow:
        print("\n".join(publish_comparison(result, tracking_uri(tracking.uri), files)))
    return result


def planned(arguments: list[str]) -> Comparison:
    """Read the command line; what is not an option of the comparison is an override of all arms."""
    options, others = parse(arguments, CompareOptions, "overrides")
    common, pairs = options.split(others)
    arms = [Arm(label, tuple(overrides)) for label, overrides in pairs]
    labels = [arm.label for arm in arms]
    if NULL in labels:
        raise UserError(f"the label {NULL} is reserved for the null arm; choose another")
    check_labels(arms)
    baseline = options.baseline or arms[0].label
    if baseline not in labels:
        raise UserError(f"baseline={baseline} is not among the arms ({', '.join(labels)}){nearest(baseline, labels)}")
    arms.sort(key=lambda arm: arm.label != baseline)  # a stable sort: the baseline comes first
    if options.null:
        arms.append(Arm(NULL, arms[0].overrides, NULL_SHIFT))
    seeds, margin = seeds_of(options.seeds), margin_of(options.margin)
    return Comparison(arms, baseline, seeds, margin, common, options.output_dir, options.name)
