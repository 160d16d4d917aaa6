"""A comparison of arms by one number: run with the same seeds in turns, and judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from statistics import fmean

from mantissa.display import counted
from mantissa.errors import UsageError, check_number
from mantissa.verdict.judge import Quality, Row, judge
from mantissa.verdict.runs import Look, Run, Runs, Store, run_all
from mantissa.verdict.statistics import EQUIVALENT, PAIRS


@dataclass
class Comparison:
    """Arms with a metric, their runs, and the verdict on each."""

    arms: dict[str, str]
    """Commands or settings by label; the first is the baseline."""
    metric: str
    """Name of the metric."""
    margin: float = 0.003
    """Relative difference that is too small to matter."""
    higher_is_better: bool = False
    runs: Runs = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    """Judged arms by label; empty until they are judged."""

    def __post_init__(self) -> None:
        check_number("margin", self.margin, 0.003, below=1)

    @property
    def baseline(self) -> str:
        """Label of the arm that the others are compared with."""
        return next(iter(self.arms))

    @property
    def verdicts(self) -> dict[str, Quality]:
        """Verdicts by arm; the baseline has none."""
        return {label: row.quality for label, row in self.rows.items()}

    @property
    def equivalent(self) -> bool:
        """Whether every arm is EQUIVALENT to the baseline."""
        return all(self.verdicts[label].verdict == EQUIVALENT for label in list(self.arms)[1:])

    def run(self, seeds: Sequence[int], run: Callable[[str, int], Run], store: Store) -> None:
        """Run what is left to run of all arms with every seed, judge them, and keep the look.

        Raises:
            UsageError: there are too few seeds, the seed changes nothing, or the last digit is more than the margin.
        """
        if len(seeds) < PAIRS:
            raise UsageError(f"a verdict needs more than {counted(len(seeds), 'seed')}; use {PAIRS} or more")

        def checked(arm: str, seed: int) -> Run:
            self._check_digits(store.runs)  # before more time is spent
            return run(arm, seed)

        self.runs = run_all(list(self.arms), seeds, checked, store, self.metric)
        self._check_digits([ended for of_arm in self.runs.values() for ended in of_arm.values()])
        self.rows = judge(self.runs, self.margin, store, ["minutes"], self.higher_is_better)
        self.looks = store.looks

    def _check_digits(self, runs: Sequence[Run]) -> None:
        """Refuse a last digit that is more than the margin, and a baseline without a spread."""
        for arm in self.arms:
            values = [value for run in runs if run.arm == arm and (value := run.values.get("loss")) is not None]
            if arm == self.baseline and len(values) >= PAIRS and len(set(values)) == 1:
                raise UsageError(
                    f"{arm}: {self.metric} is {values[0]:g} with every seed, so their spread is not known; "
                    "let the seed change the training, or print more digits"
                )
            # Of a single number, the last digit may be a zero that is not printed.
            if len(set(values)) < 2 or min(values) <= 0 <= max(values):
                continue
            digit, margin = _last_digit(values), self.margin * fmean(map(abs, values))
            if digit > margin:
                raise UsageError(
                    f"{arm}: the last digit of {self.metric}, {digit:g}, is more than the margin of "
                    f"{100 * self.margin:g} %, {margin:.2g}; print {1 - math.floor(math.log10(margin))} decimals, "
                    "or set a wider margin"
                )


def _last_digit(values: Sequence[float]) -> float:
    """Return the unit of the last digit with which values were printed; zeros at its end are not."""
    return 10.0 ** min(int(Decimal(repr(value)).normalize().as_tuple().exponent) for value in values)
