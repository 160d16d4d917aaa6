from __future__ import annotations

import torch

from evidence.turns import stopwatch


def test_a_stopwatch_measures_only_its_own_steps() -> None:
    now = [1000.0]

    def work(steps: int) -> None:
        now[0] += 0.5 * steps

    block = stopwatch(work, torch.device("cpu"), lambda: now[0])
    now[0] += 100
    assert block(4) == 2.0
