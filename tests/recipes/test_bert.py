from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipes.bert import IGNORED, Quotations
from tests.helpers import fit, trainer_of
from trainer.data.contract import SampleId

TINY = ["recipe=bert", "recipe.context=24", "data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16"]


@pytest.mark.parametrize("context", [16, 40, 384])
def test_the_answer_is_what_the_question_quotes(context: int) -> None:
    text = np.random.default_rng(0).integers(0, 90, 2000).astype(np.uint16)
    data = Quotations(text, context, 90, 91, 92)
    samples = [SampleId(index % len(data), index * 7919) for index in range(200)]
    batch = data.batch(samples)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert batch["tokens"].shape == batch["segments"].shape == (200, context)
    cut = 0
    for row in range(200):
        tokens, segments = batch["tokens"][row].tolist(), batch["segments"][row].tolist()
        start, end = int(batch["start"][row]), int(batch["end"][row])
        assert tokens[0] == 90
        separator, last = (place for place, token in enumerate(tokens) if token == 91)
        assert segments == [int(separator < place <= last) for place in range(context)]
        assert tokens[last + 1 :] == [92] * (context - last - 1)
        question, passage = tokens[1:separator], tokens[separator + 1 : last]
        assert data.room // 2 <= len(passage) <= data.room
        inside = passage[start - separator - 1 :][: len(question)]
        assert inside
        assert question[: len(inside)] == inside
        if end == IGNORED:
            cut += 1
            assert len(inside) < len(question)
        else:
            assert end - start + 1 == len(question)
    assert 0 < cut < 100


def test_every_part_of_the_text_is_asked_about_and_samples_depend_on_their_seed_alone() -> None:
    text = np.arange(1000, dtype=np.uint16)
    data = Quotations(text, 64, 1000, 1001, 1002)
    evaluated = data.batch([SampleId(index, None) for index in range(len(data))])
    assert len(set(evaluated["tokens"].flatten().tolist())) > 800
    some = data.batch([SampleId(3, 5), SampleId(4, 5)])
    again = data.batch([SampleId(4, 5)])
    assert all(torch.equal(some[key][1:], again[key]) for key in some)
    assert not torch.equal(data.batch([SampleId(4, 6)])["tokens"], again["tokens"])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_is_summed_over_starts_and_ends_and_padding_does_not_matter(attention: str) -> None:
    trainer = trainer_of(*TINY, f"recipe.attention={attention}")
    model = trainer.model.eval()
    assert model.config._attn_implementation == attention
    batch = next(trainer.batches())[0]
    batch["end"][0] = IGNORED
    output = trainer.recipe.loss(model, batch)
    expected = right = 0.0
    for row in range(len(batch["start"])):  # one by one, without the padding
        tokens, segments = (batch[key][row, batch["tokens"][row] != 92][None] for key in ("tokens", "segments"))
        logits = model(input_ids=tokens, token_type_ids=segments)
        padded = model(
            input_ids=batch["tokens"][[row]],
            token_type_ids=batch["segments"][[row]],
            attention_mask=(batch["tokens"][[row]] != 92).long(),
        )
        torch.testing.assert_close(padded.start_logits[:, : tokens.shape[1]], logits.start_logits)
        for name in ("start", "end"):
            if (place := batch[name][row]) != IGNORED:
                scores = padded[f"{name}_logits"][0].double()
                expected += F.cross_entropy(scores, place).item()
                right += float(scores.argmax() == place)
    assert output.loss_sum.dtype == torch.float32
    assert output.loss_sum.item() == pytest.approx(expected, rel=1e-5)
    assert output.metric_sums["accuracy"].item() == right
    assert trainer.recipe.count_targets(batch) == 8 + int((batch["end"] != IGNORED).sum())
    assert trainer.recipe.count_units(batch) == 8


@pytest.mark.parametrize("mode", ["bf16_master", "bf16_pure"])
def test_a_whole_encoder_can_stay_in_fp32_beside_16_bit_weights(mode: str) -> None:
    """Transformers' outputs are dicts, dataclasses and can be indexed: what an island returns has to be all that."""
    trainer = trainer_of(*TINY, "steps=2", f"precision={mode}", "precision.fp32_modules=[bert]")
    outputs: list[Any] = []
    trainer.model.bert.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    records = fit(trainer)
    assert all(torch.isfinite(record.grad_norm) for record in records)
    assert type(outputs[0]).__name__ == "BaseModelOutputWithPoolingAndCrossAttentions"
    assert outputs[0][0] is outputs[0].last_hidden_state is outputs[0]["last_hidden_state"]
    assert outputs[0].last_hidden_state.dtype == trainer.model.qa_outputs.weight.dtype == torch.bfloat16
    assert trainer.model.bert.embeddings.word_embeddings.weight.dtype == torch.float32
    assert set(map(id, trainer.model.bert.parameters())) < set(
        map(id, (p for group in trainer.optimizer.param_groups for p in group["params"]))
    )
