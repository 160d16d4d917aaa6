"""Runs of an experiment: what one is, how arms take turns, and what is kept of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from mantissa import display
from mantissa.errors import UsageError

SEED_SHIFT = 1000
"""Number added to the seeds of an arm that is named again, which shows how far seeds alone move the result."""
Item = TypeVar("Item")
Round = TypeVar("Round")
Curve = Sequence[Sequence[float]]
"""Steps of a run's evaluations, and the losses there."""


@dataclass(frozen=True)
class Run:
    """One run that has ended: its numbers, or the reason why it failed."""

    arm: str
    seed: int
    """Seed of the pair; that of an arm that is named again is shifted."""
    values: dict[str, float | None] = field(default_factory=dict)
    """Numbers by name: ``loss``, ``speed``, ``memory``, ``minutes``, …; None: not finite. What was not measured is
    left out."""
    seconds: float = 0.0
    """Seconds from its start to its end, however it ended."""
    failure: str = ""
    """Reason why it did not finish; empty: it did."""
    shown: str = ""
    """Text to print of it; empty: its failure, or its loss."""
    deterministic: bool = False
    """Whether another seed would fail in the same way, so that the arm is not tried again."""
    curve: Curve = ((), ())
    arithmetic: str = ""
    """Reason why its times are not those of its format, such as fp32 arithmetic; empty: they are."""
    emulated: bool = False
    """Whether its format was emulated, so that only its losses are those of the format."""

    @property
    def diverged(self) -> bool:
        """Whether a number of it is not finite: an outcome, which the same command would have again."""
        return None in self.values.values()

    @property
    def ended(self) -> bool:
        """Whether it finished or diverged, so that it is not tried again."""
        return not self.failure or self.diverged

    def number(self, name: str) -> float | None:
        """Return one of its numbers, infinite where it is not finite; None: it was not measured."""
        if name not in self.values:
            return None
        value = self.values[name]
        return math.inf if value is None else value


Runs = Mapping[str, Mapping[int, Run]]
"""Runs by arm and seed; the first arm is the baseline."""
Look = dict[str, Any]
"""``seeds``, and ``ended``, arm and seed of every run that had ended, of each report that judged an arm."""


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
        return [content for line_kind, content in self._lines if line_kind == kind]

    @property
    def runs(self) -> list[Run]:
        """Runs in the order in which they ended; one that was tried again is there twice."""
        return [Run(**content) for content in self.of("run")]

    @property
    def looks(self) -> list[Look]:
        """Looks at which an arm was judged, in their order."""
        return self.of("look")

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
        judged = self.looks[-1]["seeds"] if self.looks else []
        if missing := sorted(set(judged) - set(seeds)):
            raise UsageError(
                f"seed {missing[0]} was judged before and is left out now; keep all seeds, since a verdict on chosen "
                f"ones means nothing, or {remedy}"
            )


def interleave(items: Sequence[Item], rounds: Iterable[Round]) -> Iterator[tuple[Item, Round]]:
    """Yield all items once a round, in reverse order every second time, so that none is always the later one."""
    for number, this_round in enumerate(rounds):
        for item in items if number % 2 == 0 else reversed(items):
            yield item, this_round


def run_all(
    arms: Sequence[str], seeds: Sequence[int], run: Callable[[str, int], Run], store: Store, metric: str = "loss"
) -> Runs:
    """Run what is left to run of all arms with every seed, in turns; print a line for each run, and keep it.

    A run that failed before is run again.

    Returns:
        All runs, those of before, too.
    """
    # What has ended before, and what is to be run.
    known = {(kept.arm, kept.seed): kept for kept in store.runs if kept.ended}
    plan = list(interleave(arms, seeds))
    runs: list[Run] = []
    given_up: set[str] = set()
    for number, (arm, seed) in enumerate(plan, 1):
        if arm in given_up:
            continue

        # A run is kept as soon as it has ended, so that a kill loses only the one that is running.
        ended = known.get((arm, seed)) or run(arm, seed)
        if is_new := (arm, seed) not in known:
            store.add("run", asdict(ended))
        runs.append(ended)
        if ended.deterministic:
            given_up.add(arm)

        # One line of progress, and how long the rest takes if it is like what was run.
        left_s = fmean(done.seconds for done in runs) * sum(pair not in known for pair in plan[number:])
        shown = ended.shown or ended.failure or f"{metric} {display.loss(ended.values['loss'])}"
        took = f"{ended.seconds:.1f} s" if is_new else "already done"
        eta = f"  eta {display.duration(left_s)}" if left_s else ""
        print(f"{number:>3}/{len(plan)}  {arm} s{seed}  {shown}  {took}{eta}", flush=True)
    return by_arm(arms, runs)


def by_arm(arms: Iterable[str], runs: Iterable[Run]) -> Runs:
    """Return the runs of each arm by seed, in the order of the arms."""
    grouped: dict[str, dict[int, Run]] = {arm: {} for arm in arms}
    for run in runs:
        grouped[run.arm][run.seed] = run
    return grouped
