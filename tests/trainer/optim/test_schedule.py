from __future__ import annotations

import math

import pytest
import torch

from trainer.optim.schedule import Cosine, Linear, OneCycle, Schedule, WarmupStableDecay


@pytest.mark.parametrize("schedule", [Schedule(10), Cosine(10), Linear(10), WarmupStableDecay(10)])
def test_warmup_is_linear_and_ends_at_the_peak(schedule: Schedule) -> None:
    assert [schedule.factor(step, 100) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert schedule.factor(9, 100) == 1.0
    assert schedule.factor(10, 100) == 1.0


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (19, 0), (20, 1), (300, 15), (40_000, 2000), (10**6, 2000)])
def test_auto_warmup_is_a_twentieth_and_at_most_2000(steps: int, warmup: int) -> None:
    assert Schedule().warmup(steps) == warmup


def test_cosine_falls_to_its_final_share() -> None:
    schedule = Cosine(warmup_steps=20, final=0.1)
    values = [schedule.factor(step, 120) for step in range(20, 121)]
    assert values == pytest.approx([0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 100)) for step in range(101)])
    assert (values[0], values[100]) == (1.0, pytest.approx(0.1))


def test_wsd_is_flat_then_falls_linearly_over_its_share() -> None:
    schedule = WarmupStableDecay(warmup_steps=0, decay=0.2, final=0.0)
    values = [schedule.factor(step, 100) for step in range(101)]
    assert set(values[:81]) == {1.0}
    assert values[90] == pytest.approx(0.5)
    assert values[99] == pytest.approx(0.05)
    assert values[100] == pytest.approx(0.0)
    half = WarmupStableDecay(warmup_steps=10, decay=0.5, final=0.4)
    assert half.factor(59, 110) == 1.0  # 100 steps follow the warm-up; the last 50 decay
    assert half.factor(85, 110) == pytest.approx(0.7)


def torchs(cls: type[torch.optim.lr_scheduler.LRScheduler], steps: int, **options: object) -> list[float]:
    """The learning rates of one of torch's schedulers with a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = cls(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("steps", "options"),
    [(100, {}), (37, {"pct_start": 0.45}), (3, {}), (1, {})],
)
def test_onecycle_has_the_values_of_torchs(steps: int, options: dict[str, float]) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR
    expected = torchs(scheduler, steps, max_lr=1.0, total_steps=steps, cycle_momentum=False, **options)
    schedule = OneCycle(**{"rise" if key == "pct_start" else key: value for key, value in options.items()})
    assert [schedule.factor(step, steps) for step in range(steps)] == pytest.approx(expected, rel=1e-9)
    assert schedule.factor(steps - 1, steps) == pytest.approx(1 / 25 / 1e4)


@pytest.mark.parametrize(("steps", "final"), [(10, 0.0), (73, 0.2)])
def test_linear_has_the_values_of_torchs(steps: int, final: float) -> None:
    expected = torchs(torch.optim.lr_scheduler.LinearLR, steps, start_factor=1.0, end_factor=final, total_iters=steps)
    schedule = Linear(warmup_steps=5, final=final)
    assert [schedule.factor(5 + step, 5 + steps) for step in range(steps)] == pytest.approx(expected)
    assert schedule.factor(5 + 2 * steps, 5 + steps) == pytest.approx(final)
