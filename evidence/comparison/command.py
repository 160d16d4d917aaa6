"""The command line of scripts/compare.py."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from evidence.comparison.compare import ComparisonPlan, Result, check_arms, compare
from evidence.comparison.report import report, write_report
from evidence.runs import Arm, check_labels, redacted_arguments
from mantissa.verdict.runs import SEED_SHIFT
from trainer.config.options import ONE_PROCESS, Overriding, check_keys, parse
from trainer.config.registration import choices, key_of
from trainer.config.text import fraction, listed, unquoted
from trainer.errors import UserError, check_folder_name, nearest, no_effect


@dataclass
class CompareOptions(Overriding):
    """Options of scripts/compare.py."""

    fixed = ONE_PROCESS | dict.fromkeys(
        ("seed", "run_name", "resume", "output_dir"), "set for every run; use seeds=5, and name=…"
    )

    arms: list[str] = field(default_factory=list)
    baseline: str = ""
    seeds: str = "5"
    margin: str = "0.3%"
    name: str = ""
    output_dir: Path = Path("outputs")

    def __post_init__(self) -> None:
        precisions = [name for name in choices("precision") if name != "auto"]  # which names no format
        for name in self.arms:
            if name not in precisions:
                raise UserError(
                    f"arms: {name} is not a precision ({', '.join(precisions)}){nearest(name, precisions)}; "
                    'for other overrides use arm.<name>="key=value …"'
                )
        check_folder_name("name", self.name)

    def split(self, others: list[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """Return the overrides of all arms, and each arm's label with its own.

        Raises:
            UserError: there are fewer than two arms, or one sets what is set for every run.
        """
        common = [text for text in others if not text.startswith("arm.")]
        arms = [(name, [f"precision={name}"]) for name in self.arms]
        for label, _, text in (text.removeprefix("arm.").partition("=") for text in others if text not in common):
            text = re.sub(r"(?<=[{\[,:])\s+(?=[^=]*[]}])", "", unquoted(text))  # of {h.0: bf16, h.1: bf16}
            arms.append((label, text.split()))
            check_keys(arms[-1][1], type(self))
        if len(arms) < 2:
            raise UserError(
                'a comparison needs two arms or more, of precisions or as in arm.compiled="compile=default"',
                "arms=fp32,bf16",
                mistake=" ".join(f"arm.{label}" for label, _ in arms),
            )
        for text in common:
            if all(key_of(text) in map(key_of, own) for _, own in arms):
                raise no_effect(text, "each arm sets it", mistake=shlex.quote(text))
        return common, arms


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
    result = compare(
        plan, configs[plan.baseline], shlex.join(["python", "scripts/compare.py", *redacted_arguments(arguments)])
    )
    page = write_report(result)
    print(f"\n{report(result).text()}\n\nreport {page}")
    return result


def planned(arguments: list[str]) -> ComparisonPlan:
    """Read the command line; what is not an option of the comparison is an override of all arms."""
    options, others = parse(arguments, CompareOptions, "overrides")

    # The same arm once more has other seeds, which shows the noise.
    common, pairs = options.split(others)
    arms: list[Arm] = []
    for place, (label, overrides) in enumerate(pairs):
        before = pairs[:place].count((label, overrides))
        name = f"{label}-{before + 1}" if before else label
        arms.append(Arm(name, tuple(overrides), SEED_SHIFT * before))

    # The baseline comes first.
    labels = [arm.label for arm in arms]
    check_labels(labels)
    baseline = options.baseline or arms[0].label
    if baseline not in labels:
        raise UserError(f"baseline={baseline} is not among the arms ({', '.join(labels)}){nearest(baseline, labels)}")
    arms.sort(key=lambda arm: arm.label != baseline)  # a stable sort: the baseline comes first
    margin = margin_of(options.margin)
    return ComparisonPlan(arms, seeds_of(options.seeds), margin, common, options.output_dir, options.name)


def seeds_of(text: str) -> list[int]:
    """Return the seeds that ``5`` or ``3,4,5`` means. Raises UserError."""
    try:
        if "," in text or text.startswith("["):
            seeds = [int(item) for item in listed(text)]
        else:
            seeds = list(range(min(int(text), SEED_SHIFT + 1)))
    except ValueError:
        raise UserError(f"seeds={text} is neither a number nor a list; write a list as 3,4,5", "seeds=5") from None
    if len(set(seeds)) < max(2, len(seeds)) or min(seeds) < 0 or max(seeds) >= SEED_SHIFT:
        raise UserError(f"seeds={text} must be two or more different numbers from 0 to {SEED_SHIFT - 1}", "seeds=5")
    return seeds


def margin_of(text: str) -> float:
    """Return the fraction that ``0.3%`` or ``0.003`` means. Raises UserError."""
    margin = fraction(text)
    if margin is None or not 0 < margin < 1:
        raise UserError(
            f"margin={text} must be a number above 0 and below 100 %: the difference in validation loss that is too "
            "small to matter",
            "margin=0.3%",
        )
    return margin
