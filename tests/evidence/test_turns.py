from __future__ import annotations

from collections.abc import Callable

import torch

from evidence.turns import in_turns, interleave, ratios, stopwatch


def test_none_is_always_the_one_that_runs_second() -> None:
    assert list(in_turns("ab", [0, 7])) == [("a", 0), ("b", 0), ("b", 7), ("a", 7)]


def test_blocks_take_turns_and_the_first_repeat_is_not_kept() -> None:
    calls: list[str] = []
    seconds = {"a": iter([9.0, 1.0, 2.0]), "b": iter([7.0, 3.0, 5.0])}

    def block(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return next(seconds[name])

        return run

    times = interleave({"a": block("a"), "b": block("b")}, repeats=2)
    assert times == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert ratios(times, "b", "a") == [3.0, 2.5]


def test_without_warm_up_every_repeat_is_kept() -> None:
    seconds = iter([4.0, 6.0])
    assert interleave({"a": lambda: next(seconds)}, repeats=2, warm_up=0) == {"a": [4.0, 6.0]}


def test_a_stopwatch_measures_only_its_own_steps() -> None:
    now = [1000.0]

    def work(steps: int) -> None:
        now[0] += 0.5 * steps

    block = stopwatch(work, torch.device("cpu"), lambda: now[0])
    now[0] += 100
    assert block(4) == 2.0
