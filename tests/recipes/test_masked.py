"""Samples of bert and t5, whose tokens are masked, and their losses."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from recipes.bert import MaskedWindows
from recipes.t5 import SpanCorruption
from tests.helpers import CPU, compose, trainer_of
from tests.recipes.test_transformers import TINY
from trainer.config.settle import plan_of
from trainer.data.contract import SampleId


def test_a_sample_has_the_published_length_and_the_vocabulary_is_padded() -> None:
    config = plan_of(compose("recipe=t5", "recipe.size=small", "data=synthetic", "data.vocab_size=32000"), CPU).config
    datasets = config.open_datasets()
    data: Any = datasets.train
    assert (data.window, data.noise, data.spans) == (568, 85, 28)
    batch = data.batch([SampleId(0, 1)])
    assert (batch["inputs"].shape, batch["labels"].shape) == ((1, 512), (1, 114))
    with torch.device("meta"):
        assert config.recipe.build_model(datasets).config.vocab_size == 32128


@pytest.mark.parametrize("context", [16, 23, 64, 500])
def test_the_removed_spans_are_the_target(context: int) -> None:
    text = np.random.default_rng(0).integers(0, 90, 2400).astype(np.uint16)
    data = SpanCorruption(text, context, 91, range(92, 200))
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


@pytest.mark.parametrize("kind", ["spans", "masked"])
def test_samples_depend_on_their_seed_alone_and_evaluation_covers_the_text(kind: str) -> None:
    text = np.arange(1000, dtype=np.uint16)
    data: Any = SpanCorruption(text, 64, 1001, range(1002, 1100))
    if kind == "masked":
        data = MaskedWindows(text, 64, 1000, 1000, 1001, 1002)
    some, again = data.batch([SampleId(3, 5), SampleId(4, 5)]), data.batch([SampleId(4, 5)])
    assert all(torch.equal(some[key][1:], again[key]) for key in some)
    other = data.batch([SampleId(4, 6)])
    assert not any(torch.equal(other[key], again[key]) for key in other)
    evaluated = data.batch([SampleId(index, None) for index in range(len(data))])
    seen = {token for tensor in evaluated.values() for token in tensor.flatten().tolist()}
    assert set(range(len(data) * data.window)) <= seen


def test_a_share_of_a_text_is_masked_as_published() -> None:
    text = np.random.default_rng(0).integers(0, 90, 20_000).astype(np.uint16)
    data = MaskedWindows(text, 102, 90, 90, 91, 92)
    batch = data.batch([SampleId(index % len(data), index * 7919) for index in range(400)])
    tokens, places, labels = (batch[name].numpy() for name in ("tokens", "places", "labels"))
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert (tokens.shape, places.shape, labels.shape) == ((400, 102), (400, 15), (400, 15))
    assert (tokens[:, 0] == 90).all()
    assert (tokens[:, -1] == 91).all()
    assert (np.diff(places) > 0).all()
    restored = tokens.copy()
    np.put_along_axis(restored, places, labels, 1)
    windows = {tuple(text[first : first + 100].tolist()) for first in range(len(text) - 99)}
    assert all(tuple(row[1:-1].tolist()) in windows for row in restored)
    seen = np.take_along_axis(tokens, places, 1)
    assert np.mean(seen == 92) == pytest.approx(0.8, abs=0.02)
    assert np.mean(seen == labels) == pytest.approx(0.1 + 0.1 / 90, abs=0.02)


def test_berts_accuracy_is_the_share_of_masked_tokens_that_are_right() -> None:
    trainer = trainer_of(*TINY["bert"])
    batch = next(trainer.batches())[0]
    output = trainer.recipe.loss(trainer.model.eval(), batch)
    best = trainer.model(input_ids=batch["tokens"]).logits.argmax(-1).gather(1, batch["places"])
    assert output.metric_sums["accuracy"] == (best == batch["labels"]).sum()
    assert trainer.recipe.count_targets(batch) == 8 * 3


def test_t5s_padding_of_the_vocabulary_is_not_in_the_loss() -> None:
    trainer = trainer_of(*TINY["t5"])
    model = trainer.model.eval()
    batch = next(trainer.batches())[0]
    without_padding = copy.deepcopy(model)
    without_padding.resize_token_embeddings(model.vocabulary)
    mean = without_padding(input_ids=batch["inputs"], labels=batch["labels"]).loss
    loss = trainer.recipe.loss(model, batch).loss_sum
    assert loss.item() / trainer.recipe.count_targets(batch) == pytest.approx(mean.item(), rel=1e-5)
