"""The project on a pretended CUDA device: nothing mixes devices, and in a step the host waits for nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes import gpt2
from recipes.language import torch_can_chunk
from tests.gpu.conftest import IMAGES
from tests.gpu.pretended import ALLOWED, DEVICE, GIB, PROJECT, MixedDevicesError, OnDevice, Pretended
from tests.helpers import BIGNET, GPT2, compose, fit, trainer_of
from trainer.config.settle import plan_of
from trainer.data.contract import Batch
from trainer.errors import UserError
from trainer.hardware import NATIVE, detect
from trainer.recipe import LossOutput
from trainer.run import start


def test_a_tensor_of_the_host_in_an_operator_of_the_device_fails(pretended: Pretended) -> None:
    layer = nn.Linear(4, 4)
    weight = layer.weight
    assert layer.to("cuda").weight is weight
    assert isinstance(weight, OnDevice)
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    assert weight.grad.device == DEVICE
    with pytest.raises(MixedDevicesError):
        layer(torch.ones(2, 4))
    (seen,) = pretended.mixed
    assert "test_pretended.py" in seen
    with pytest.raises(AssertionError):
        pretended.check()
    pretended.mixed.clear()


def test_the_host_waits_for_values_and_for_copies_that_block(pretended: Pretended) -> None:
    x = torch.ones(4).to("cuda", non_blocking=True)
    kept = x.to("cpu", non_blocking=True)
    torch.full((), 2.0, device="cuda").add_(x.sum())
    assert not pretended.waits
    assert not isinstance(kept, OnDevice)
    waiting = [x.cpu, x[0].item, lambda: bool(x[0]), x.nonzero, lambda: x[x > 0], lambda: kept.copy_(x)]
    waiting += [lambda: torch.tensor([1.0], device="cuda"), x.tolist, torch.cuda.synchronize]
    for number, wait in enumerate(waiting, 1):
        wait()
        assert len(pretended.waits) == number


def test_memory_is_counted_as_torch_counts_it(pretended: Pretended) -> None:
    pretended.total, pretended.elsewhere = 4 * GIB, GIB
    x = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    view = x[1:]
    x = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == GIB + 2**20
    del view
    assert torch.cuda.memory_allocated() == 2**20
    assert torch.accelerator.memory_reserved() == torch.cuda.max_memory_allocated() == GIB + 2**20
    assert torch.accelerator.get_memory_info() == (2 * GIB - 2**20, 4 * GIB)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_reserved() == 2**20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")


TINY = (*GPT2, "micro_batch_size=2")
JOBS = {
    "gpt2": (*TINY, "precision=fp32", "recipe.dropout=0.1", "diagnostics=numerics"),
    "gpt2-chunks": (*TINY, "precision=bf16_sr", f"recipe.chunked_loss={torch_can_chunk()}", "optimizer=muon"),
    "gpt2-nvfp4": (*TINY, "precision=nvfp4"),
    "llama": ("recipe=llama", *TINY[1:], "precision=fp16_master", "activation_checkpointing=blocks"),
    "bert": ("recipe=bert", *TINY[1:], "precision=bf16_master", "ema=default"),
    "t5": ("recipe=t5", *TINY[1:], "precision=bf16", "optimizer=rmsprop"),
    "resnet": (*IMAGES, "precision=fp16", "batch_size=4", "micro_batch_size=2", "metrics=[f1_macro]"),
    "bignet": (*BIGNET, "precision=tf32", "optimizer=sgd", "loader=pinned"),
    "bignet-fp8": ("recipe=bignet", "recipe.layers=2", "recipe.width=64", "batch_size=32", "precision=fp8"),
    "bignet-pure": (*BIGNET, "precision=bf16_pure", "profiler=memory"),
}


@pytest.mark.parametrize("job", JOBS)
def test_runs_mix_no_devices_and_wait_for_nothing_in_a_step(job: str, pretended: Pretended, tmp_path: Path) -> None:
    """From the first step to the exported model, evaluation included."""
    if "fp8" in job:
        pytest.importorskip("torchao")
    written = ("tracking=local", f"output_dir={tmp_path}", "run_name=run", "quiet=true")
    sizes = ("device=cuda", "steps=3", "eval_every=2", "eval_samples=4", "log_every=2")
    assert start.train(compose(*JOBS[job], *sizes, *written)).summary["status"] == "FINISHED"
    assert (tmp_path / "run" / "best").is_dir()


def test_a_read_and_a_tensor_of_the_host_in_a_loss_are_named(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = gpt2.GPT2.loss

    def reading(recipe: gpt2.GPT2, model: nn.Module, batch: Batch) -> LossOutput:
        output = loss(recipe, model, batch)
        output.loss_sum.cpu()
        return output

    def mixing(recipe: gpt2.GPT2, model: nn.Module, batch: Batch) -> LossOutput:
        output = loss(recipe, model, batch)
        return LossOutput(output.loss_sum * torch.ones(2), {})

    monkeypatch.setattr(gpt2.GPT2, "loss", reading)
    fit(trainer_of(*TINY, "steps=1", "loader=plain", device="cuda"))
    with pytest.raises(AssertionError, match=r"waits within a step: .*copy to the host at tests/gpu/test_pretended.py"):
        pretended.check()
    pretended.waits_in_steps.clear()
    monkeypatch.setattr(gpt2.GPT2, "loss", mixing)
    with pytest.raises(MixedDevicesError):
        fit(trainer_of(*TINY, "steps=1", "loader=plain", device="cuda"))
    with pytest.raises(AssertionError, match=r"mixed devices: .*mul at tests/gpu/test_pretended.py"):
        pretended.check()
    pretended.mixed.clear()


def test_functions_that_may_wait_exist() -> None:
    for function in ALLOWED:
        file, name = function.split(":")
        assert f"def {name}(" in (PROJECT / file).read_text()


MODES = ("tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")


@pytest.mark.parametrize(
    ("pretended", "native", "emulated"),
    [
        ((7, 5), {"fp16"}, set()),  # scaled formats need bf16 around them
        ((8, 0), {"tf32", "bf16", "fp16"}, {"fp8", "mxfp8", "nvfp4"}),
        ((8, 9), {"tf32", "bf16", "fp16", "fp8"}, {"mxfp8", "nvfp4"}),
        ((9, 0), {"tf32", "bf16", "fp16", "fp8"}, {"mxfp8", "nvfp4"}),
        ((10, 0), {"tf32", "bf16", "fp16", "fp8", "mxfp8"}, {"nvfp4"}),
        ((12, 0), {"tf32", "bf16", "fp16", "fp8"}, {"mxfp8", "nvfp4"}),
    ],
    indirect=["pretended"],
    ids=["7.5", "8.0", "8.9", "9.0", "10.0", "12.0"],
)
def test_the_formats_of_a_capability(pretended: Pretended, native: set[str], emulated: set[str]) -> None:
    """A plan takes what is native or emulated, and refuses the rest."""
    hardware, planned = detect("cuda"), {}
    for mode in MODES:
        with suppress(UserError):
            plan_of(compose(*TINY, "device=cuda", f"precision={mode}"), hardware)
            planned[mode] = hardware.support(mode)
    assert {mode for mode, support in planned.items() if support == NATIVE} == native
    assert planned.keys() - native == emulated
