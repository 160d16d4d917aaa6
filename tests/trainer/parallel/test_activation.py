from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.gpt2 import SHAPES, Shape
from recipes.resnet import ResNet
from recipes.vision.architectures import build
from tests.helpers import Operators, fit, same_bits, trainer_of
from trainer.errors import UserError
from trainer.parallel.activation import ActivationCheckpointing, _policy
from trainer.recipe import Recipe

GPT2 = (
    *("recipe=gpt2", "recipe.size=tiny", "data=synthetic", "data.vocab_size=90", "batch_size=4", "micro_batch_size=2"),
    *("steps=2", "schedule.warmup_steps=0"),
)
DROPOUT = "recipe.dropout=0.1"


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", Shape(3, 2, 32, 16))


def images(arch: str) -> tuple[str, ...]:
    sizes = ("recipe.image_size=16", "batch_size=8", "micro_batch_size=4", "steps=2")
    return ("recipe=resnet", f"recipe.arch={arch}", "data=synthetic", "data.classes=10", "optimizer.lr=0.01", *sizes)


def train(mode: str, *options: str) -> Any:
    """Two optimizer steps of two microbatches; returns everything they leave behind."""
    trainer = trainer_of(*options, f"activation_checkpointing={mode}")
    records = fit(trainer)
    assert not any(record.skipped for record in records)
    return [record.loss for record in records], trainer.state_dict()


def check(*options: str) -> Any:
    """Train without recomputing and with it, compare every bit, and return what was left behind."""
    plain = train("none", *options)
    for mode in ("blocks", "selective"):
        assert same_bits(train(mode, *options), plain), mode
    return plain


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gpt2_with_dropout_trains_as_without_recomputing_bit_for_bit(precision: str) -> None:
    losses, _ = check(*GPT2, DROPOUT, f"precision={precision}", "scaler.init=1")
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("arch", "precision"),
    [
        ("shufflenet_v2_x0_5", "fp16"),
        # Dropout, stochastic depth, and a squeeze that writes SiLU's result over that of a convolution, which
        # selective keeps.
        ("efficientnet_b0", "fp32"),
    ],
)
def test_a_net_with_batch_norm_trains_as_without_recomputing_bit_for_bit(arch: str, precision: str) -> None:
    _, state = check(
        *images(arch), f"precision={precision}", "scaler.init=0.0625"
    )  # gradients of batch norm on 1 × 1 pixels are large
    assert {int(count) for name, count in state["model"].items() if "num_batches" in name} == {4}


@pytest.mark.parametrize("pattern", ["c_fc", "h.1"])  # in a block; all of one
def test_fp32_islands_in_a_block_or_around_it_stay_in_fp32(pattern: str) -> None:
    bf16 = (*GPT2, DROPOUT, "precision=bf16")
    assert not same_bits(check(*bf16, f"precision.modules={{{pattern}:fp32}}"), train("none", *bf16))


def operators(mode: str, *options: str) -> Counter[str]:
    """Those of one step's forward and backward passes."""
    trainer = trainer_of(*options, f"activation_checkpointing={mode}")
    microbatches = next(trainer.batches())
    with Operators() as calls:
        trainer.gradients(microbatches)
    return calls.count


def test_selective_repeats_what_is_cheap_and_blocks_repeat_everything() -> None:
    line = (*GPT2, "batch_size=2")
    none, blocks, selective = (operators(mode, *line) for mode in ("none", "blocks", "selective"))
    expensive = ("addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu")
    assert all(selective[name] == none[name] for name in expensive)
    assert selective["native_layer_norm"] == none["native_layer_norm"] + 6
    assert selective["gelu"] == none["gelu"] + 3
    assert blocks["addmm"] >= none["addmm"] + 9  # torch stops before the last product, which nothing needs
    assert blocks["_scaled_dot_product_flash_attention_for_cpu"] == 6


def test_evaluation_recomputes_nothing() -> None:
    counts = []
    for mode in ("none", "blocks", "selective"):
        trainer = trainer_of(*images("shufflenet_v2_x0_5"), f"activation_checkpointing={mode}")
        (batch, _) = next(trainer.batches())
        with Operators() as calls:
            trainer.recipe.loss(trainer.model.eval(), batch).loss_sum.backward()
        counts.append(calls.count)
    assert counts[0] == counts[1] == counts[2]


def test_attention_that_draws_dropout_is_recomputed_so_that_later_draws_are_the_same() -> None:
    query = torch.empty(1, 1, 2, 4)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def keeps(*call: Any, **options: Any) -> bool:
        return "SAVE" in _policy(True, None, *call, **options).name

    assert keeps(flash, query, query, query)
    assert keeps(flash, query, query, query, 0.0, True, scale=0.5)
    assert not keeps(flash, query, query, query, 0.1)
    assert keeps(efficient, query, query, query, None, True)
    assert not keeps(efficient, query, query, query, None, True, 0.1)
    assert not keeps(efficient, query, query, query, None, compute_log_sumexp=True, dropout_p=0.1)
    assert keeps(torch.ops.aten.mm.default, query, query)
    assert not keeps(torch.ops.aten.native_dropout.default, query, 0.1, True)


class Normalised(nn.Module):
    """A block with batch norm that torch.compile takes in one piece, or in two."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.broken = nn.Linear(8, 8), nn.BatchNorm1d(8), broken

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x)
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.norm(inner).relu()


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize(("broken", "whole"), [(False, True), (True, False)])
def test_compiled_blocks_update_batch_norm_once(broken: bool, whole: bool) -> None:
    def trained(mode: str, compiled: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Normalised(broken), Normalised(broken))
        ActivationCheckpointing(mode).apply(list(model))
        for module in ([model] if whole else model) if compiled else ():
            module.compile(backend="aot_eager")
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
        return model.state_dict(), [parameter.grad for parameter in model.parameters()]

    plain = trained("none", compiled=False)
    assert plain[0]["0.norm.num_batches_tracked"] == 3
    for mode in ("blocks", "selective"):
        torch.testing.assert_close(trained(mode, compiled=True), plain)


# One line for each file of torchvision.models: a classifier and the number of its blocks.
FAMILIES = {
    "resnet18": 8, "regnet_y_400mf": 16, "densenet121": 4, "vit_b_32": 12, "swin_t": 12, "maxvit_t": 11,
    "convnext_tiny": 18, "efficientnet_v2_s": 40, "mobilenet_v2": 17, "mobilenet_v3_small": 11, "mnasnet0_5": 16,
    "shufflenet_v2_x0_5": 16, "squeezenet1_1": 8, "googlenet": 9, "inception_v3": 11, "alexnet": 0, "vgg11": 0,
}  # fmt: skip


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_blocks_of_torchvisions_families(arch: str) -> None:
    with torch.device("cpu" if arch.startswith("regnet") else "meta"):
        model = build(arch, 224, 10)
    blocks = ResNet(arch=arch).blocks(model)
    assert len(blocks) == FAMILIES[arch]
    inside = [module for block in blocks for module in block.modules()]
    assert len({id(module) for module in inside}) == len(inside)  # none inside another


def test_what_has_no_blocks_is_refused() -> None:
    assert Recipe().blocks(nn.Linear(1, 1)) == []
    ActivationCheckpointing("none").apply([])
    with pytest.raises(UserError, match="set activation_checkpointing=none"):
        ActivationCheckpointing("selective").apply([])
