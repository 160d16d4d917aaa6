"""The command line of scripts/compare.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from evidence.comparison.compare import NULL, Comparison, Result, check_arms, compare
from evidence.comparison.mlflow import publish_comparison
from evidence.comparison.report import lead, sentences, table, write_report
from evidence.runs import NULL_SHIFT, Arm, check_labels, recorded
from trainer.config.compose import CONF, key_of
from trainer.config.options import fraction, listed, parse, unquoted
from trainer.errors import UserError, nearest
from trainer.tracking.mlflow.addresses import tracking_uri

CHOSEN = ("seed", "run_name", "resume", "output_dir")
"""Keys that the comparison sets for every run."""


@dataclass
class CompareOptions:
    """Of the command line; see scripts/compare.py."""

    arms: list[str] = field(default_factory=list)
    baseline: str = ""
    seeds: str = "5"
    margin: str = "0.3%"
    null: bool = True
    name: str = ""
    output_dir: Path = Path("outputs")


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
    common = [text for text in others if not text.startswith("arm.")]
    precisions = sorted(path.stem for path in (CONF / "precision").glob("*.yaml"))
    for name in options.arms:
        if name not in precisions:
            raise UserError(
                f"arms: {name} is not a precision ({', '.join(precisions)}){nearest(name, precisions)}; "
                'for other overrides use arm.<name>="key=value …"'
            )
    arms = [Arm(name, (f"precision={name}",)) for name in options.arms]
    for label, _, overrides in (text.removeprefix("arm.").partition("=") for text in others if text not in common):
        arms.append(Arm(label, tuple(unquoted(overrides).split())))
    if len(arms) < 2:
        raise UserError('a comparison needs two arms or more, such as arms=fp32,bf16 or arm.compiled="compile=default"')
    labels = [arm.label for arm in arms]
    if NULL in labels:
        raise UserError(f"the label {NULL} is reserved for the null arm; choose another")
    check_labels(arms)
    for text in (*common, *(text for arm in arms for text in arm.overrides)):
        if key_of(text) in CHOSEN:
            raise UserError(f"{text} is set for every run; remove it, and use seeds=5, and name=… for the comparison")
    baseline = options.baseline or arms[0].label
    if baseline not in labels:
        raise UserError(f"baseline={baseline} is not among the arms ({', '.join(labels)}){nearest(baseline, labels)}")
    arms.sort(key=lambda arm: arm.label != baseline)  # a stable sort: the baseline comes first
    if options.null:
        arms.append(Arm(NULL, arms[0].overrides, NULL_SHIFT))
    if "/" in options.name or options.name in (".", ".."):
        raise UserError(f"name={options.name} must be the name of a folder, without a slash")
    seeds, margin = _seeds(options.seeds), _margin(options.margin)
    return Comparison(arms, baseline, seeds, margin, common, options.output_dir, options.name)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(item) for item in listed(text)] if "," in text or text.startswith("[") else list(range(int(text)))
    except ValueError:
        raise UserError(f"seeds={text} is neither a number nor a list; write seeds=5 or seeds=3,4,5") from None
    if len(set(seeds)) < max(2, len(seeds)) or min(seeds) < 0 or max(seeds) >= NULL_SHIFT:
        raise UserError(f"seeds={text} must be two or more different numbers from 0 to {NULL_SHIFT - 1}; use seeds=5")
    return seeds


def _margin(text: str) -> float:
    margin = fraction(text)
    if margin is None or not 0 < margin < 1:
        raise UserError(
            f"margin={text} must be a number above 0 and below 100 %: the difference in validation loss that is too "
            "small to matter, such as margin=0.3%"
        )
    return margin
