from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from recipes.bert import MaskedWindows
from tests.helpers import fit, trainer_of
from trainer.data.contract import SampleId

TINY = ["recipe=bert", "recipe.context=24", "data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16"]


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


def test_samples_depend_on_their_seed_alone_and_evaluation_covers_the_text() -> None:
    data = MaskedWindows(np.arange(1000, dtype=np.uint16), 64, 1000, 1000, 1001, 1002)
    some, again = data.batch([SampleId(3, 5), SampleId(4, 5)]), data.batch([SampleId(4, 5)])
    assert all(torch.equal(some[key][1:], again[key]) for key in some)
    assert not torch.equal(data.batch([SampleId(4, 6)])["tokens"], again["tokens"])
    evaluated = data.batch([SampleId(index, None) for index in range(len(data))])
    seen = set(evaluated["tokens"].flatten().tolist()) | set(evaluated["labels"].flatten().tolist())
    assert set(range(len(data) * data.room)) <= seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_is_summed_over_masked_tokens_and_equals_that_of_transformers(attention: str) -> None:
    trainer = trainer_of(*TINY, f"recipe.attention={attention}")
    model = trainer.model.eval()
    assert model.config._attn_implementation == attention
    batch = next(trainer.batches())[0]
    labels = torch.full_like(batch["tokens"], -100).scatter_(1, batch["places"], batch["labels"])
    output = trainer.recipe.loss(model, batch)
    expected = model(input_ids=batch["tokens"], labels=labels)
    targets = trainer.recipe.count_targets(batch)
    assert targets == (labels >= 0).sum() == 8 * 3
    assert output.loss_sum.dtype == torch.float32
    assert output.loss_sum.item() / targets == pytest.approx(expected.loss.item(), rel=1e-5)
    right = (expected.logits.argmax(-1) == labels).sum()
    assert output.metric_sums["accuracy"] == right


@pytest.mark.parametrize("mode", ["bf16_master", "bf16_pure"])
def test_a_whole_encoder_can_stay_in_fp32_beside_16_bit_weights(mode: str) -> None:
    """Transformers' outputs are dicts, dataclasses and can be indexed: what an island returns has to be all that."""
    trainer = trainer_of(*TINY, "steps=2", f"precision={mode}", "precision.fp32_modules=[bert.encoder]")
    outputs: list[Any] = []
    trainer.model.bert.encoder.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    records = fit(trainer)
    assert all(torch.isfinite(record.grad_norm) for record in records)
    assert type(outputs[0]).__name__.startswith("BaseModelOutput")
    assert outputs[0][0] is outputs[0].last_hidden_state is outputs[0]["last_hidden_state"]
    assert outputs[0].last_hidden_state.dtype == torch.bfloat16
    assert trainer.model.bert.encoder.layer[0].output.dense.weight.dtype == torch.float32
