"""Schedule-free AdamW: the library's steps, and the averaged weights that are evaluated."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import copied, fit, same_bits, trainer_of
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import Snapshot, write
from trainer.errors import UserError
from trainer.parallel.world import World

schedulefree = pytest.importorskip("schedulefree")

BIGNET = ("recipe=bignet", "recipe.width=16", "recipe.layers=6", "data.samples=128", "batch_size=32", "steps=20")
FREE = (*BIGNET, "optimizer=schedulefree", "schedule=constant", "schedule.warmup_steps=0")


def test_weights_and_averages_are_those_of_the_library() -> None:
    trainer = trainer_of(*FREE)
    bare = copy.deepcopy(trainer.model)
    decayed = [each for each in bare.parameters() if each.ndim == 2]
    others = [each for each in bare.parameters() if each.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.08}, {"params": others, "weight_decay": 0.0}]
    library = schedulefree.AdamWScheduleFree(groups, lr=2.5e-3, betas=(0.9, 0.9955), r=0.75)
    library.train()
    batches = trainer.batches()
    for _ in range(4):
        _, correction, _ = trainer.gradients(next(batches))
        for parameter, own in zip(bare.parameters(), trainer.model.parameters(), strict=True):
            parameter.grad = own.grad.clone()
        trainer.update.step(trainer.step, correction)
        library.step()
    assert same_bits(trainer.model.state_dict(), bare.state_dict())
    library.eval()
    with trainer.average.in_place():
        averaged = copied(trainer.model.state_dict())
    for name, weight in bare.state_dict().items():
        assert torch.allclose(averaged[name], weight, rtol=1e-5, atol=1e-7), name
        assert not torch.equal(weight, trainer.model.state_dict()[name])


@pytest.mark.parametrize("mode", ["fp32", "bf16_master", "bf16_pure"])
def test_evaluation_has_the_averages_and_leaves_the_training_alone(mode: str) -> None:
    def trained(evaluates: bool) -> tuple[dict[str, Tensor], list[float]]:
        trainer = trainer_of(*FREE, f"precision={mode}", "optimizer.lr=0.01", "optimizer.weight_decay=0")
        scores = []
        for step in range(1, trainer.plan.steps + 1):
            fit(trainer, step)
            if evaluates:
                before = copied(trainer.state_dict()["model"])
                scores.append(trainer.evaluate()["loss"])
                assert same_bits(before, trainer.state_dict()["model"])
        return copied(trainer.model.state_dict()), scores

    weights, scores = trained(True)
    assert same_bits(weights, trained(False)[0])
    assert scores[-1] < 0.7 * scores[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*BIGNET, "optimizer=schedulefree"), r"instead of using a schedule; set schedule=constant"),
        ((*FREE, "ema=default"), r"ema=default: optimizer.name=AdamWScheduleFree averages the weights itself"),
        (
            ("recipe=resnet", "recipe.arch=resnet18", "optimizer=schedulefree", "schedule=constant"),
            r"the running statistics of batch norm are wrong; use another optimizer, with ema=default",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer_of(*overrides)


def test_a_checkpoint_of_the_warm_up_is_read_at_the_end(tmp_path: Path) -> None:
    """The best one may be, and the rates that the optimizer has counted were lower then."""
    trainer = trainer_of(*FREE, "schedule.warmup_steps=8")
    fit(trainer, 3)
    averages = copied(trainer.average.state_of_model() or {})
    write(tmp_path, Snapshot.of(trainer.state_dict(), {}, World()), None, World(), lambda _: None)
    fit(trainer, 12)
    load(tmp_path).restore(trainer.model, trainer.optimizer, trainer.masters, trainer.average)
    assert same_bits(trainer.average.state_of_model() or {}, averages)
