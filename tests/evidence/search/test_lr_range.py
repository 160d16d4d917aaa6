"""The learning-rate range test: its schedule, when it ends, what it suggests, and the command."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evidence.search.lr_range import SMOOTHING, Curve, RangeTrainer, range_test
from evidence.search.lr_range import main as lr_range
from tests.helpers import CPU, compose
from trainer.errors import RunError
from trainer.trainer import StepRecord, Trainer

BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=16", "batch_size=16", "tracking=local", "device=cpu")


def record(step: int, lr: float, loss: float, skipped: bool = False) -> StepRecord:
    one = torch.tensor(1.0)
    return StepRecord(step, torch.tensor(loss), one, torch.tensor(skipped), one, lr, 1)


def curve_of(losses: np.ndarray, lr: np.ndarray) -> Curve:
    curve = Curve("")
    for step, (rate, loss) in enumerate(zip(lr.tolist(), losses.tolist(), strict=True), 1):
        if not curve.add(record(step, rate, loss), recovers=False):
            break
    return curve


def test_the_rate_rises_by_the_same_factor_from_the_lowest_to_the_highest() -> None:
    trainer = RangeTrainer.from_config(compose(*BIGNET, "steps=100"), CPU)
    trainer.lowest, trainer.highest = 1e-7, 10
    rates = [trainer.lr(step) for step in range(100)]
    assert rates[0] == pytest.approx(1e-7)
    assert rates[-1] == 10
    ratios = np.divide(rates[1:], rates[:-1])
    assert ratios == pytest.approx(np.full(99, 1e8 ** (1 / 99)))


def test_it_suggests_where_the_loss_falls_fastest_and_a_tenth_of_the_lowest() -> None:
    lr = np.geomspace(1e-7, 10, 400)
    falls = 4 - 2 / (1 + np.exp(-4 * np.log10(lr / 1e-3)))  # fastest at 1e-3
    rises = 40 * np.clip(np.log10(lr / 1e-1), 0, None)
    curve = curve_of(falls + rises, lr)
    fastest, tenth = curve.suggestions().values()
    delay = (1e8) ** (SMOOTHING / (1 - SMOOTHING) / 399)  # of the smoothed loss
    assert fastest == pytest.approx(1e-3 * delay, rel=0.15)
    assert tenth == pytest.approx(1e-2, rel=0.1)  # the lowest is where both curves meet
    assert curve.ended == "the smoothed loss was 4 times its lowest value"
    assert len(curve.lr) < 400
    rises_only = curve_of(np.linspace(1, 2, 50), np.geomspace(1e-7, 1, 50))
    assert rises_only.suggestions() == Curve("").suggestions() == {}


def test_it_ends_at_a_loss_that_is_not_finite_but_not_at_a_step_that_the_loss_scale_skips() -> None:
    curve = Curve("")
    assert curve.add(record(1, 1e-3, 1.0, skipped=True), recovers=True)
    assert curve.skipped_steps == 1
    assert not curve.add(record(2, 1e-2, math.nan), recovers=True)
    assert "not finite" in curve.ended
    assert len(curve.loss) == len(curve.smoothed) + 1
    assert not Curve("").add(record(1, 1e-3, 1.0, skipped=True), recovers=False)


def test_it_takes_the_steps_of_training() -> None:
    """With one rate for all steps, the losses are those of a run with a constant schedule."""
    config = compose(*BIGNET, "precision=bf16", "steps=5", "schedule=constant", "schedule.warmup_steps=0")
    near = range_test(config, 1e-3 * (1 - 1e-12), 1e-3, "")
    trainer = Trainer.from_config(config, CPU)
    assert trainer.config.optimizer.lr == 1e-3
    losses = [float(trainer.train_step(batch).loss) for batch in trainer.batches()]
    assert near.loss == pytest.approx(losses, rel=1e-6)
    assert losses[0] != losses[-1]


def test_the_command_suggests_a_rate_and_leaves_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lr_range([*BIGNET, "precision=fp32,bf16", "steps=60", "max=100", f"output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    rates = [float(line.split()[0].partition("=")[2]) for line in out.splitlines() if "optimizer.lr=" in line]
    assert len(rates) == 4
    assert all(1e-7 < rate < 100 for rate in rates)
    folder = tmp_path / "lr_range" / "bignet"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / "lr_range.png"]
    with pytest.raises(RunError, match=r"the loss does not fall within this range: set a larger max"):
        lr_range([*BIGNET, "min=1e-12", "max=1e-11", "steps=21", f"output_dir={tmp_path}"])


def test_each_test_is_on_the_device_of_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("evidence.search.lr_range", "trainer.trainer"):
        monkeypatch.setattr(f"{module}.detect", lambda device: replace(CPU, name=device))
    used: list[str] = []
    monkeypatch.setattr(RangeTrainer, "batches", lambda trainer: used.append(trainer.hardware.name) or iter(()))
    with pytest.raises(RunError):
        lr_range([*BIGNET, "precision=fp32", "device=cpu,cuda:0", f"output_dir={tmp_path}"])
    assert used == ["cpu", "cuda:0"]
