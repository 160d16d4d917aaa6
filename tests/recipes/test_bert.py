from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipes.bert import IGNORED, SHAPES, Quotations, Shape
from tests.helpers import CPU, compose, fit, gradients, reopened, same_bits, trainer_of
from trainer.data.contract import SampleId
from trainer.errors import UserError
from trainer.hardware import Hardware

GPU = Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))
TINY = ["recipe=bert", "recipe.context=24", "data=synthetic", "data.vocab_size=90", "batch_size=8", "eval_samples=16"]


@pytest.mark.parametrize(("size", "parameters"), [("base", 108_893_186), ("large", 334_094_338)])
def test_published_sizes_have_their_parameters(size: str, parameters: int) -> None:
    config = compose("recipe=bert", f"recipe.size={size}", "data=synthetic", "data.vocab_size=30519")
    config = config.resolve(CPU).config
    datasets = config.recipe.datasets(config.data, seed=0)
    with torch.device("meta"):
        model = config.recipe.build_model(datasets)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(config.recipe.blocks(model)) == (12 if size == "base" else 24)
    assert config.recipe.context == 384


def test_auto_is_nano_on_a_cpu_and_base_on_a_gpu() -> None:
    for hardware, size, context in ((CPU, "nano", 64), (GPU, "base", 384)):
        config = compose("recipe=bert", "data=synthetic")
        _, choices = config.recipe.resolve(hardware, config.data)
        found = [(choice.key, choice.value) for choice in choices]
        assert found == [("recipe.size", size), ("recipe.context", context)]


@pytest.mark.parametrize("context", [16, 40, 384])
def test_the_answer_is_what_the_question_quotes(context: int) -> None:
    text = np.random.default_rng(0).integers(0, 90, 2000).astype(np.uint16)
    data = Quotations(text, context, 90)
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
    data = Quotations(text, 64, 1000)
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


def test_microbatches_with_unequal_targets_give_the_same_gradient() -> None:
    found = []
    for size in (8, 2):
        trainer = trainer_of(*TINY, f"micro_batch_size={size}", "recipe.dropout=0", "optimizer=sgd", "clip=none")
        trainer.model.double()
        microbatches = next(trainer.batches())
        targets = [trainer.recipe.count_targets(batch) for batch in microbatches]
        for batch in microbatches:
            (trainer.recipe.loss(trainer.model, batch).loss_sum / sum(targets)).backward()
        found.append([parameter.grad for parameter in trainer.model.parameters()])
    assert len(set(targets)) > 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_few_steps_learn_where_answers_can_be(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "nano", Shape(1, 32, 2, 64))
    options = ("steps=40", "batch_size=4", "micro_batch_size=2", "recipe.dropout=0", "optimizer.lr=3e-3")
    trainer = trainer_of(*TINY, f"precision={mode}", *options)
    before = trainer.evaluate()
    records = fit(trainer)
    assert not any(record.skipped for record in records[5:])
    assert trainer.evaluate()["loss"] < before["loss"] - 0.3
    assert 0 <= before["accuracy"] <= 1


def test_activation_checkpointing_does_not_change_the_gradients() -> None:
    none, *others = (gradients(*TINY, f"activation_checkpointing={mode}") for mode in ("none", "blocks", "selective"))
    assert all(same_bits(none, other) for other in others)


def test_the_export_opens_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForQuestionAnswering

    trainer = trainer_of(*TINY)
    exported = reopened(trainer, tmp_path, AutoModelForQuestionAnswering)
    tokens = torch.randint(90, (2, 16))
    with torch.no_grad():
        assert torch.equal(exported(tokens).start_logits, trainer.model(tokens).start_logits)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.size=larg"], r"recipe.size=larg is unknown; did you mean 'large'"),
        (["recipe.attention=flash"], r"recipe.attention=flash is unknown; use recipe.attention=sdpa\|eager"),
        (["recipe.context=15"], r"recipe.context=15 must be at least 16"),
        (["recipe.dropout=1"], r"recipe.dropout=1.0 must be at least 0 and below 1"),
        (["data=digits"], r"recipe=bert cannot read data=digits; use data=python_docs"),
    ],
)
def test_values_that_cannot_work_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose("recipe=bert", "data=synthetic", *overrides).resolve(CPU)


def test_a_text_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short" * 30)
    with pytest.raises(UserError, match=r"one sample needs 385; use a longer text or recipe.context="):
        trainer_of("recipe=bert", "recipe.context=384", "data=text", f"data.path={tmp_path}/short.txt",
                   "data.tokenizer=bytes", f"data.cache_dir={tmp_path}")  # fmt: skip


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
