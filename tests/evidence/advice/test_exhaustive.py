"""The comparison with the whole grid, on a machine of which every time is known."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evidence.advice.exhaustive import LINES_FILE, compare, sentence, write
from evidence.advice.schema import Advice, Candidate, Log
from evidence.claims.results import read
from tests.evidence.advice.machine import Machine
from tests.evidence.advice.made import advice, measured
from trainer.errors import RunError

TIMES = {"fp32": 1.0, "bf16": 0.4, "bf16 + compile": 0.3, "bf16, 1 thread": 0.29, "fp16": 2.0, "bf16, eager": 0.31}
GRID = [Candidate(label, (f"label={label}",)) for label in TIMES]


def made(winner: str, spent_s: float = 10.0, **changed: Any) -> Advice:
    entries = [measured(label, 1 / seconds, 500) for label, seconds in TIMES.items()]
    return advice(entries=entries, winner=winner, baseline="fp32", spent_s=spent_s, **changed)


def machine(**changed: Any) -> Machine:
    return Machine(**({"step_s": TIMES.__getitem__} | changed))


def compared(
    tmp_path: Path, given: Advice, on: Machine, candidates: list[Candidate] = GRID, steps: int = 10**6
) -> dict[str, Any]:
    return compare(replace(given, steps=steps), candidates, on.bench(Log()), tmp_path, lambda line: None)


def test_the_best_of_all_is_found_and_the_advice_is_a_share_of_it(tmp_path: Path) -> None:
    found = compared(tmp_path, made("bf16 + compile"), machine())
    assert (found["best"], found["best_other"]) == ("bf16, 1 thread", "bf16, 1 thread")
    share = found["share_of_the_best"]
    assert share["mean"] == pytest.approx(0.29 / 0.3, rel=0.005)
    assert share["low"] < 0.29 / 0.3 < share["high"]
    assert found["met"] == {"speed": True, "time": found["share_of_the_time"] <= 0.25}
    assert (found["candidates"], found["measured"]) == (6, 6)


def test_an_advice_that_is_the_best_says_by_how_much(tmp_path: Path) -> None:
    found = compared(tmp_path, made("bf16, 1 thread"), machine())
    assert (found["best"], found["best_other"]) == ("bf16, 1 thread", "bf16 + compile")
    assert found["share_of_the_best"]["mean"] == pytest.approx(0.3 / 0.29, rel=0.005)
    slow = compared(tmp_path / "slow", made("bf16"), machine())
    assert not slow["met"]["speed"]


def test_the_grid_takes_its_starts_and_own_blocks_and_a_hopeless_candidate_few_blocks(tmp_path: Path) -> None:
    on = machine(noise=0.0)
    found = compared(tmp_path, made("bf16 + compile", spent_s=9.0), on)
    starts = sum(1 + 2 * seconds + 10 * ("compile" in label) for label, seconds in TIMES.items())
    blocks = sum(seconds * {"fp32": 1, "fp16": 1, "bf16": 2}.get(label, 4) for label, seconds in TIMES.items())
    assert found["grid_s"] == pytest.approx(starts + blocks)
    assert found["stopped_early"] == 3
    assert found["share_of_the_time"] == pytest.approx(9.0 / found["grid_s"])
    assert not found["met"]["time"]


def test_a_machine_that_slows_down_slows_both_sides(tmp_path: Path) -> None:
    on = machine(noise=0.0, start_s=0.0, compile_s=0.0)
    on.step_s = lambda label: TIMES[label] * (1 + 0.02 * on.now)
    compared(tmp_path, made("bf16"), on)
    lines = [json.loads(line) for line in (tmp_path / LINES_FILE).read_text().splitlines()[1:]]
    ratios = {line["label"]: statistics.geometric_mean(line["ratios"]) for line in lines}
    assert ratios["bf16, 1 thread"] == pytest.approx(0.4 / 0.29, rel=0.002)


def test_it_continues_where_it_was_interrupted_and_only_for_the_same_advice(tmp_path: Path) -> None:
    given, first = made("bf16"), machine()
    compared(tmp_path, given, first, GRID[:3])
    with (tmp_path / LINES_FILE).open("a") as file:
        file.write('{"label": "half a li')  # a kill
    second = machine()
    found = compared(tmp_path, given, second)
    assert sorted(set(second.started) - {"bf16", "bf16 + compile"}) == ["bf16, 1 thread", "bf16, eager", "fp16"]
    assert found["candidates"] == 6
    third = machine()
    compared(tmp_path, given, third)
    assert set(third.started) == {"bf16", "bf16 + compile", "bf16, 1 thread", "bf16, eager"}  # the final round
    other = machine()
    compared(tmp_path, made("bf16", date="2026-11-23"), other)
    assert set(other.started) == set(TIMES)


def test_failures_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    broken = {"fp16": "no kernel", "bf16, 1 thread": "hangs", "bf16, eager": "later"}
    on = machine(broken=broken)
    found = compared(tmp_path, made("bf16"), on)
    assert (found["measured"], found["best"]) == (3, "bf16 + compile")
    lines = {line["label"]: line for line in map(json.loads, (tmp_path / LINES_FILE).read_text().splitlines()[1:])}
    assert (lines["fp16"]["status"], lines["fp16"]["reason"]) == ("failed", "no kernel")
    assert lines["bf16, 1 thread"]["status"] == "hung"
    assert lines["bf16, 1 thread"]["seconds"] > 0
    assert (lines["bf16, eager"]["status"], lines["bf16, eager"]["ratios"]) == ("failed", [])
    with pytest.raises(RunError, match="the advised setting bf16 failed: it broke later; run the command again"):
        compared(tmp_path / "again", made("bf16"), machine(broken={"bf16": "later"}), GRID[2:])
    assert "bf16" not in on.alive[:-4]


@pytest.mark.parametrize(("steps", "best"), [(50, "bf16"), (200, "bf16 + compile")])
def test_compiling_counts_where_it_pays_within_the_run(tmp_path: Path, steps: int, best: str) -> None:
    found = compared(tmp_path, made("bf16"), machine(noise=0.0), GRID[:3], steps)
    assert (found["best"], found["best_other"]) == (best, "bf16 + compile")
    share = (10 + steps * 0.3) / (steps * 0.4)  # compiling takes 10 s
    assert found["share_of_the_best"] == pytest.approx({"mean": share, "low": share, "high": share}, rel=1e-3)
    words = f"in a run of {steps} steps, compile time included, the advised setting is {share:.3g}x [{share:.3g}, "
    assert words in sentence(found, "speed")


def test_what_compiling_the_advised_setting_takes_counts_too(tmp_path: Path) -> None:
    found = compared(tmp_path, made("bf16 + compile"), machine(noise=0.0), GRID[:3], steps=50)
    assert found["best"] == "bf16"
    assert found["share_of_the_best"]["mean"] == pytest.approx(50 * 0.4 / (10 + 50 * 0.3), rel=1e-3)


def test_for_memory_the_least_that_is_not_too_slow_counts(tmp_path: Path) -> None:
    bytes_of = {"fp16": 10, "bf16, eager": 40, "bf16": 50}
    on = machine(memory=lambda label: bytes_of.get(label, 100))
    found = compared(tmp_path, made("bf16", goal="memory"), on)
    assert (found["best"], found["share_of_the_best"]["mean"]) == ("bf16, eager", 0.8)  # fp16 takes twice the time
    assert found["met"]["memory"] is False


def test_the_outcome_is_written_where_claims_do_not_look(tmp_path: Path) -> None:
    given = made("bf16 + compile")
    given.exhaustive = compared(tmp_path / "grid", given, machine())
    path = write(given, "python scripts/advise.py recipe=gpt2 exhaustive=true", tmp_path / "results")
    assert path == tmp_path / "results" / "a-cpu-2-cores" / "advice" / "gpt2.json"
    record = json.loads(path.read_text())
    assert (record["winner"], record["exhaustive"]["best"]) == ("bf16 + compile", "bf16, 1 thread")
    assert read(tmp_path / "results") == {}
    said = sentence(given.exhaustive, "speed")
    assert said.startswith("of 6 combinations the best other one is bf16, 1 thread; in a run of 1000000 steps, ")
    assert "the advised setting is 0.96" in said
