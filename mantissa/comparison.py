"""A comparison of training runs by one number of each, whatever runs them: in turns, judged and reported."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from mantissa import quality
from mantissa.display import columns, loss
from mantissa.errors import UsageError
from mantissa.page import Report, Section
from mantissa.quality import METHOD, NULL, PAIRS, Look, Quality
from mantissa.statistics import EQUIVALENT, ratio_interval

One = TypeVar("One")
Round = TypeVar("Round")
_WALL = "Wall times are of whole runs, their start included; other work on the machine is not taken out."


def in_turns(them: Sequence[One], rounds: Iterable[Round]) -> Iterator[tuple[One, Round]]:
    """Yield all of them in each round, in reverse order every second time, so that none is always the later one."""
    for number, each_round in enumerate(rounds):
        for one in them if number % 2 == 0 else reversed(them):
            yield one, each_round


@dataclass(frozen=True)
class Run:
    """One run that has ended."""

    arm: str
    seed: int
    """Of the pair; the null arm's own is shifted."""
    value: float | None
    """Of the metric; None: it is not finite, or the run failed."""
    seconds: float
    failure: str = ""
    """Empty: the run has not failed."""


@dataclass
class Comparison:
    """Arms with a metric, their runs, and the verdict on each."""

    arms: dict[str, str]
    """What is run, by label. The first is the baseline; ``null`` is the null arm."""
    metric: str
    """Its name."""
    margin: float = 0.003
    """The relative difference that is too small to matter."""
    higher_is_better: bool = False
    runs: list[Run] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    verdicts: dict[str, Quality] = field(default_factory=dict)
    """By arm; empty until they are judged."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise UsageError(f"a margin of {self.margin:g} must be above 0 and below 1, such as 0.003 for 0.3 %")

    @property
    def equivalent(self) -> bool:
        """Whether every arm is EQUIVALENT to the baseline."""
        return all(self.verdicts[label].verdict == EQUIVALENT for label in list(self.arms)[1:] if label != NULL)

    def run_all(self, seeds: Sequence[int], run: Callable[[str, int], Run]) -> None:
        """Run what is left to run of all arms with each seed, in turns; print a line for each; judge.

        Raises:
            UsageError: there are too few seeds, or the first run of an arm failed, or the seed changes nothing.
        """
        if len(seeds) < PAIRS:
            raise UsageError(f"{len(seeds)} seeds are too few for a verdict; use 4 or more")
        plan = list(in_turns(list(self.arms), seeds))
        for number, (arm, seed) in enumerate(plan, 1):
            if seed in self._ended(arm):
                continue
            ended = run(arm, seed)
            self.runs.append(ended)
            if ended.failure and not self._ended(arm):
                raise UsageError(f"{arm}, seed {seed}: {ended.failure}")
            shown = ended.failure or f"{self.metric} {loss(ended.value)}"
            print(f"{number:>3}/{len(plan)}  {arm} s{seed}  {shown}  {ended.seconds:.1f} s", flush=True)
        baseline = next(iter(self.arms))
        values = [ended.value for ended in self._ended(baseline).values() if ended.value is not None]
        if len(values) >= PAIRS and len(set(values)) == 1:
            raise UsageError(
                f"{baseline}: {self.metric} is {values[0]:g} with every seed, so their spread is not known; "
                "let the seed change the training, or print more digits"
            )
        digit = 10.0 ** min((int(Decimal(repr(value)).as_tuple().exponent) for value in values), default=0)
        if values and digit > self.margin * abs(fmean(values)):
            raise UsageError(
                f"{baseline}: the last digit of {self.metric}, {digit:g}, is more than the margin of "
                f"{100 * self.margin:g} %; print more digits, or set a wider margin"
            )
        sign = -1 if self.higher_is_better else 1
        losses: dict[str, dict[int, float | None]] = {arm: dict.fromkeys(seeds) for arm in self.arms}
        for arm in self.arms:
            for seed, ended in self._ended(arm).items():
                losses[arm][seed] = math.nan if ended.value is None else sign * ended.value
        self.looks = quality.with_look(self.looks, losses, self.margin)
        self.verdicts = quality.judge(losses, self.margin, self.looks)

    def text(self) -> str:
        """Return the report as a terminal shows it."""
        return "\n".join([*self._sentences(), *quality.told(self.looks), "", columns(self._rows()), "", _WALL])

    def write(self, folder: str | Path, command: str) -> Path:
        """Write ``report.html``, ``report.txt`` and ``comparison.json`` into a folder; return the page's path."""
        sections = [
            Section("Results", table=self._rows()),
            Section("Arms", items=[f"{label}: {text}" for label, text in self.arms.items()]),
            Section("How it was measured", [*quality.told(self.looks), METHOD, _WALL]),
        ]
        title, origin = " / ".join(label for label in self.arms if label != NULL), f"Machine: {platform.platform()}."
        html = Report("Comparison", title, self._sentences(), command, origin, sections).html()
        texts = {"html": html, "txt": self.text() + "\n", "json": json.dumps(asdict(self), indent=1) + "\n"}
        Path(folder).mkdir(parents=True, exist_ok=True)
        for suffix, text in texts.items():
            Path(folder, f"comparison.{suffix}").write_text(text, encoding="utf-8")
        return Path(folder, "comparison.html")

    def _ended(self, arm: str) -> dict[int, Run]:
        """Return the runs of an arm that have not failed, by seed."""
        return {run.seed: run for run in self.runs if run.arm == arm and not run.failure}

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("arm", "quality", "difference", self.metric, "wall time")]
        base = self._ended(next(iter(self.arms)))
        for label, found in self.verdicts.items():
            runs = self._ended(label)
            values = [run.value for run in runs.values() if run.value is not None]
            ratios = [run.seconds / base[seed].seconds for seed, run in runs.items() if seed in base]
            took = f"{fmean(run.seconds for run in runs.values()):.1f} s" if runs == base else ""
            if len(ratios) > 1 and not took:
                took = quality.times(ratio_interval(ratios))
            verdict = "noise" if label == NULL else found.verdict or "(baseline)"
            rows.append((label, verdict, self._difference(label), loss(fmean(values)) if values else "", took))
        return rows

    def _difference(self, label: str) -> str:
        """Return the relative change of the metric, whichever direction is better."""
        shown = self.verdicts[label].shown(is_null=label == NULL)
        if shown and self.higher_is_better:
            shown = replace(shown, mean=-shown.mean, low=-shown.high, high=-shown.low)
        return f"{quality.percent(shown)} ({100 * shown.level:.3g} %)" if shown else ""

    def _sentences(self) -> list[str]:
        baseline, lines = next(iter(self.arms)), []
        for label, found in self.verdicts.items():
            done, difference = self._ended(label), self._difference(label)
            failures = {run.seed: run.failure for run in self.runs if run.arm == label and run.seed not in done}
            lines += quality.failed(label, failures)
            if label == NULL and difference:
                lines.append(f"Noise: {baseline} with other seeds differs from {baseline} by {difference}.")
            elif label not in (baseline, NULL):
                same = "" if any(found.differences) or not found.differences else "equal in every digit, with each seed"
                clauses = (f"{f'{self.metric} {difference}'.strip()}: {quality.verdict_at(found)}", same, found.why)
                lines.append(f"{label}, compared with {baseline}: {'; '.join(filter(None, clauses))}.")
        return lines
