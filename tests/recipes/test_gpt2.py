from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.gpt2 import GPT2
from recipes.language import LossHead
from tests import helpers
from tests.helpers import needs_chunks, trainer_of


def head(chunked: bool, tokens: int = 300, width: int = 32, vocabulary: int = 192) -> tuple[LossHead, Any, Any]:
    torch.manual_seed(0)
    embedding = nn.Parameter(torch.randn(vocabulary, width) * 0.2)
    hidden = torch.randn(3, tokens // 3, width, requires_grad=True)
    return LossHead(embedding, chunked), hidden, torch.randint(vocabulary, (3, tokens // 3))


def loss_and_gradients(chunked: bool, mode: str) -> list[torch.Tensor]:
    layer, hidden, targets = head(chunked)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = layer(hidden, targets)
    assert loss.dtype == torch.float32
    (loss / targets.numel()).backward()
    return [loss.detach(), layer.weight.grad, hidden.grad]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@needs_chunks
@pytest.mark.parametrize(
    ("mode", "of_loss", "of_gradient"), [("fp32", 1e-5, 1e-5), ("bf16", 1e-2, 2e-2), ("fp16", 2e-3, 4e-3)]
)
def test_chunked_loss_equals_the_plain_one(mode: str, of_loss: float, of_gradient: float) -> None:
    plain, chunked = loss_and_gradients(False, mode), loss_and_gradients(True, mode)
    assert distance(chunked[0], plain[0]) < of_loss
    assert distance(chunked[1], plain[1]) < of_gradient
    assert distance(chunked[2], plain[2]) < of_gradient


@pytest.mark.parametrize("chunked", [False, pytest.param(True, marks=needs_chunks)])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_what_is_no_target_has_no_loss_and_no_gradient(mode: str, chunked: bool) -> None:
    layer, hidden, targets = head(chunked, vocabulary=128)
    layer.vocabulary = 90
    targets = (targets % 90).where(torch.arange(100) % 3 == 0, -100)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
        loss = layer(hidden, targets)
        few = layer(hidden.detach()[:, ::3], targets[:, ::3])
        none = layer(hidden.detach(), torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == pytest.approx(few.item(), rel=1e-5 if mode == "fp32" else 1e-2)
    assert none.item() == 0
    assert not hidden.grad[:, 1::3].any()


@pytest.mark.parametrize("chunked", [False, pytest.param(True, marks=needs_chunks)])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_sum_over_many_tokens_does_not_overflow(mode: str, chunked: bool) -> None:
    """40,000 tokens of loss 5 are 200,000, three times fp16's largest number; bf16 would keep 8 bits of it."""
    layer, hidden, targets = head(chunked, tokens=39_999, width=4)
    with torch.autocast("cpu", dtype=torch.bfloat16 if mode == "bf16" else torch.float16):
        loss = layer(hidden, targets)
    with torch.no_grad():
        exact = F.cross_entropy((hidden @ layer.weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.item() > 2e5
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)


@pytest.mark.parametrize("chunked", [False, pytest.param(True, marks=needs_chunks)])
@pytest.mark.parametrize(("mode", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2), ("fp16", 2e-3)])
def test_padding_of_the_vocabulary_changes_neither_the_loss_nor_a_gradient(
    mode: str, tolerance: float, chunked: bool
) -> None:
    """All logits lie near -36, as those of the published GPT-2 do; those of the padding near 0."""
    plain, hidden, targets = head(chunked, vocabulary=90)
    with torch.no_grad():
        hidden[..., 0], plain.weight[:, 0] = 6, -6
    padded = LossHead(nn.Parameter(torch.cat([plain.weight.detach(), torch.randn(38, 32) * 0.02])), chunked, 90)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    results = []
    for layer in (plain, padded):
        own = hidden.detach().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = layer(own, targets)
        (loss / targets.numel()).backward()
        results.append((loss.detach(), own.grad, layer.weight.grad[:90]))
    for one, other in zip(*results, strict=True):
        assert distance(other, one) <= tolerance
    assert not padded.weight.grad[90:].any()


def test_the_padding_is_left_out_in_one_compiled_graph() -> None:
    layer, hidden, targets = head(False, vocabulary=128)
    layer.vocabulary = 90
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(layer(hidden, targets % 90), compiled(hidden, targets % 90))


def test_perplexity_is_the_exponential_and_overflows_to_infinity_rather_than_failing() -> None:
    assert GPT2().report(1.5, {}, 1) == {"loss": 1.5, "perplexity": pytest.approx(4.4816891)}
    assert GPT2().report(1e4, {}, 1)["perplexity"] == math.inf


@pytest.mark.parametrize(("kind", "approximate"), [("tanh", "tanh"), ("erf", "none")])
def test_gelu_is_the_function_that_the_option_names(kind: str, approximate: str) -> None:
    gpt2 = trainer_of(*helpers.GPT2, f"recipe.gelu={kind}").model.gpt2
    x = torch.linspace(-5, 5, 101)
    assert all(torch.equal(block.mlp.act(x), F.gelu(x, approximate=approximate)) for block in gpt2.transformer.h)


def test_a_pretrained_gelu_takes_one_kernel_and_stays_the_same_function(tmp_path: Path) -> None:
    for name, opened in (("gelu_new", "gelu_pytorch_tanh"), ("relu", "relu")):
        shape = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
        before = GPT2LMHeadModel(GPT2Config(vocab_size=64, activation_function=name, **shape))
        before.save_pretrained(tmp_path)
        datasets: Any = SimpleNamespace(vocabulary=64, tokens=SimpleNamespace(packing=False, samples={}))
        after = GPT2(pretrained=str(tmp_path)).new_model(datasets).network
        assert after.config.activation_function == opened
        tokens = torch.randint(64, (2, 16))
        with torch.no_grad():
            assert torch.allclose(before.eval()(tokens).logits, after.eval()(tokens).logits, atol=1e-5)
