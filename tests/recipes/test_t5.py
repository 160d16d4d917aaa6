from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from recipes.t5 import IGNORED, SpanCorruption
from tests.helpers import CPU, compose, trainer_of
from trainer.data.contract import SampleId

TINY = ["recipe=t5", "recipe.context=24", "data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16"]


def test_a_sample_has_the_published_length_and_the_vocabulary_is_padded() -> None:
    config = compose("recipe=t5", "recipe.size=small", "data=synthetic", "data.vocab_size=32000").plan(CPU).config
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


def test_samples_depend_on_their_seed_alone_and_evaluation_covers_the_text() -> None:
    data = SpanCorruption(np.arange(1000, dtype=np.uint16), 64, 1001, range(1002, 1100))
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
