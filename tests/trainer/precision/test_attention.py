"""Which kernel torch's attention takes. On a CPU that is flash or math; the probe is the one that runs on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mantissa.dtypes import DtypeRecorder
from mantissa.generators import random_state
from tests.helpers import copied, same_bits, trainer_of
from trainer.precision import attention
from trainer.profiling.attention import KernelsTaken
from trainer.profiling.flops import ModelFlops
from trainer.trainer import Trainer

GPT2 = ("recipe=gpt2", "recipe.context=32", "data=synthetic", "data.vocab_size=64", "batch_size=4", "steps=4")
BERT = ("recipe=bert", "recipe.context=64", "data=synthetic", "data.vocab_size=64", "batch_size=4", "steps=4")
T5 = ("recipe=t5", "recipe.context=64", "data=synthetic", "data.vocab_size=64", "batch_size=4", "steps=4")
RESNET = ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=synthetic", "data.classes=4")


def kernels(trainer: Trainer) -> list[dict[str, Any]]:
    recorder = KernelsTaken()
    trainer.observe(recorder)
    return recorder.rows()


@pytest.fixture(autouse=True)
def cudnn_as_before() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_kernel_that_is_taken_is_recorded_with_what_it_depends_on() -> None:
    trainer = trainer_of(*GPT2, "recipe.dropout=0", "precision=bf16")
    (call,) = kernels(trainer)
    assert call.pop("heads") * call.pop("head_width") == trainer.model.gpt2.config.n_embd
    assert call.pop("calls") == trainer.model.gpt2.config.n_layer
    assert call == {
        "kernel": "flash", "dtype": "bfloat16", "length": 32, "mask": False, "causal": True, "dropout": 0.0
    }  # fmt: skip
    (call,) = kernels(trainer_of(*GPT2, "recipe.dropout=0.1"))
    assert (call["kernel"], call["dtype"], call["dropout"]) == ("math", "float32", 0.1)  # as it is on a CPU
    assert kernels(trainer_of(*GPT2, "recipe.attention=eager")) == []


@pytest.mark.parametrize(
    "options",
    [
        (*GPT2, "recipe.dropout=0.1", "compile=default"),
        (*GPT2, "recipe.dropout=0.1", "precision=bf16_master"),
        (*GPT2, "recipe.dropout=0.1", "activation_checkpointing=blocks"),
        (*RESNET, "batch_size=4", "steps=2"),
    ],
)
def test_the_forward_pass_changes_nothing(options: tuple[str, ...]) -> None:
    trainer = trainer_of(*options)
    trainer.model.eval()
    before = copied(trainer.model.state_dict()), random_state(trainer.device)
    trainer.observe(KernelsTaken(), DtypeRecorder(trainer.model), ModelFlops())
    assert same_bits((trainer.model.state_dict(), random_state(trainer.device)), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.model.training


@pytest.mark.parametrize(("recipe", "masked"), [(GPT2, False), (BERT, True), (T5, True)])
def test_recipes_that_mask_keep_away_from_cudnns_attention(recipe: tuple[str, ...], masked: bool) -> None:
    """pytorch issue 196678: NaN gradients beside a mask, as in BERT of 64 tokens on a Hopper GPU."""
    torch.backends.cuda.enable_cudnn_sdp(masked)  # what an earlier run of this process left
    trainer = trainer_of(*recipe)
    allowed = attention.enabled()
    assert ("cudnn" in allowed) is not masked
    assert {"flash", "efficient", "math"} <= set(allowed)
    assert any(call["mask"] for call in kernels(trainer)) is masked
