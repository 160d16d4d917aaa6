from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.t5 import IGNORED, SpanCorruption
from tests.helpers import CPU, compose, fit, gradients, reopened, same_bits, trainer_of
from trainer.data.contract import SampleId
from trainer.errors import UserError
from trainer.hardware import Hardware

GPU = Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))
TINY = ["recipe=t5", "recipe.context=24", "data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16"]


@pytest.mark.parametrize(("size", "parameters"), [("small", 60_506_624), ("base", 222_903_552)])
def test_published_sizes_have_their_parameters(size: str, parameters: int) -> None:
    config = compose("recipe=t5", f"recipe.size={size}", "data=synthetic", "data.vocab_size=32000")
    config = config.resolve(CPU).config
    datasets = config.recipe.datasets(config.data, seed=0)
    data: Any = datasets.train
    assert (data.window, data.noise, data.spans) == (568, 85, 28)
    batch = data.batch([SampleId(0, 1)])
    assert (batch["inputs"].shape, batch["labels"].shape) == ((1, 512), (1, 114))
    with torch.device("meta"):
        model = config.recipe.build_model(datasets)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(config.recipe.blocks(model)) == (12 if size == "small" else 24)
    assert model.config.vocab_size == 32128


def test_auto_is_nano_on_a_cpu_and_small_on_a_gpu() -> None:
    for hardware, size, context in ((CPU, "nano", 64), (GPU, "small", 512)):
        config = compose("recipe=t5", "data=synthetic")
        _, choices = config.recipe.resolve(hardware, config.data)
        found = [(choice.key, choice.value) for choice in choices]
        assert found == [("recipe.size", size), ("recipe.context", context)]


@pytest.mark.parametrize("context", [16, 23, 64, 500])
def test_the_removed_spans_are_the_target(context: int) -> None:
    text = np.random.default_rng(0).integers(0, 90, 2400).astype(np.uint16)
    data = SpanCorruption(text, context, 90)
    windows = {tuple(text[first : first + data.window].tolist()) for first in range(2400 - data.window + 1)}
    batch = data.batch([SampleId(index % len(data), index * 7919) for index in range(30)])
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert context - 1 <= batch["inputs"].shape[1] <= context
    spans = set()
    for inputs, labels in zip(batch["inputs"].tolist(), batch["labels"].tolist(), strict=True):
        assert (inputs.pop(), labels.pop()) == (91, 91)  # EOS
        gaps: dict[int, list[int]] = {}
        for token in labels:
            if token >= 92:
                gaps[token] = []
            else:
                list(gaps.values())[-1].append(token)
        assert list(gaps) == [token for token in inputs if token >= 92] == list(range(92, 92 + data.spans))
        assert sum(map(len, gaps.values())) == data.noise
        assert all(gaps.values())
        spans |= {len(gap) for gap in gaps.values()}
        restored = [token for marked in inputs for token in (gaps[marked] if marked >= 92 else [marked])]
        assert tuple(restored) in windows
    assert len(spans) > 1 or data.spans == 1


def test_samples_depend_on_their_seed_alone_and_evaluation_covers_the_text() -> None:
    data = SpanCorruption(np.arange(1000, dtype=np.uint16), 64, 1000)
    some, again = data.batch([SampleId(3, 5), SampleId(4, 5)]), data.batch([SampleId(4, 5)])
    assert all(torch.equal(some[key][1:], again[key]) for key in some)
    assert not torch.equal(data.batch([SampleId(4, 6)])["inputs"], again["inputs"])
    evaluated = data.batch([SampleId(index, None) for index in range(len(data))])
    seen = set(evaluated["inputs"].flatten().tolist()) | set(evaluated["labels"].flatten().tolist())
    assert set(range(len(data) * data.window)) <= seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_is_summed_over_targets_that_are_not_ignored_and_equals_that_of_transformers(attention: str) -> None:
    trainer = trainer_of(*TINY, f"recipe.attention={attention}")
    model = trainer.model.eval()
    assert model.config._attn_implementation == attention
    batch = next(trainer.batches())[0]
    batch["labels"][0, 2] = IGNORED
    batch["labels"][1, 3:] = IGNORED
    targets = trainer.recipe.count_targets(batch)
    assert targets == int((batch["labels"] >= 0).sum()) < batch["labels"].numel()
    assert trainer.recipe.count_units(batch) == 8
    loss = trainer.recipe.loss(model, batch).loss_sum
    without_padding = copy.deepcopy(model)
    without_padding.resize_token_embeddings(model.vocabulary)
    mean = without_padding(input_ids=batch["inputs"], labels=batch["labels"]).loss
    assert loss.dtype == torch.float32
    assert loss.item() / targets == pytest.approx(mean.item(), rel=1e-5)


def test_microbatches_with_unequal_targets_give_the_same_gradient() -> None:
    trainer = trainer_of(*TINY, "recipe.dropout=0")
    model, recipe = trainer.model.double(), trainer.recipe
    batch = next(trainer.batches())[0]
    for row in range(8):
        batch["labels"][row, row + 1 :] = IGNORED
    found = []
    for size in (8, 2):
        model.zero_grad()
        parts = [{key: value[first : first + size] for key, value in batch.items()} for first in range(0, 8, size)]
        targets = sum(recipe.count_targets(part) for part in parts)
        for part in parts:
            (recipe.loss(model, part).loss_sum / targets).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_few_steps_learn_to_fill_in(mode: str) -> None:
    trainer = trainer_of(
        *TINY, f"precision={mode}", "steps=40", "batch_size=4", "micro_batch_size=2", "optimizer.lr=0.01"
    )
    before = trainer.evaluate()["loss"]
    records = fit(trainer)
    assert not any(record.skipped for record in records[5:])
    assert trainer.evaluate()["loss"] < before - 1.5


def test_activation_checkpointing_does_not_change_the_gradients() -> None:
    none, *others = (gradients(*TINY, f"activation_checkpointing={mode}") for mode in ("none", "blocks", "selective"))
    assert all(same_bits(none, other) for other in others)


def test_the_export_opens_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    trainer = trainer_of(*TINY)
    exported = reopened(trainer, tmp_path, AutoModelForSeq2SeqLM)
    tokens = torch.randint(90, (2, 16))
    with torch.no_grad():
        logits = trainer.model(input_ids=tokens, decoder_input_ids=tokens).logits
        reopened_logits = exported(input_ids=tokens, decoder_input_ids=tokens).logits
    assert torch.allclose(reopened_logits, logits[..., : trainer.datasets.vocabulary], atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.size=bass"], r"recipe.size=bass is unknown; did you mean 'base'"),
        (["recipe.attention=flash"], r"recipe.attention=flash is unknown; use recipe.attention=sdpa\|eager"),
        (["recipe.context=15"], r"recipe.context=15 must be at least 16"),
        (["recipe.dropout=-0.1"], r"recipe.dropout=-0.1 must be at least 0"),
        (["data=digits"], r"recipe=t5 cannot read data=digits; use data=python_docs"),
    ],
)
def test_values_that_cannot_work_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose("recipe=t5", "data=synthetic", *overrides).resolve(CPU)
