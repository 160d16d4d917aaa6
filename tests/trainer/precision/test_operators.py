"""Operators in a dtype of the user's choice: everywhere a forward pass is taken, bit for bit as cast by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.formats import FORMATS
from tests.helpers import Arrays, NoData, SmallConvNet, same_bits, start
from trainer.config.schema import Config
from trainer.data.contract import Batch, Datasets
from trainer.data.loader import Loader
from trainer.hardware import Hardware
from trainer.optim.optimizer import Optimizer
from trainer.parallel.activation import ActivationCheckpointing
from trainer.parallel.compile import Compile
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.recipe import DataSource, LossOutput, Recipe, Sizes
from trainer.trainer import Trainer

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
LISTS: dict[str, Any] = {"fp32_ops": ["softmax"]}


class Block(nn.Module):
    """Attention on its own keys, with dropout; ``by_hand`` casts as the policy of ``LISTS`` does."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.softmax = nn.Softmax(-1)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        weights = self.linear.weight.dtype
        keys = self.linear(self.norm(x.float() if weights == FP32 else x))
        if self.by_hand:
            with torch.autocast("cpu", enabled=False):
                attention = self.softmax((keys @ keys.transpose(-1, -2)).float())
            attention = attention if weights == FP32 else attention.to(weights)
        else:
            attention = self.softmax(keys @ keys.transpose(-1, -2))
        return x + F.dropout(attention, 0.1, self.training) @ keys


@dataclass
class Attention(Recipe):
    by_hand: bool = False

    def sizes(self, hardware: Hardware) -> Sizes:
        return Sizes(8, 8, 8)

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        generator = torch.Generator().manual_seed(1)
        x, label = torch.randn(32, 4, 16, generator=generator), torch.randint(5, (32,), generator=generator)
        arrays = Arrays(x=x, label=label)
        return Datasets(arrays, arrays, "noise")

    def build_model(self, datasets: Datasets) -> nn.Module:
        return nn.Sequential(Block(self.by_hand), Block(self.by_hand), nn.Flatten(), nn.Linear(64, 5))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model[0], model[1]]

    def count_targets(self, batch: Batch) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        logits = model(batch["x"]).float()
        return LossOutput(F.cross_entropy(logits, batch["label"], reduction="sum"), {})


def trainer_of(precision: Precision, recipe: Recipe | None = None, **changes: Any) -> Trainer:
    options: dict[str, Any] = {"batch_size": 8, "micro_batch_size": 4, "steps": 3, "loader": Loader(workers=0)}
    options |= {"precision": precision, "optimizer": Optimizer("AdamW", lr=0.1), "scaler": AutoScaler(init=256.0)}
    return start(Config(recipe or Attention(), NoData(), device="cpu", **options | changes))


def gradients(trainer: Trainer) -> list[Any]:
    """The loss and the gradients of one step of two microbatches, with the same dropout in every call."""
    torch.manual_seed(0)
    loss = trainer.gradients(next(trainer.batches())).loss
    return [loss, [parameter.grad for parameter in (trainer.masters or trainer.model).parameters()]]


def step(trainer: Trainer) -> list[Any]:
    """The loss and the gradients of one step, and the score."""
    return [gradients(trainer), trainer.evaluate()]


def dtypes(model: nn.Module) -> dict[str, list[torch.dtype]]:
    """What the inner modules return from now on."""
    seen: dict[str, list[torch.dtype]] = {"0.softmax": [], "1.softmax": []}
    for name, found in seen.items():
        model.get_submodule(name).register_forward_hook(lambda _, given, output, kept=found: kept.append(output.dtype))
    return seen


@pytest.mark.parametrize("mode", ["bf16", "bf16_master", "fp16_pure"])
def test_training_and_evaluation_are_bit_for_bit_those_with_casts_by_hand(mode: str) -> None:
    listed = trainer_of(Precision(mode, **LISTS))
    seen = dtypes(listed.model)
    result = step(listed)
    assert same_bits(result, step(trainer_of(Precision(mode), Attention(by_hand=True))))
    assert not same_bits(result, step(trainer_of(Precision(mode))))
    assert all(set(found) == {FORMATS[mode].weights} for found in seen.values())


@pytest.mark.parametrize(("mode", "precision"), [("blocks", "bf16"), ("selective", "fp16_master")])
def test_what_is_recomputed_has_the_same_policy(mode: str, precision: str) -> None:
    plain = step(trainer_of(Precision(precision, **LISTS)))
    again = trainer_of(Precision(precision, **LISTS), activation_checkpointing=ActivationCheckpointing(mode))
    seen = dtypes(again.model)
    assert same_bits(step(again), plain)
    assert {len(found) for found in seen.values()} == {2 * 2 + 8}  # two microbatches twice, and the evaluation


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        (Attention(), Precision("bf16", fp32_ops=["linear", "softmax"])),
        (SmallConvNet(), Precision("bf16", modules={"7": "fp32"})),
    ],
)
def test_compiled_it_is_the_same_and_is_compiled_once(recipe: Recipe, precision: Precision) -> None:
    """Backward, too, where torch would compile the products of gradients under autocast."""
    compiled, plain = trainer_of(precision, recipe, compile=Compile("default")), trainer_of(precision, recipe)
    torch._dynamo.reset()
    compiled.model.compile(backend="aot_eager")
    assert same_bits(gradients(compiled), gradients(plain))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize(
    ("name", "call", "as_fp32"),
    [
        ("softmax", lambda x: F.softmax(x, -1), None),
        ("softmax", lambda x: torch.softmax(x, -1), None),
        ("softmax", lambda x: x.softmax(-1), None),
        ("softmax", lambda x: torch.special.softmax(x, -1), None),
        ("softmax", lambda x: F.softmax(x, -1, dtype=BF16), lambda x: x.softmax(-1)),
        ("softmax", lambda x: torch.softmax(x, -1, BF16), lambda x: x.softmax(-1)),
        ("matmul", lambda x: x @ x, None),
        ("sub", lambda x: 0.3 - x, None),
        ("pow", lambda x: x**3, None),
        ("abs", abs, None),
        ("norm", torch.linalg.norm, None),
        ("cat", lambda x: torch.cat([x, x]), None),
        ("einsum", lambda x: torch.einsum("ij,jk->ik", x, x), None),
        ("max", lambda x: torch.max(x, -1)[0], None),
        ("scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), None),
    ],
)
def test_one_name_is_the_function_the_method_and_the_operator_of_python(
    name: str, call: Callable[[Tensor], Any], as_fp32: Callable[[Tensor], Any] | None
) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(BF16)
    for mode in ("bf16", "bf16_pure"):
        with Precision(mode).autocast(CPU):
            assert call(x).dtype == BF16
        with Precision(mode, fp32_ops=[name]).autocast(CPU):
            result = call(x)
        expected = (as_fp32 or call)(x.float())
        if mode == "bf16_pure" and expected.ndim:  # a scalar stays fp32, such as a loss
            expected = expected.to(BF16)
        assert same_bits(result, expected)


def test_fp32_ops_round_nothing_that_had_more_than_16_bits() -> None:
    x, out = torch.randn(4, 4), torch.empty(4, 4, dtype=BF16)
    with Precision("bf16_pure", fp32_ops=["softmax", "mul", "add"]).autocast(CPU):
        assert x.softmax(-1).dtype == x.to(BF16).mul(x).dtype == FP32
        assert F.softmax(x.to(BF16), -1, dtype=FP32).dtype == FP32
        assert x.double().softmax(-1).dtype == torch.float64
        assert torch.add(x.to(BF16), 1, out=out) is out
