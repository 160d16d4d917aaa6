"""Ten faults in the project's own recipes, planted after every threshold was fixed: a test of what was not tuned for.

What must be named was written down before the doctor examined any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models.resnet import BasicBlock, ResNet

from mantissa.doctor.diagnosis import FOUND
from mantissa.finding import (
    BACKWARD,
    DOMAIN,
    DTYPE,
    ERROR,
    FORWARD,
    LOST,
    OVERFLOW,
    UNDERFLOW,
    UPDATE,
)
from recipes import bert, gpt2, t5
from tests.mantissa.doctor.faults import Computes
from tests.mantissa.doctor.planted import TINY, Expected, Fault
from trainer.config.compose import compose
from trainer.data.contract import Batch
from trainer.precision.modes import Precision
from trainer.recipe import LossOutput, Recipe
from trainer.trainer import Trainer


@dataclass(frozen=True)
class HeldOut(Fault):
    """A fault in a recipe: ``overrides`` choose the recipe and the precision, ``change`` alters the built model."""

    model: Callable[[], nn.Module] = nn.Identity
    precision: Precision = field(default_factory=Precision)
    overrides: tuple[str, ...] = ()
    change: Callable[[Any], None] = lambda model: None
    own_loss: Callable[[Any, Any, Batch], Tensor] | None = None
    """From the recipe, the model and the batch to the summed loss; None: the recipe's own."""

    def trainer(self, seed: int) -> Trainer:
        config = compose(["device=cpu", "checkpoint.enabled=false", f"seed={seed}", *self.overrides])
        return Trainer.from_config(replace(config, recipe=_changed(config.recipe, self)))


def _changed(recipe: Recipe, fault: HeldOut) -> Recipe:
    """Return the recipe with the fault in it. Its class has no name, so no command line offers it."""

    class Changed(type(recipe)):  # type: ignore[misc]
        name: ClassVar[str] = ""

        def __post_init__(self) -> None:
            self.__dict__["name"] = recipe.name
            getattr(super(), "__post_init__", lambda: None)()

        def build_model(self, datasets: Any) -> nn.Module:
            model: nn.Module = super().build_model(datasets)
            with torch.no_grad():
                fault.change(model)
            return model

        def loss(self, model: Any, batch: Batch) -> LossOutput:
            if fault.own_loss is None:
                output: LossOutput = super().loss(model, batch)
                return output
            return LossOutput(fault.own_loss(self, model, batch), {})

    changed: Recipe = Changed(**{each.name: getattr(recipe, each.name) for each in fields(recipe)})
    return changed


def cubic_gelu(own: Any, x: Tensor) -> Tensor:
    """The tanh formula with x³: beyond 256 the backward pass multiplies 0 by an x² of inf in fp16."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def large_gelu(model: Any) -> None:
    """Replace one block's activation, and make its inputs large."""
    mlp = model.gpt2.transformer.h[2].mlp
    mlp.act = Computes(cubic_gelu)
    mlp.c_fc.weight.mul_(1000)


def large_gate(model: Any) -> None:
    """Make gate and up large enough for their product, which LlamaMLP itself computes, not for themselves."""
    for layer in (model.llama.model.layers[2].mlp.gate_proj, model.llama.model.layers[2].mlp.up_proj):
        layer.weight.mul_(700)


def naive_softplus(model: Any) -> None:
    """Let the activation of one encoder block be log(1 + exp(x)) without log1p: the 1 swallows a small exp."""
    dense = model.encoder.block[1].layer[1].DenseReluDense
    dense.act = Computes(lambda own, x: torch.log(1 + torch.exp(x - 5)))


class UnitEmbedding(nn.Embedding):
    """Vectors of length 1. The clamp protects the division, not the derivative of the square root at 0."""

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = super().forward(tokens)
        return vectors / vectors.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-6)


def unit_embedding(model: Any) -> None:
    """Replace the encoder's embedding, the frequent token 0 being padding, whose vector is 0."""
    weight = model.shared.weight
    weight[0] = 0
    model.encoder.embed_tokens = UnitEmbedding(*weight.shape)
    model.encoder.embed_tokens.weight = weight


def smoothed_loss(recipe: Any, model: Any, batch: Batch) -> Tensor:
    """Smoothed cross-entropy at a low temperature, by the logarithm of a softmax: in fp16 that is log(0)."""
    tokens = batch["tokens"]
    mask = (tokens != model.config.pad_token_id).long()
    output = model(input_ids=tokens, token_type_ids=batch["segments"], attention_mask=mask)
    loss = torch.zeros((), device=tokens.device)
    for logits, place in ((output.start_logits, batch["start"]), (output.end_logits, batch["end"])):
        probability = (logits / 0.02).softmax(-1)
        target = 0.9 * F.one_hot(place.clamp(min=0), logits.shape[1]) + 0.1 / logits.shape[1]
        loss = loss - (target.to(logits.dtype) * probability.log()).float().sum()
    return loss


def saturated_tanh(model: Any) -> None:
    """Move the inputs of a tanh near 3.5, where bf16 rounds tanh to 1, and its derivative 1 - tanh² to 0."""
    intermediate = model.bert.encoder.layer[1].intermediate
    intermediate.intermediate_act_fn = nn.Tanh()
    intermediate.dense.bias.fill_(3.5)


def handmade_head(model: Any) -> None:
    """Use the classifier's weights without calling it, so that what is set for the layer has no effect."""
    model.fc = Computes(lambda own, x: F.linear(x, own.linear.weight, own.linear.bias), linear=model.fc)


def loss_in_16_bits(recipe: Any, model: Any, batch: Batch) -> Tensor:
    """Leave out the cast of the logits to fp32."""
    logits = model(model.normalise(batch["image"], torch.contiguous_format))
    return F.cross_entropy(logits, batch["label"], reduction="sum")


class LogitScale(nn.Module):
    """A learned temperature that begins at 100, where bf16 numbers are 0.5 apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(100.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * (self.scale / 100)


def logit_scale(model: Any) -> None:
    """Replace the ReLU between two layers."""
    model[1][1] = LogitScale()


def large_last_norm(model: Any) -> None:
    """Give the last norm the weights of a low temperature."""
    model.gpt2.transformer.ln_f.weight.fill_(300)


HOLDOUT = [
    HeldOut(
        1,
        "x³ in a hand-written GELU, inputs beyond 256: 0 times inf",
        Expected(OVERFLOW, BACKWARD, "gpt2.transformer.h.2.mlp.act", "fp16"),
        overrides=(*TINY["gpt2"], "precision=fp16_master"),
        change=large_gelu,
    ),
    HeldOut(
        2,
        "gate times up in one SwiGLU",
        Expected(OVERFLOW, FORWARD, "llama.model.layers.2.mlp", "fp16"),
        overrides=(*TINY["llama"], "precision=fp16"),
        change=large_gate,
    ),
    HeldOut(
        3,
        "softplus as log(1 + exp(x))",
        Expected(ERROR, FORWARD, "encoder.block.1.layer.1.DenseReluDense.act", "bf16"),
        overrides=(*TINY["t5"], "precision=bf16"),
        change=naive_softplus,
    ),
    HeldOut(
        4,
        "the length of a zero embedding, clamped after the square root",
        Expected(DOMAIN, BACKWARD, "encoder.embed_tokens", "fp32"),
        overrides=(*TINY["t5"], "precision=fp32"),
        change=unit_embedding,
    ),
    HeldOut(
        5,
        "label smoothing by log(softmax) at temperature 0.02",
        Expected(UNDERFLOW, FORWARD, "", "fp16"),
        overrides=(*TINY["bert"], "precision=fp16_master"),
        own_loss=smoothed_loss,
    ),
    HeldOut(
        6,
        "the derivative of a saturated tanh",
        Expected(ERROR, BACKWARD, "bert.encoder.layer.1.intermediate.intermediate_act_fn", "bf16"),
        overrides=(*TINY["bert"], "precision=bf16"),
        change=saturated_tanh,
    ),
    HeldOut(
        7,
        "an fp32 module whose parent uses its weights directly",
        Expected(DTYPE, FORWARD, "fc.linear", "bf16"),
        overrides=(*TINY["resnet"], "precision=bf16", "precision.fp32_modules=[fc.linear]"),
        change=handmade_head,
    ),
    HeldOut(
        8,
        "a loss computed and summed in bf16",
        Expected(DTYPE, FORWARD, "", "bf16_master"),
        overrides=(*TINY["resnet"], "precision=bf16_master"),
        own_loss=loss_in_16_bits,
    ),
    HeldOut(
        9,
        "a learned temperature of 100 in bf16, lr 4e-3",
        Expected(LOST, UPDATE, "1.1", "bf16_pure"),
        overrides=(*TINY["bignet"], "precision=bf16_pure", "optimizer.lr=4e-3", "schedule.warmup_steps=0"),
        change=logit_scale,
    ),
    HeldOut(
        10,
        "a static scale of 65536 and a last norm of 300: the output layer's weight gradient",
        Expected(OVERFLOW, BACKWARD, "gpt2.lm_head", "fp16+scaler"),
        overrides=(*TINY["gpt2"], "precision=fp16", "scaler=static", "scaler.scale=65536"),
        change=large_last_norm,
    ),
]


def small_resnet(num_classes: int, **_: Any) -> ResNet:
    """One block at each resolution instead of two."""
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes)


small_resnet.__module__ = resnet.__name__  # recipe.arch takes what torchvision.models has


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torchvision.models._api.BUILTIN_MODELS, "resnet18", small_resnet)
        patch.setitem(gpt2.SHAPES, "nano", gpt2.Shape(3, 2, 32, 64))
        patch.setitem(bert.SHAPES, "nano", bert.Shape(2, 64, 2, 64))
        patch.setitem(t5.SHAPES, "nano", t5.Shape(2, 32, 2, 16, 64, 64))
        yield


@pytest.mark.parametrize("fault", HOLDOUT, ids=lambda fault: str(fault.number))
def test_a_hold_out_fault_is_named(fault: HeldOut) -> None:
    diagnosis = fault.examined()
    assert not fault.wrong(diagnosis)
    assert diagnosis.verdict == FOUND
