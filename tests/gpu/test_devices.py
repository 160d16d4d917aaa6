"""What holds on a GPU as on the CPU: compiled gradients, resumed runs, memory that runs out, Muon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recipes.gpt2 import SHAPES, Shape
from tests.gpu.conftest import real
from tests.helpers import fit, same_bits, trainer_of
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.store import Checkpoint, find_verified
from trainer.checkpoint.writer import CheckpointWriter
from trainer.data.loader import to_device
from trainer.errors import is_out_of_memory
from trainer.optim.muon import Muon
from trainer.parallel.world import World

on_every_device = pytest.mark.parametrize("device", ["cpu", "cuda"])
GPT2 = ("recipe=gpt2", "recipe.size=small", "recipe.context=32", "data=synthetic", "data.vocab_size=256")
RESNET = ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=synthetic", "data.classes=10")
FOUR = ("batch_size=4", "micro_batch_size=4", "steps=6")


@pytest.fixture(autouse=True)
def small_size(monkeypatch: pytest.MonkeyPatch, gpu: object) -> None:
    monkeypatch.setitem(SHAPES, "small", Shape(2, 2, 64, 32))


def gradients(*options: str) -> dict[str, Tensor]:
    """Those of the first two steps' microbatches, summed."""
    trainer = trainer_of(*options, *FOUR, device="cuda")
    for _, microbatches in zip(range(2), trainer.batches(), strict=False):
        with trainer.config.precision.autocast(trainer.device):
            output = trainer.recipe.loss(trainer.model, to_device(microbatches[0], trainer.device))
        (output.loss_sum / trainer.recipe.count_targets(microbatches[0])).backward()
    return {name: parameter.grad.double() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.filterwarnings("default")  # warnings of the compiler are not tested here
@real("torch.compile is not pretended")
@pytest.mark.parametrize("recipe", [GPT2, RESNET], ids=["gpt2", "resnet"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"], indirect=True)
def test_compiled_gradients_equal_eager_ones_up_to_rounding(recipe: tuple[str, ...], mode: str) -> None:
    """Known bugs of the compiler gave wrong gradients of LayerNorm without a word."""
    exact, eager, compiled = (
        gradients(*recipe, *options)
        for options in ([], [f"precision={mode}"], [f"precision={mode}", "compile=default"])
    )
    for name, expected in exact.items():
        size = expected.norm().clamp(min=1e-12)
        # Batch norm of four samples makes a thousandth of what another algorithm of a convolution rounds to.
        allowed = (2e-3 if recipe is RESNET else 1e-4) + 3 * (eager[name] - expected).norm() / size
        assert (compiled[name] - expected).norm() / size < allowed, name


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16_master"], indirect=True)
def test_a_run_continues_from_its_checkpoint_bit_for_bit(mode: str, tmp_path: Path) -> None:
    options = (*GPT2, *FOUR, f"precision={mode}", "deterministic=true", "ema=default", "recipe.dropout=0.1")
    whole = trainer_of(*options, device="cuda")
    fit(whole)
    half = trainer_of(*options, device="cuda")
    fit(half, 3)
    writer = CheckpointWriter(Checkpoint(), tmp_path, World())
    writer.save(half.state_dict(), {}, None)
    fit(half)  # while the host's copy is written
    writer.finish()
    again = trainer_of(*options, device="cuda")
    again.restore(CheckpointReader(find_verified(tmp_path)))
    fit(again)
    for state in (lambda each: each.model.state_dict(), lambda each: each.optimizer.state_dict()["state"]):
        assert same_bits(state(again), state(whole))
    assert same_bits(again.average.persistent_weights(), whole.average.persistent_weights())


@on_every_device
def test_memory_that_runs_out_is_recognised_and_training_goes_on(device: str) -> None:
    trainer = trainer_of(*GPT2, *FOUR, device=device)
    fit(trainer, 1)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    assert torch.isfinite(fit(trainer, 2)[0].grad_norm)


@on_every_device
def test_muon_in_stacks_takes_torchs_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.optim.muon.bf16_is_emulated", lambda: False)  # torch's own iterates in bf16 everywhere
    generator = torch.Generator().manual_seed(0)
    starts, moves = (torch.randn(4, 64, 48, generator=generator).to(device) for _ in range(2))
    updated = []
    for cls in (Muon, torch.optim.Muon):
        weights = [nn.Parameter(start.clone()) for start in starts]
        optimizer = cls([{"params": weights, "muon": True}], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[union-attr]
        for weight, move in zip(weights, moves, strict=True):
            weight.grad = move.clone()
        optimizer.step()
        updated.append(torch.stack(weights).detach())
    step = (updated[1] - starts).norm()
    assert (updated[0] - updated[1]).norm() < 0.01 * step
