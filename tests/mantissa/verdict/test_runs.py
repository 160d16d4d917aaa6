"""Runs: who takes turns, what is kept, and what is run again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mantissa.errors import UsageError
from mantissa.verdict.runs import Run, Store, interleave, run_all


def test_all_take_turns_in_reverse_order_every_second_time() -> None:
    """So that none is always the later one: the machine may slow down."""
    turns = [f"{item}{number}" for item, number in interleave("abc", range(3))]
    assert turns == ["a0", "b0", "c0", "c1", "b1", "a1", "a2", "b2", "c2"]


def test_a_number_is_infinite_where_it_is_not_finite_and_none_where_it_was_not_measured() -> None:
    run = Run("a", 0, {"loss": None, "speed": 2.0})
    assert (run.number("loss"), run.number("speed"), run.number("memory")) == (math.inf, 2.0, None)
    assert (run.diverged, run.ended, Run("a", 0, failure="the disk is full").ended) == (True, True, False)


FINISHED = Run("b", 0, {"loss": 2.0}, 1.0, curve=[[1], [2.0]])
DIVERGED = Run("b", 0, {"loss": None}, 1.0, "not finite", curve=[[], []])
FAILED = Run("b", 0, {}, 1.0, "the disk is full", curve=[[], []])
HOPELESS = Run("b", 0, {}, 1.0, "no such option", deterministic=True, curve=[[], []])


@pytest.mark.parametrize(
    ("first", "again", "then"),
    [
        (FINISHED, "a0 b0 c0 c1 b1 a1", ""),
        (DIVERGED, "a0 b0 c0 c1 b1 a1", ""),
        (FAILED, "a0 b0 c0 c1 b1 a1", "b0"),
        (HOPELESS, "a0 b0 c0 c1 a1", "b0 b1"),
    ],
)
def test_what_failed_is_run_again_and_what_ended_never_is(
    first: Run, again: str, then: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure does not lose the other arms, and what another seed would not change is not tried with it."""
    ran: list[str] = []
    outcomes = {("b", 0): first}

    def run(arm: str, seed: int) -> Run:
        ran.append(f"{arm}{seed}")
        return outcomes.get((arm, seed)) or Run(arm, seed, {"loss": 2.0}, 1.0, curve=[[1], [2.0]])

    runs = run_all("abc", [0, 1], run, Store(tmp_path / "runs.jsonl"))
    assert ran == again.split()
    assert {f"{ended.arm}{ended.seed}" for of_arm in runs.values() for ended in of_arm.values()} == set(ran)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == f"  2/6  b s0  {first.failure or 'loss 2.0000'}  1.0 s  eta 0:04"
    ran.clear()
    outcomes.clear()
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('["run", {"arm": "c", "se')  # where a kill has cut it
    store = Store(tmp_path / "runs.jsonl")
    runs = run_all("abc", [0, 1], run, store)
    assert all(run.ended for of_arm in runs.values() for run in of_arm.values())
    assert ran == then.split()
    assert Store(tmp_path / "runs.jsonl").runs == store.runs


def test_neither_the_plan_nor_the_seeds_that_were_judged_may_change() -> None:
    store = Store()
    store.begin({"margin": 0.003}, [0, 1], "name another")
    store.add("look", {"seeds": [0, 1], "ended": []})
    store.begin({"margin": 0.003}, [0, 1, 2], "name another")
    with pytest.raises(UsageError, match=r"with another margin \(0.003 there, 0.01 here\); name another"):
        store.begin({"margin": 0.01}, [0, 1], "name another")
    with pytest.raises(UsageError, match="seed 1 was judged before and is left out now; keep all seeds"):
        store.begin({"margin": 0.003}, [0, 2], "name another")
