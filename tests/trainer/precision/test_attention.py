"""Which kernels torch's attention may take, and that inspecting a model changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mantissa.step.trace import DtypeRecorder
from mantissa.tensors import random_state
from tests.helpers import GPT2, copied, same_bits, trainer_of
from trainer.profiling.flops import ModelFlops

BERT, T5 = (("recipe=bert", *GPT2[1:]), ("recipe=t5", *GPT2[1:]))
RESNET = ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=synthetic", "data.classes=4")


@pytest.fixture(autouse=True)
def cudnn_as_before() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


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
    trainer.observe(DtypeRecorder(trainer.model), ModelFlops())
    assert same_bits((trainer.model.state_dict(), random_state(trainer.device)), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.model.training


@pytest.mark.parametrize(("recipe", "masked"), [(GPT2, False), (BERT, False), (T5, True)])
def test_recipes_that_mask_keep_away_from_cudnns_attention(recipe: tuple[str, ...], masked: bool) -> None:
    """pytorch issue 196678: NaN gradients beside a mask, as in BERT of 64 tokens on a Hopper GPU."""
    torch.backends.cuda.enable_cudnn_sdp(masked)  # what an earlier run of this process left
    trainer_of(*recipe)
    assert torch.backends.cuda.cudnn_sdp_enabled() is not masked
