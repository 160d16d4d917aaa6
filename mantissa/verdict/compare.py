"""Arms of an experiment, run with the same seeds in turns, and judged by one number of each run, look by look."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from mantissa import display
from mantissa.errors import UsageError
from mantissa.verdict.page import Report, Section
from mantissa.verdict.statistics import (
    EQUIVALENT,
    INCONCLUSIVE,
    WORSE,
    Equivalence,
    Interval,
    equivalence,
    look_level,
    mean_interval,
    ratio_interval,
    ratio_intervals,
    steps_to,
)

NOT_JUDGED = "NOT JUDGED"
PAIRS = 3
"""Fewest pairs for a verdict."""
SEED_SHIFT = 1000
"""Number added to the seeds of an arm that is named again, which shows how far seeds alone move the result."""
METHOD = (
    "EQUIVALENT: two one-sided t-tests on the paired relative differences (Schuirmann 1987), of 4 % at "
    "the first look, so that their 92 % interval lies within the margin. WORSE and BETTER: their whole 96 % "
    "interval is beyond it. Looks with more seeds have stricter tests (alpha spending, Lan and DeMets 1983), and "
    "with several arms the intervals are wider, by Holm's correction, so that the chance of any wrong verdict is "
    "5 %. The interval beside a verdict is the one that decided."
)
EQUAL_LOSS = (
    "Equal is the baseline's final value of the same seed, within the margin: where the best so far first is as good, "
    "interpolated between two evaluations, and for the baseline, too, so that equal arms have a ratio of 1. A ratio is "
    "of all seeds or of none. Its interval, of 96 % at the first look, is wider with more arms (Holm) and looks, so "
    "that the chance that any wrongly excludes 1 is 5 %."
)
_WALL = "Wall times are of whole runs, their start included; other work on the machine is not taken out."

Item = TypeVar("Item")
Round = TypeVar("Round")
Losses = Mapping[int, float | None]
"""Final losses of an arm by seed, lower is better. Not finite: the run diverged. None: it failed."""
Curve = tuple[Any, Any]
"""Lists or arrays: steps of a run's evaluations, and the losses there, lower is better; empty where it diverged."""
Look = dict[str, Any]
"""``seeds``, and ``ended``, arm and seed of every run that had ended, of each report that judged an arm."""


# --- runs ---


@dataclass(frozen=True)
class Run:
    """One run that has ended."""

    arm: str
    seed: int
    """Seed of the pair; that of an arm that is named again is shifted."""
    value: float | None
    """Metric; None: it is not finite, or the run failed."""
    seconds: float
    failure: str = ""
    """Reason why it failed; empty: it has not."""
    shown: str = ""
    """Text to print of it; empty: its failure, or its value."""
    deterministic: bool = False
    """Whether it failed in a way that another seed would not change, so that the arm is not tried again."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that the runner keeps with it, as JSON."""


Runner = Callable[[str, int], Run]
"""Runs an arm, given by its label, with the seed of a pair."""


class Store:
    """What is known of an experiment: its plan, runs and looks, as lines of JSON in a file, so that it can continue."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file, if there is one. Without a path nothing is kept on disk."""
        self._path, self._lines = path, []
        if path is not None and path.exists():
            whole, _, cut = path.read_text(encoding="utf-8").rpartition("\n")  # a kill may have cut the last line
            self._lines = [json.loads(line) for line in whole.splitlines()]
            if cut:
                path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")

    def add(self, kind: str, content: Any) -> None:
        """Keep one thing more."""
        self._lines.append([kind, content])
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([kind, content]) + "\n")

    def of(self, kind: str) -> list[Any]:
        """Return what is known of a kind, ``plan``, ``files``, ``run`` or ``look``, in the order kept."""
        return [content for each, content in self._lines if each == kind]

    def begin(self, plan: dict[str, Any], seeds: Sequence[int], remedy: str) -> None:
        """Keep the plan, or check that it continues what is known.

        Args:
            plan: what must stay the same, as JSON.
            seeds: those of the pairs.
            remedy: how to begin another comparison.

        Raises:
            UsageError: another comparison is known, or a seed that was judged before is left out.
        """
        known = (self.of("plan") or [plan])[0]
        different = [key for key in plan if plan[key] != known.get(key, plan[key])]
        if not self.of("plan"):
            self.add("plan", plan)
        if different:
            there, here = known.get(different[0]), plan[different[0]]
            place = "" if self._path is None else f"{self._path.parent} holds "
            raise UsageError(
                f"{place}another comparison, with another {different[0]} ({there} there, {here} here); {remedy}"
            )
        judged = self.of("look")[-1]["seeds"] if self.of("look") else []
        if missing := sorted(set(judged) - set(seeds)):
            raise UsageError(
                f"seed {missing[0]} was judged before and is left out now; keep all seeds, since a verdict on chosen "
                f"ones means nothing, or {remedy}"
            )


def interleave(items: Sequence[Item], rounds: Iterable[Round]) -> Iterator[tuple[Item, Round]]:
    """Yield all items in each round, in reverse order every second time, so that none is always the later one."""
    for number, this_round in enumerate(rounds):
        for item in items if number % 2 == 0 else reversed(items):
            yield item, this_round


def run_all(arms: Sequence[str], seeds: Sequence[int], run: Runner, store: Store, metric: str = "loss") -> list[Run]:
    """Run what is left to run of all arms with each seed, in turns; print a line for each, and keep it.

    A run that failed before is run again.
    """
    known = {(kept.arm, kept.seed): kept for kept in (Run(**content) for content in store.of("run"))}
    known = {pair: kept for pair, kept in known.items() if not kept.failure}
    plan = list(interleave(arms, seeds))
    runs: list[Run] = []
    given_up: set[str] = set()
    for number, (arm, seed) in enumerate(plan, 1):
        if arm in given_up:
            continue
        ended = known.get((arm, seed)) or run(arm, seed)
        if is_new := (arm, seed) not in known:
            store.add("run", asdict(ended))
        runs.append(ended)
        if ended.deterministic:
            given_up.add(arm)
        left_s = fmean(done.seconds for done in runs) * sum(pair not in known for pair in plan[number:])
        shown = ended.shown or ended.failure or f"{metric} {display.loss(ended.value)}"
        took = f"{ended.seconds:.1f} s" if is_new else "already done"
        eta = f"  eta {display.duration(left_s)}" if left_s else ""
        print(f"{number:>3}/{len(plan)}  {arm} s{seed}  {shown}  {took}{eta}", flush=True)
    return runs


# --- verdicts ---


@dataclass
class Quality:
    """The final loss of an arm, and its verdict."""

    values: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """(arm − baseline) / |baseline|, one per pair."""
    rounding: float = 0.0
    """Standard deviation that the rounding of the losses gives the differences."""
    verdict: str = ""
    """Verdict; empty for the baseline."""
    why: str = ""
    """Reason for the verdict, or what would settle it."""
    test: Equivalence | None = None
    look: int = 1
    """Number of the look at which the test was made."""

    @property
    def shown(self) -> Interval | None:
        """The interval to show: the one that decided, 95 % where nothing was; None: fewer than two pairs."""
        if len(self.differences) < 2:
            return None
        return self.test.difference if self.test else mean_interval(self.differences, rounding=self.rounding)

    @property
    def sentence(self) -> str:
        """The verdict with the margin that it was judged by."""
        if not self.test:
            return self.verdict
        p = f" (p = {self.test.p_equivalent:.2g})" if self.verdict == EQUIVALENT else ""
        return f"{self.verdict} at a margin of {100 * self.test.margin:g} %{p}"


def judge(arms: Mapping[str, Losses], margin: float, looks: Sequence[Look] = ()) -> dict[str, Quality]:
    """Judge every arm at each look; what one has decided stands where the stricter tests of a later one do not.

    Args:
        arms: losses by label, with the failed runs. The first is the baseline.
        margin: relative difference that is too small to matter.
        looks: all looks that were kept; the last is this one. None kept: this is the first.
    """
    found: dict[str, Quality] = {}
    for number, look in enumerate([*looks[:-1], None], 1):
        before, found = found, _judged(arms if look is None else _then(arms, look), margin, number)
        for label, known in before.items():
            if known.test and known.verdict != INCONCLUSIVE == found[label].verdict:
                why = f"decided at look {known.look}, of {known.test.difference.count} seeds"
                found[label] = replace(found[label], verdict=known.verdict, test=known.test, look=known.look, why=why)
    return found


def judge_and_keep(arms: Mapping[str, Losses], margin: float, store: Store) -> tuple[list[Look], dict[str, Quality]]:
    """Judge every arm, and keep the look before any report shows it; return all looks and the verdicts.

    To see the same runs again is no other look, and neither is one that judges nothing.
    """
    ended = sorted([label, seed] for label, losses in arms.items() for seed, loss in losses.items() if loss is not None)
    look = {"seeds": sorted(set().union(*arms.values())), "ended": ended}
    looks = store.of("look")
    if look not in looks[-1:]:
        found = judge(arms, margin, [*looks, look])
        if any(quality.test or quality.verdict == WORSE for quality in found.values()):
            store.add("look", look)
            return [*looks, look], found
    return looks, judge(arms, margin, looks)


@dataclass
class Reach:
    """How far an arm trains until its loss is the baseline's final one."""

    steps: dict[int, float | None] = field(default_factory=dict)
    """Step that reaches it, by seed; None: none does."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of training up to that step, by seed; empty: the arm is not timed."""
    steps_ratio: Interval | None = None
    """Over the baseline's own; None: of the baseline, not reached with each seed, or not judged."""
    seconds_ratio: Interval | None = None
    instead: str = ""
    """What is said in the place of ratios, such as ``reached in 3 of 5``; empty: there are some, or no verdict."""

    def cells(self, is_baseline: bool) -> tuple[str, str]:
        """Return steps and time, as a table has them: the baseline's own, and ratios to them."""
        if is_baseline:
            steps, seconds = list(filter(None, self.steps.values())), self.seconds.values()
            return f"{fmean(steps):.0f}" if steps else "", f"{fmean(seconds):.1f} s" if seconds else ""
        if not self.steps_ratio:
            return self.instead or NOT_JUDGED, ""
        return times(self.steps_ratio), times(self.seconds_ratio) if self.seconds_ratio else NOT_JUDGED

    def sentence(self, goal: str) -> str:
        """Return what it takes to a goal such as ``final loss of fp32``; empty: that is not judged."""
        if self.instead:
            return f"The {goal} is {self.instead}."
        amounts = (("steps", "fewer", self.steps_ratio), ("time", "less", self.seconds_ratio))
        told = [_change(name, less, ratio) for name, less, ratio in amounts if ratio]
        return f"To the {goal}: {', '.join(told)}." if told else ""


def _change(name: str, less: str, ratio: Interval) -> str:
    if not ratio.excludes(1):
        return f"no clear difference in {name}"
    return f"{abs(100 * (ratio.mean - 1)):.2g} % {less if ratio.mean < 1 else 'more'} {name}"


def reach(
    curves: Mapping[str, Mapping[int, Curve]],
    verdicts: Mapping[str, Quality],
    margin: float,
    look: int,
    step_s: Mapping[str, Mapping[int, float]],
) -> dict[str, Reach]:
    """Return how far every arm trains until its loss is the baseline's final one of the same seed, within the margin.

    Without the margin, every second run of an equal arm would end just short of it. The baseline's own steps, too, are
    those to the first time that its loss is as low, so that noise favours neither. A ratio is of all seeds or of none:
    those that reach it are the lucky ones. For the chance of a wrong one see ``ratio_intervals``; time has its own 5 %.

    Args:
        curves: by label and seed, without the runs that failed. The first is the baseline.
        verdicts: on the final losses. Where there is none, the steps are not judged, either.
        margin: relative difference that is too small to matter.
        look: how often the arms have been judged, this time included.
        step_s: seconds of a training step by label and seed; arms that are not timed are left out.
    """
    baseline, *others = curves
    ends = {seed: losses[-1] for seed, (_, losses) in curves[baseline].items() if len(losses)}
    goals = {seed: loss + margin * abs(loss) for seed, loss in ends.items() if math.isfinite(loss)}
    found: dict[str, Reach] = {}
    for label, own in curves.items():
        steps = {seed: steps_to(goal, *own[seed]) for seed, goal in goals.items() if seed in own}
        times_s = step_s.get(label, {})
        found[label] = Reach(steps, {seed: step * times_s[seed] for seed, step in steps.items() if step and times_s})
    whole: list[str] = []
    for label in (label for label in others if verdicts[label].verdict != NOT_JUDGED and len(goals) >= PAIRS):
        count = sum(step is not None for step in found[label].steps.values())
        if count < len(goals):
            found[label].instead = f"reached in {count} of {len(goals)}" if count else "not reached"
        elif any(found[arm].steps[seed] == curves[arm][seed][0][0] for arm in (baseline, label) for seed in goals):
            found[label].instead = "reached at once: evaluate more often"
        else:
            whole.append(label)
    for amount in ("steps", "seconds"):
        base = getattr(found[baseline], amount)
        owns = {label: own for label in whole if base and (own := getattr(found[label], amount))}
        ratios = [[value / base[seed] for seed, value in own.items()] for own in owns.values()]
        for label, interval in zip(owns, ratio_intervals(ratios, len(others) - len(owns), look), strict=True):
            setattr(found[label], f"{amount}_ratio", interval)
    return found


def too_few(pairs: int, planned: int) -> str:
    """Return why so many pairs are too few for a verdict; empty: they suffice."""
    if pairs >= PAIRS:
        return ""
    if pairs < planned:
        return f"{pairs} of {planned} pairs finished, and a verdict needs {PAIRS}"
    return f"a verdict needs more than {display.counted(pairs, 'seed')}; use 5"


def _then(arms: Mapping[str, Losses], look: Look) -> dict[str, Losses]:
    """Return the runs that had ended at a look."""
    return {
        label: {seed: loss for seed, loss in losses.items() if [label, seed] in look["ended"]}
        for label, losses in arms.items()
    }


def _judged(arms: Mapping[str, Losses], margin: float, look: int) -> dict[str, Quality]:
    """Return the verdicts of one look, corrected for the number of all arms and looks."""
    baseline, *others = arms
    found = {baseline: Quality(list(_finite(arms[baseline]).values()))}
    found |= {label: _compared(arms[label], arms[baseline]) for label in others}
    tested = [found[label] for label in others if not found[label].verdict]
    differences, roundings = [quality.differences for quality in tested], [quality.rounding for quality in tested]
    tests = equivalence(differences, margin, len(others) - len(tested), look, roundings)
    for quality, test in zip(tested, tests, strict=True):
        quality.test, quality.verdict, quality.look = test, test.verdict, look
        if test.pairs_needed:
            needed = f"about {test.pairs_needed} seeds with this spread and mean would decide it, 4 times in 5"
            quality.why = "; ".join(filter(None, [quality.why, needed]))
    return found


def _compared(losses: Losses, base: Losses) -> Quality:
    """Return the losses and the differences, with a verdict only where too few runs finished for a test."""
    finite, others = _finite(losses), _finite(base)
    differences = [(loss - others[seed]) / abs(others[seed]) for seed, loss in finite.items() if others.get(seed)]
    quality = Quality(list(finite.values()), differences)
    if any(others.values()) and finite:  # two numbers are rounded, each by up to half a step
        step = _step(finite.values(), others.values())
        quality.rounding = step / math.sqrt(6) / fmean(map(abs, others.values()))
    diverged = [seed for seed in _diverged(losses) if seed in others]
    failed = [seed for seed in others if losses.get(seed) is None]
    why = [f"{len(diverged)} of {len(losses)} runs diverged where the baseline's did not"] if diverged else []
    if others and min(others.values()) <= 0 <= max(others.values()):
        quality.verdict = NOT_JUDGED
        why.append("the baseline is 0, or on both sides of it, so that no difference is relative to it")
    elif few := too_few(len(differences) + len(diverged), len(losses)):
        quality.verdict = NOT_JUDGED
        why.append(few)
    elif diverged:
        quality.verdict = WORSE
    elif failed:
        # What a precision breaks with some seeds is no reason to judge it by the others.
        quality.verdict = NOT_JUDGED
        counts = f"{len(failed)} of {len(others)} runs"
        remedy = "the same command retries them (python -m mantissa compare: with --continue)"
        why.append(f"{counts} failed where the baseline's did not; {remedy}")
    else:
        if len(differences) < len(losses):
            why.append(f"only {len(differences)} of {len(losses)} pairs finished")
        if worse := [seed for seed in _diverged(base) if seed in finite]:
            why.append(f"the baseline diverged in {len(worse)} where this arm did not")
    quality.why = "; ".join(why)
    return quality


def _finite(losses: Losses) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if loss is not None and math.isfinite(loss)}


def _step(values: Iterable[float], base: Collection[float]) -> float:
    """Return the step in which values come: that of their last digit, or of the accuracy of a few samples.

    It is the greatest common divisor of their distances; of numbers with all digits, nothing beside the baseline's.
    """
    lowest, step = min(base), 0.0
    for distance in (abs(value - lowest) for value in (*base, *values)):
        while distance > 1e-4 * (max(base) - lowest):  # Euclid's algorithm
            step, distance = distance, min(step % distance, distance - step % distance)
    return step


def _last_digit(values: Sequence[float]) -> float:
    """Return the unit of the last digit with which values were printed; zeros at its end are not."""
    return 10.0 ** min(int(Decimal(repr(value)).normalize().as_tuple().exponent) for value in values)


def _diverged(losses: Losses) -> list[int]:
    return [seed for seed, loss in losses.items() if loss is not None and not math.isfinite(loss)]


# --- comparisons ---


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
    runs: list[Run] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    verdicts: dict[str, Quality] = field(default_factory=dict)
    """Verdicts by arm; empty until they are judged."""
    reached: dict[str, Reach] = field(default_factory=dict)
    """Steps to the baseline's final metric, by arm; empty where the runs have no curves."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise UsageError(f"a margin of {self.margin:g} must be above 0 and below 1, such as 0.003 for 0.3 %")

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return next(iter(self.arms))

    @property
    def equivalent(self) -> bool:
        """Whether every arm is EQUIVALENT to the baseline."""
        return all(self.verdicts[label].verdict == EQUIVALENT for label in list(self.arms)[1:])

    def run(self, seeds: Sequence[int], run: Runner, store: Store) -> None:
        """Run what is left to run of all arms with each seed, judge them, and keep the look.

        Raises:
            UsageError: there are too few seeds, the seed changes nothing, or the last digit is more than the margin.
        """
        if len(seeds) < PAIRS:
            raise UsageError(f"a verdict needs more than {display.counted(len(seeds), 'seed')}; use 4 or more")

        def checked(arm: str, seed: int) -> Run:
            self._check_digits([Run(**content) for content in store.of("run")])  # before more time is spent
            return run(arm, seed)

        self.runs = run_all(list(self.arms), seeds, checked, store, self.metric)
        self._check_digits(self.runs)
        sign = -1 if self.higher_is_better else 1
        losses: dict[str, dict[int, float | None]] = {arm: dict.fromkeys(seeds) for arm in self.arms}
        for ended in self.runs:
            if not ended.failure:
                losses[ended.arm][ended.seed] = math.nan if ended.value is None else sign * ended.value
        self.looks, self.verdicts = judge_and_keep(losses, self.margin, store)
        logs = {
            arm: {seed: one.facts.get("curve", ((), ())) for seed, one in self.ended(arm).items()} for arm in self.arms
        }
        if any(any(log) for own in logs.values() for log in own.values()):
            self.reached = reach(logs, self.verdicts, self.margin, len(self.looks), {})

    def _check_digits(self, runs: Sequence[Run]) -> None:
        """Refuse a last digit that is more than the margin, and a baseline without a spread."""
        for arm in self.arms:
            values = [run.value for run in runs if run.arm == arm and run.value is not None]
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

    def ended(self, arm: str) -> dict[int, Run]:
        """Return the runs of an arm that have not failed, by seed."""
        return {run.seed: run for run in self.runs if run.arm == arm and not run.failure}

    def difference(self, label: str) -> str:
        """Return the relative change of the metric, whichever direction is better; empty: too few pairs."""
        shown = self.verdicts[label].shown
        if shown and self.higher_is_better:
            shown = replace(shown, mean=-shown.mean, low=-shown.high, high=-shown.low)
        return with_level(shown)

    def report(self, command: str) -> Report:
        """Return the report: failures and verdicts in sentences, a table, and how it was measured."""
        sections = [
            Section("Results", table=self._rows(), sentences=[_WALL]),
            Section("Arms", items=[f"{label}: {text}" for label, text in self.arms.items()], folded=True),
            Section("How it was measured", [METHOD, *[EQUAL_LOSS] * bool(self.reached)], folded=True),
        ]
        answer, origin = [*self._sentences(), *about_looks(self.looks)], f"Machine: {platform.platform()}."
        return Report("Comparison", " / ".join(self.arms), answer, command, origin, sections)

    def write(self, folder: str | Path, command: str) -> Path:
        """Write the report and ``comparison.json`` into a folder; return the page's path."""
        page = self.report(command).write(Path(folder), "comparison")
        page.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return page

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("arm", "quality", "difference", self.metric, "wall time")
        rows = [(*head, *["steps to equal"] * bool(self.reached))]
        base = self.ended(self.baseline)
        for label, found in self.verdicts.items():
            runs = self.ended(label)
            values = [run.value for run in runs.values() if run.value is not None]
            ratios = [run.seconds / base[seed].seconds for seed, run in runs.items() if seed in base]
            took = f"{fmean(run.seconds for run in runs.values()):.1f} s" if runs == base else ""
            if len(ratios) > 1 and not took:
                took = times(ratio_interval(ratios))
            mean = display.loss(fmean(values)) if values else ""
            steps = [self.reached[label].cells(label == self.baseline)[0]] if self.reached else []
            rows.append((label, found.verdict or "(baseline)", self.difference(label), mean, took, *steps))
        return rows

    def _sentences(self) -> list[str]:
        lines = []
        for label, found in self.verdicts.items():
            lines += failures(label, {run.seed: run.failure for run in self.runs if run.arm == label and run.failure})
            if label != self.baseline:
                same = "" if any(found.differences) or not found.differences else "equal in every digit, with each seed"
                changes = [-each if self.higher_is_better else each for each in found.differences]
                same += "check that both print it in one unit" * any(each > 49 or each < -0.98 for each in changes)
                clauses = (f"{self.metric} {self.difference(label)}".strip() + f": {found.sentence}", same, found.why)
                lines.append(f"{label}, compared with {self.baseline}: {'; '.join(filter(None, clauses))}.")
                if self.reached:
                    lines[-1] += f" {self.reached[label].sentence(f'final {self.metric} of {self.baseline}')}".rstrip()
        return lines


def failures(arm: str, reasons: Mapping[int, str]) -> list[str]:
    """Return a sentence for each reason why runs of an arm failed, which are given by seed."""
    seeds_of: dict[str, list[str]] = {}
    for seed, why in reasons.items():
        seeds_of.setdefault(why, []).append(str(seed))
    return [f"{arm}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}, failed: {why}" for why, seeds in seeds_of.items()]


def about_looks(looks: Sequence[Look]) -> list[str]:
    """Return the sentence on the last look and its level; none where nothing was judged."""
    if not looks:
        return []
    now, later = (f"{100 * look_level(number):.3g} %" for number in (len(looks), len(looks) + 1))
    return [
        f"Look {len(looks)}, {len(looks[-1]['seeds'])} seeds: α = {now}. With more seeds: α = {later}. "
        "All looks together: 5 %."
    ]


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
