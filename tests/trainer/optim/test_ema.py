"""The average of the weights: its formula, where it is used, and that it survives a resume."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import BIGNET, GPT2, copied, fit, same_bits, trainer_of

TINY = (*BIGNET, "micro_batch_size=2", "eval_samples=16", "steps=8", "optimizer.lr=0.1", "ema=default")


@pytest.mark.parametrize("mode", ["fp32", "bf16_pure", "bf16_master"])
def test_it_is_the_average_of_the_weights_after_each_step_in_fp32(mode: str) -> None:
    trainer = trainer_of(*TINY, f"precision={mode}", "ema.decay=0.3")
    kept = dict(trainer.masters.persistent_weights()) if trainer.masters else dict(trainer.model.named_parameters())
    expected = {name: each.detach().double() for name, each in kept.items()}
    batches = trainer.batches()
    for step in range(1, 6):
        trainer.train_step(next(batches))
        decay = min(0.3, (1 + step) / (10 + step))  # the warm-up ends at step 3
        for name, each in kept.items():
            expected[name] = decay * expected[name] + (1 - decay) * each.detach().double()
    found = dict(trainer.average.persistent_weights())
    assert {average.dtype for average in found.values()} == {torch.float32}
    torch.testing.assert_close({name: each.double() for name, each in found.items()}, expected, rtol=1e-6, atol=1e-7)


def test_evaluation_uses_it_and_gives_the_weights_back() -> None:
    trainer, other = trainer_of(*TINY), trainer_of(*TINY, "ema=none")
    fit(trainer, 4)
    own = copied(trainer.model.state_dict())
    other.model.load_state_dict(trainer.average.state_of_model() or {})
    assert trainer.evaluate() == other.evaluate()
    other.model.load_state_dict(own)
    assert trainer.evaluate() != other.evaluate()
    assert same_bits(copied(trainer.model.state_dict()), own)


def test_batch_norms_statistics_are_averaged_and_its_count_is_not() -> None:
    images = ("recipe=resnet", "recipe.arch=resnet18", "batch_size=4", "eval_samples=4", "steps=4", "ema=default")
    trainer = trainer_of(*images, "ema.decay=0.9", "ema.warmup=false")
    first = {name: each.clone() for name, each in trainer.model.named_buffers()}
    fit(trainer, 1)
    state = trainer.average.state_of_model() or {}
    for name, each in trainer.model.named_buffers():
        if name.endswith("num_batches_tracked"):
            assert state[name] == each == 1
        else:
            torch.testing.assert_close(state[name], first[name].lerp(each, 0.1))
            assert not torch.equal(state[name], each)


def test_a_weight_under_two_names_has_one_average() -> None:
    trainer = trainer_of(*GPT2, "steps=2", "ema=default")
    fit(trainer, 1)
    state, own = trainer.average.state_of_model() or {}, trainer.model.state_dict()
    one, other = [name for name, each in own.items() if each.data_ptr() == own["gpt2.lm_head.weight"].data_ptr()]
    assert len({one, other} & dict(trainer.average.persistent_weights()).keys()) == 1
    assert torch.equal(state[one], state[other])
    assert not torch.equal(state[one], own[one])
