"""What the best setting of all is, by measuring every combination, and how far from it the advice is."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evidence.advice.plan import TIME_FOR_MEMORY
from evidence.advice.rounds import Bench, Deadline, interval
from evidence.advice.schema import FAILED, HUNG, LEFT_OUT, MEASURED, Advice, Candidate, compiles
from evidence.advice.worker import Failed, Hung
from trainer.errors import RunError
from trainer.files import make_folder, read_json_lines, write_json, write_text
from trainer.formats import duration
from trainer.run.provenance import git_facts

REPEATS = 4
"""Blocks of each candidate, each beside one of the advised setting."""
HOPELESS = (2.0, 1.25)
"""Times the advised setting's time: a candidate whose first block takes longer than the first,
or whose first two both take longer than the second, has no more blocks."""
LIMIT_S = 300.0
"""For the start of a candidate; to compile it may take half of that."""
FINALISTS, FINAL_REPEATS = 3, 10
"""The fastest candidates, which are timed beside the advised setting once more, and their blocks."""
NEAR, QUARTER = 0.95, 0.25
"""The goal: at least this share of the best speed (or memory), in at most this share of the grid's time."""
LINES_FILE = "exhaustive.jsonl"


@dataclass
class Line:
    """One candidate of the grid."""

    label: str
    status: str = MEASURED
    reason: str = ""
    seconds: float = 0.0
    """Its start and its own blocks: what a search that tries everything spends on it."""
    compile_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Its throughput over the advised setting's, one for each pair of blocks."""
    memory_bytes: int | None = None

    @property
    def speed(self) -> float:
        """The geometric mean of ``ratios``."""
        return statistics.geometric_mean(self.ratios)

    @property
    def extra_s(self) -> float:
        """What a run takes beside its steps: the time to compile; other first steps are slow by chance only."""
        return self.compile_s if compiles(self.label) else 0.0

    def run_speed(self, ratio: float, step_s: Sequence[float], winner: Line, steps: int) -> float:
        """Return how many times as fast as the advised setting it is in a whole run, compile times included.

        Args:
            ratio: the same of steps alone.
            step_s: its step times beside the advised setting.
            winner: the line of the advised setting.
            steps: of the run.
        """
        own_s = steps * statistics.median(step_s)
        return (winner.extra_s + ratio * own_s) / (self.extra_s + own_s)


def compare(
    advice: Advice,
    candidates: Sequence[Candidate],
    bench: Bench,
    folder: Path,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure every candidate beside the advised setting, then the fastest ones once more, and compare.

    Each measured candidate is added to a file, with which the same call continues after an interruption.

    Args:
        advice: with a winner that is among the candidates. For goal=speed, whole runs of its ``steps`` are compared,
            compile times included.
        candidates: all combinations that are forecast to fit.
        bench: with a log of its own.
        folder: of the advice.
        show: called with lines of progress.

    Returns:
        ``best``, ``share_of_the_best`` (mean, low, high: the advised setting's speed over the best other one's; for
        goal=memory the best's memory over its), ``steps``, ``grid_s``, ``share_of_the_time``, ``met`` and the counts.
    """
    winner = advice.entry(advice.winner).candidate
    lines = _measured(advice, winner, candidates, bench, folder, show)
    grid_s = sum(line.seconds for line in lines.values())
    faultless = (line for line in lines.values() if line.label not in advice.faults)
    counted = [line for line in faultless if line.ratios and line.label != winner.label]
    mine = lines[winner.label]
    if advice.goal == "memory":
        found = _least_memory(advice, counted, mine)
    else:
        by_run = sorted(counted, key=lambda line: line.run_speed(line.speed, line.step_s, mine, advice.steps))
        finalists = by_run[::-1][:FINALISTS]
        found = _fastest(mine, finalists, candidates, bench, advice.steps, show)
    share = found["share_of_the_best"]["mean"]
    time_share = advice.spent_s / grid_s if grid_s else math.inf
    return found | {
        "candidates": len(lines),
        "measured": sum(line.status == MEASURED for line in lines.values()),
        "stopped_early": sum(0 < len(line.ratios) < REPEATS for line in lines.values()),
        "steps": advice.steps,
        "git": git_facts(),
        "grid_s": grid_s,
        "advice_s": advice.spent_s,
        "share_of_the_time": time_share,
        "met": {"speed" if advice.goal == "speed" else "memory": share >= NEAR, "time": time_share <= QUARTER},
    }


def sentence(found: dict[str, Any], goal: str) -> str:
    """Return the comparison in words."""
    share = found["share_of_the_best"]
    if goal == "memory":
        times = f"the advised setting needs {1 / share['mean']:.3g}x the memory of that"
    else:
        times = (
            f"in a run of {found['steps']} steps, compile time included, the advised setting is "
            f"{share['mean']:.3g}x [{share['low']:.3g}, {share['high']:.3g}] as fast as that"
        )
    return (
        f"of {found['candidates']} combinations the best other one is {found['best_other']}; {times}; "
        f"the search took {found['share_of_the_time']:.0%} of the time of measuring all of them "
        f"({duration(found['grid_s'])})"
    )


def write(advice: Advice, command: str, results: Path) -> Path:
    """Write the outcome to ``results/<machine>/advice/<recipe>.json``; for goal=memory it ends in ``-memory.json``.

    Raises:
        OSError: it cannot be written.
    """
    name = advice.recipe + ("" if advice.goal == "speed" else f"-{advice.goal}")
    path = results / advice.machine / "advice" / f"{name}.json"
    make_folder(path.parent)
    facts = ("recipe", "goal", "date", "machine", "hardware", "versions", "git", "baseline", "winner", "equal", "noise")
    record = {name: getattr(advice, name) for name in facts}
    speed = advice.entry(advice.winner).speed
    record |= {"speed": speed and asdict(speed), "health": advice.health, "exhaustive": advice.exhaustive}
    write_json(path, {"command": command} | record)
    return path


def _measured(
    advice: Advice,
    winner: Candidate,
    candidates: Sequence[Candidate],
    bench: Bench,
    folder: Path,
    show: Callable[[str], None],
) -> dict[str, Line]:
    """Return the lines of all candidates, those that the file lacks measured now."""
    path, key = folder / LINES_FILE, advice.key
    labels = {candidate.label for candidate in candidates}
    known = {line["label"]: Line(**line) for line in _read(path, key) if line["label"] in labels}
    make_folder(folder)
    whole = [{"advice": key}, *map(asdict, known.values())]  # without a line that a kill has cut off
    write_text(path, "".join(json.dumps(line) + "\n" for line in whole))
    left = [candidate for candidate in candidates if candidate.label not in known]
    show(f"exhaustive: {len(left)} of {len(candidates)} combinations to measure, each beside {winner.label}")
    began = bench.clock()
    for number, candidate in enumerate(left, 1):
        line = _one(winner, candidate, bench)
        known[line.label] = line
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        said = f"{line.speed:.2f}x the advice" if line.ratios else f"{line.status}: {line.reason}"
        rest = (bench.clock() - began) / number * (len(left) - number)
        show(f"{number}/{len(left)} {line.label}: {said}; about {duration(rest)} left")
    return known


def _read(path: Path, key: str) -> list[dict[str, Any]]:
    try:
        head, *lines = list(read_json_lines(path)) or [{}]
    except ValueError:
        return []
    return lines if head.get("advice") == key else []


def _one(winner: Candidate, candidate: Candidate, bench: Bench) -> Line:
    """Measure one candidate beside the advised setting; a hopeless one has few blocks."""
    line, began = Line(candidate.label), bench.clock()
    try:
        started = bench.begin(candidate, began + LIMIT_S)
    except Deadline:
        return Line(candidate.label, LEFT_OUT, f"its start would take more than {LIMIT_S:.0f} s")
    line.seconds = bench.clock() - began
    record = bench.log.records[candidate.label]
    if not started:
        line.status, line.reason = record.status, record.reason
        return line
    line.memory_bytes = record.memory_bytes
    line.seconds = max(line.seconds, record.start_s)  # the advised setting runs already, beside the first candidate
    others = [] if candidate.label == winner.label else [winner]
    try:
        for repeat in range(REPEATS):
            seconds = {
                each.label: _block(each, bench, line if each is candidate else None)
                for each in [*others, candidate][:: -1 if repeat % 2 else 1]
            }
            line.step_s.append(seconds[candidate.label])
            line.ratios.append(seconds[winner.label] / seconds[candidate.label])
            if max(line.ratios) < 1 / HOPELESS[min(repeat, 1)]:
                break
    except (Failed, Hung) as error:
        line.status, line.reason, line.ratios = HUNG if isinstance(error, Hung) else FAILED, str(error), []
        bench.fail(candidate.label, error)
    if line.step_s:
        later = statistics.median(line.step_s)
        line.compile_s = max(0.0, sum(record.warm_up_s) - len(record.warm_up_s) * later)
    if candidate.label != winner.label and candidate.label in bench.alive:
        bench.alive.pop(candidate.label).close()
    return line


def _block(candidate: Candidate, bench: Bench, line: Line | None) -> float:
    """Return the seconds of a step, by one block, which is added to the time of the candidate's line.

    Raises:
        Failed, Hung: the candidate, whose line is given.
        RunError: the advised setting, whose line is not.
    """
    try:
        if not bench.begin(candidate, math.inf):
            raise Failed(bench.log.records[candidate.label].reason)
        began = bench.clock()
        seconds = bench.time(candidate)
    except (Failed, Hung) as error:
        if line is None:
            raise RunError(f"the advised setting {candidate.label} failed: {error}; run the command again") from error
        raise
    if line is not None:
        line.seconds += bench.clock() - began
    return seconds


def _least_memory(advice: Advice, counted: list[Line], mine: Line) -> dict[str, Any]:
    """Compare memory, which repeats exactly, with that of candidates that are not too slow."""
    speed = advice.entry(advice.winner).speed
    fast = [
        line
        for line in counted
        if line.memory_bytes and line.speed * (speed.mean if speed else 1) >= 1 / TIME_FOR_MEMORY
    ]
    best = min(fast, key=lambda line: line.memory_bytes or math.inf, default=mine)
    share = (best.memory_bytes or 0) / (mine.memory_bytes or 1)
    return {"best": best.label if share < 1 else mine.label, "best_other": best.label} | _share(share, share, share)


def _fastest(
    winner: Line,
    finalists: list[Line],
    candidates: Sequence[Candidate],
    bench: Bench,
    steps: int,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Time the fastest candidates beside the advised setting with new blocks, which played no part in their choice."""
    if not finalists:
        return {"best": winner.label, "best_other": winner.label} | _share(1.0, 1.0, 1.0)
    labels = [winner.label, *(line.label for line in finalists)]
    show(f"exhaustive, final round: {', '.join(labels)}")
    by_label = {candidate.label: candidate for candidate in candidates}
    bench.round("exhaustive", [by_label[label] for label in labels], FINAL_REPEATS, math.inf, labels)
    times = bench.log.rounds[-1].times
    known: dict[str, tuple[float, ...]] = {}
    for line in finalists:
        own_s = times.get(line.label, [])
        found = interval([mine / own for mine, own in zip(times.get(winner.label, []), own_s, strict=False)])
        if found is not None:
            speeds = (line.run_speed(ratio, own_s, winner, steps) for ratio in (found.mean, found.low, found.high))
            known[line.label] = tuple(speeds)
    if not known:
        raise RunError(f"none of {', '.join(labels)} could be timed again; run the command again")
    label, (mean, low, high) = max(known.items(), key=lambda each: each[1])
    return {"best": label if mean > 1 else winner.label, "best_other": label} | _share(1 / mean, 1 / high, 1 / low)


def _share(mean: float, low: float, high: float) -> dict[str, Any]:
    return {"share_of_the_best": {"mean": mean, "low": low, "high": high}}
