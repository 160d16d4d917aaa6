"""Which dtypes the modules compute in, found in a forward pass that changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import mantissa
from mantissa.step.trace import LOSS, DtypeRecorder
from tests.helpers import trainer_of
from trainer.run.record import observed
from trainer.trainer import Trainer

GPT2 = (
    *("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "recipe.attention=sdpa", "data=synthetic"),
    *("data.vocab_size=64", "batch_size=4", "steps=3"),
)
TYPES = ("Conv1D", "LayerNorm", "Embedding")


def table(trainer: Trainer) -> dict[str, tuple[str, str, str, str]]:
    """Type, weights, compute and output of each module."""
    rows = observed(trainer)[0]["modules"]
    return {row["module"]: (row["type"], row["weights"], row["compute"], row["output"]) for row in rows}


@pytest.mark.parametrize(
    ("mode", "weights", "product", "norm"),
    [
        ("fp32", "float32", "float32", "float32"),
        ("bf16", "float32", "bfloat16", "float32"),
        ("bf16_master", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_gpt2(mode: str, weights: str, product: str, norm: str) -> None:
    found = table(trainer_of(*GPT2, f"precision={mode}"))
    seen = {(kind, held, compute, output) for kind, held, compute, output in found.values() if kind in TYPES}
    assert seen == {
        ("Conv1D", weights, product, product),
        ("LayerNorm", weights, norm, norm),
        ("Embedding", weights, norm, norm),
    }
    assert found["gpt2.transformer.h.0.attn"][1:3] == ("", product)
    assert found["gpt2.lm_head"][3] == "float32"  # the loss


@pytest.mark.parametrize(("mode", "result"), [("bf16", "float32"), ("bf16_pure", "bfloat16")])
def test_an_fp32_island(mode: str, result: str) -> None:
    found = table(trainer_of(*GPT2, f"precision={mode}", "precision.fp32_modules=[h.1.mlp]"))
    for name in ("c_fc", "c_proj"):
        assert found[f"gpt2.transformer.h.0.mlp.{name}"][2] == "bfloat16"
        assert found[f"gpt2.transformer.h.1.mlp.{name}"][:3] == ("Conv1D", "float32", "float32")
    inner = {name: output for name, (*_, output) in found.items() if name.startswith("gpt2.transformer.h.1.mlp.")}
    assert set(inner.values()) == {"float32"}
    assert found["gpt2.transformer.h.1"][3] == result


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(2, 2).bfloat16()
        self.unused = nn.Linear(2, 2)
        self.moves = nn.Flatten()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rounded = self.moves(x).to(torch.bfloat16).clone()
        return {"wide": (self.narrow(rounded) * 2).float() + x, "count": (x > 0).sum()}


def test_own_operators_are_those_that_compute_and_belong_to_no_child() -> None:
    model = Parts()
    recorder = DtypeRecorder(model)
    with recorder:
        model(torch.ones(1, 2))["wide"].sum()
    rows = {row.pop("module"): row for row in recorder.modules()}
    assert rows == {
        "": {"type": "Parts", "weights": "", "compute": "bfloat16, float32", "output": "float32"},
        "narrow": {"type": "Linear", "weights": "bfloat16", "compute": "bfloat16", "output": "bfloat16"},
        "unused": {"type": "Linear", "weights": "float32", "compute": "", "output": ""},
        LOSS: {"type": "", "weights": "", "compute": "float32", "output": ""},
    }
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("autocast", [True, False])
def test_islands_and_operators_need_no_more_than_what_a_cure_says(autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model = model if autocast else model.half()
    mantissa.keep_fp32(model, ["0"])
    copied, x = copy.deepcopy(model), torch.full((2, 8), 0.5)
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast), mantissa.fp32_ops(["exp"]):
        y = copied[0](x)
        assert y.dtype == y.exp().dtype == (torch.float32 if autocast else torch.float16)
        copied(x).sum().backward()
    assert all(each.grad is not None for each in copied.parameters())
    assert all(each.grad is None for each in model.parameters())
