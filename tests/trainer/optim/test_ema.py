"""The average of the weights: its formula, where it is used, and that it survives a resume."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import compose, start
from trainer.errors import UserError
from trainer.optim.ema import ExponentialMovingAverage
from trainer.trainer import Trainer

TINY = ["recipe=bignet", "recipe.layers=2", "recipe.width=8", "data.samples=64", "batch_size=8", "micro_batch_size=4",
        "eval_samples=16", "steps=8", "optimizer.lr=0.1", "ema=default"]  # fmt: skip
IMAGES = ["recipe=resnet", "recipe.arch=resnet18", "batch_size=4", "eval_samples=4", "steps=4", "ema=default"]


def begun(*overrides: str, tiny: list[str] = TINY) -> Trainer:
    return start(compose(*tiny, "device=cpu", *overrides))


def train(trainer: Trainer, steps: int) -> None:
    batches = trainer.batches()
    for _ in range(steps):
        trainer.train_step(next(batches))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


@pytest.mark.parametrize(("step", "expected"), [(1, 2 / 11), (100, 101 / 110), (10**6, 0.999)])
def test_the_decay_rises_to_its_value(step: int, expected: float) -> None:
    assert ExponentialMovingAverage().decay_after(step) == pytest.approx(expected)
    assert ExponentialMovingAverage(warmup=False).decay_after(step) == 0.999


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16_pure", "bf16_master"])
def test_it_is_the_average_of_the_weights_after_each_step_in_fp32(mode: str) -> None:
    trainer = begun(f"precision={mode}", "ema.decay=0.6")
    kept = dict(trainer.masters.held()) if trainer.masters else {}
    expected = {name: kept.get(name, each).detach().double() for name, each in trainer.model.named_parameters()}
    batches = trainer.batches()
    for step in range(1, 6):
        trainer.train_step(next(batches))
        decay = min(0.6, (1 + step) / (10 + step))
        for name, each in trainer.model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * kept.get(name, each).detach().double()
    for name, average in trainer.average.held().items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-6, atol=1e-7)
    assert len(expected) == len(trainer.average.held())


def test_evaluation_uses_it_and_gives_the_weights_back() -> None:
    trainer = begun()
    train(trainer, 4)
    own = weights(trainer)
    other = begun("ema=none")
    other.model.load_state_dict(trainer.average.state_of_model() or {})
    assert trainer.evaluate() == other.evaluate()
    other.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate() != other.evaluate()
    assert all(torch.equal(each, own[name]) for name, each in trainer.model.named_parameters())


def test_batch_norms_statistics_are_averaged_and_its_count_is_not() -> None:
    trainer = begun("ema.decay=0.9", "ema.warmup=false", tiny=IMAGES)
    first = {name: each.clone() for name, each in trainer.model.named_buffers()}
    train(trainer, 1)
    state = trainer.average.state_of_model() or {}
    for name, each in trainer.model.named_buffers():
        if name.endswith("num_batches_tracked"):
            assert state[name] == each == 1
        else:
            torch.testing.assert_close(state[name], first[name].lerp(each, 0.1))
            assert not torch.equal(state[name], each)


def test_a_weight_under_two_names_has_one_average() -> None:
    gpt2 = ["recipe=gpt2", "recipe.size=nano", "recipe.context=8", "data=synthetic", "data.vocab_size=50"]
    trainer = begun(tiny=[*gpt2, "batch_size=4", "steps=2", "ema=default"])
    train(trainer, 1)
    state = trainer.average.state_of_model() or {}
    by_memory: dict[int, list[str]] = {}
    for name, each in trainer.model.state_dict().items():
        by_memory.setdefault(each.data_ptr(), []).append(name)
    ((one, other),) = [names for names in by_memory.values() if len(names) > 1]
    assert len({one, other} & trainer.average.held().keys()) == 1
    assert torch.equal(state[one], state[other])
    assert not torch.equal(state[one], trainer.model.state_dict()[one])


@pytest.mark.parametrize("decay", ["0", "1", "-0.5", "1.5"])
def test_a_decay_outside_of_0_and_1_is_refused(decay: str) -> None:
    with pytest.raises(UserError, match=f"ema.decay={float(decay)} must lie between 0 and 1"):
        compose("ema=default", f"ema.decay={decay}")
