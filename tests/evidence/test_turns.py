from __future__ import annotations

import torch

from evidence.turns import in_turns, stopwatch


def test_none_is_always_the_one_that_runs_second() -> None:
    assert list(in_turns("ab", [0, 7])) == [("a", 0), ("b", 0), ("b", 7), ("a", 7)]


def test_a_stopwatch_measures_only_its_own_steps() -> None:
    now = [1000.0]

    def work(steps: int) -> None:
        now[0] += 0.5 * steps

    block = stopwatch(work, torch.device("cpu"), lambda: now[0])
    now[0] += 100
    assert block(4) == 2.0
