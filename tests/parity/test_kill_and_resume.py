"""Stopped or killed anywhere and resumed: the same bits as never stopped, in weights, state and metric log."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import compose, same_bits
from tests.kills.harness import metrics
from trainer.checkpoint.reader import load
from trainer.data.contract import Batch
from trainer.errors import Interrupted
from trainer.run.start import train
from trainer.trainer import StepRecord, Trainer

STEPS = 11
CHANGING = "nvfp4 precision.then=fp16 precision.until=5"
RECIPES = {
    "gpt2": [
        *("recipe=gpt2", "recipe.size=tiny", "recipe.context=16", "recipe.dropout=0.1"),
        *("data=synthetic", "data.vocab_size=90", "ema=default"),
    ],
    # Batch norm's buffers, channels_last, and SGD's momentum.
    "resnet": [
        *("recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "recipe.image_size=32", "optimizer=sgd"),
        *("optimizer.lr=0.01", "data=synthetic", "data.classes=3", "data.samples=24"),
    ],
}
AtStep = Callable[..., None]


class Killed(Exception):
    pass


def kill() -> None:
    raise Killed


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Do something at the end of one optimizer step, before it is logged, or when it is evaluated."""
    original, evaluate = Trainer.train_step, Trainer.evaluate

    def plan(step: int, act: Callable[[], None], evaluated: int | None = None) -> None:
        def evaluation(trainer: Trainer, *given: Any) -> dict[str, float] | None:
            if trainer.step == evaluated:
                act()
            return evaluate(trainer, *given)

        def train_step(trainer: Trainer, microbatches: list[Batch]) -> StepRecord:
            record = original(trainer, microbatches)
            if record.step == step:
                act()
            return record

        monkeypatch.setattr(Trainer, "train_step", train_step)
        monkeypatch.setattr(Trainer, "evaluate", evaluation)

    return plan


def go(folder: Path, recipe: str, mode: str, resume: str = "null") -> dict[str, Any]:
    sizes = (f"steps={STEPS}", "batch_size=4", "micro_batch_size=2", "eval_every=5", "eval_samples=4", "log_every=4")
    scaled = ("clip=norm", f"scaler.init={2.0**21}", "scaler.interval=3")  # so that the scale also grows
    own = (f"output_dir={folder}", "run_name=run", f"resume={resume}", "tracking=local")
    exactly = (*f"precision={mode}".split(), "device=cpu", "deterministic=true")
    return train(compose(*RECIPES[recipe], *sizes, *scaled, *own, *exactly)).summary


def end_state(folder: Path) -> tuple[Any, ...]:
    saved = load(folder / "run" / "checkpoints", STEPS)
    assert saved.step == STEPS
    progress = {name: value for name, value in saved.progress.items() if name != "options"}  # with the folder
    return saved.tensors(), progress, saved.scores, saved.loss_scale


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [("gpt2", "fp16_master"), ("resnet", "bf16"), ("gpt2", "bf16_sr"), ("gpt2", CHANGING)],
)
def test_a_run_stopped_repeatedly_equals_an_uninterrupted_one(
    recipe: str, mode: str, tmp_path: Path, at_step: AtStep, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After the first step, within a log window, within evaluations, at the last step."""
    go(whole := tmp_path_factory.mktemp("whole"), recipe, mode)
    resume = "null"
    for step, evaluated in ((1, None), (3, None), (-1, 5), (-1, 10), (STEPS, None)):
        at_step(step, interrupt, evaluated)
        step = evaluated or step
        with pytest.raises(Interrupted, match=f"after step {step}, saved"):
            go(tmp_path, recipe, mode, resume)
        resume = "auto" if resume != "auto" else str(tmp_path / "run")
    at_step(-1, kill)
    summary = go(tmp_path, recipe, mode, resume)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert same_bits(end_state(tmp_path), end_state(whole))
    assert metrics(tmp_path / "run") == metrics(whole / "run")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 4, 5, *[6] * (mode == CHANGING), 8, 10, 11, 11]
    before = json.loads((whole / "run" / "summary.json").read_text())
    same = ("status", "step", "final", "best", "skipped_steps")
    assert {key: summary[key] for key in same} == {key: before[key] for key in same}
    if mode.startswith("fp16"):
        assert 2 <= summary["skipped_steps"] <= STEPS - 4
        assert len({line["loss_scale"] for line in metrics(whole / "run") if "loss_scale" in line}) > 1
