"""Samples of their own as batches: padded, or several in a window, with the loss and the gradients of each alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from recipes.data.hub import Hub
from recipes.data.text.samples import NO_TARGET, Packed, Padded, Part, first_fit_decreasing, sample_datasets
from recipes.data.text.tokenizers import Bytes
from recipes.data.text.tokens import Samples, TokenData
from recipes.gpt2 import GPT2
from recipes.language import LanguageModel, use_causal_kernels
from tests.helpers import start
from trainer.data.contract import Batch, SampleId

CONTEXT = 24


def samples(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, Samples]:
    """Random ids below 64, about half of which are targets, none the first of a sample."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *lengths])
    targets = rng.random(starts[-1]) < 0.5
    targets[starts[:-1]] = False
    targets[starts[1:] - 1] = True
    return rng.integers(0, 64, starts[-1], dtype=np.uint16), Samples(starts, targets)


def token_data(lengths: list[int], packing: bool) -> TokenData:
    train, of_train = samples(lengths)
    valid, of_valid = samples(lengths[::2], 1)
    return TokenData(train, valid, Bytes(), "numbers", samples={"train": of_train, "valid": of_valid}, packing=packing)


def every(data: Any) -> list[SampleId]:
    return [SampleId(index, None) for index in range(len(data))]


def naive(lengths: list[int], size: int) -> list[int]:
    """First fit decreasing, as it is written in books."""
    windows, room = [0] * len(lengths), list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = next((place for place, left in enumerate(room) if left >= lengths[index]), len(room))
        room += [size] * (place == len(room))
        room[place] -= lengths[index]
        windows[index] = place
    return windows


@pytest.mark.parametrize("seed", range(20))
def test_samples_are_placed_first_fit_decreasing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    lengths = rng.integers(1, size + 1, rng.integers(1, 200))
    assert first_fit_decreasing(lengths, size).tolist() == naive(lengths.tolist(), size)


def test_a_window_is_its_samples_one_after_the_other() -> None:
    ids, of = samples([6, 21, 5, 12])
    data = Packed(Part(ids, of, CONTEXT), CONTEXT)
    batch = data.batch(every(data))
    assert len(data) == 2
    # Of 20 and 4 tokens, of 5 and 11; what the last token of each would predict is none of its own.
    places = ((6, 27), (27, 32), (0, 6), (32, 44))
    rows, marks = ([array[first:end].tolist() for first, end in places] for array in (ids, of.targets))
    follows = [
        [int(id) if is_target else NO_TARGET for id, is_target in zip(row[1:], mark[1:], strict=True)]
        for row, mark in zip(rows, marks, strict=True)
    ]
    assert batch["tokens"].tolist() == [[*rows[0][:-1], *rows[1][:-1]], [*rows[2][:-1], *rows[3][:-1], *[0] * 8]]
    assert batch["targets"].tolist() == [follows[0] + follows[1], follows[2] + follows[3] + [NO_TARGET] * 8]
    assert batch["positions"].tolist() == [[*range(20), *range(4)], [*range(5), *range(19)]]
    assert batch["lengths"].tolist() == [24, 16]


def test_the_last_target_of_all_is_seen() -> None:
    of = Samples(np.array([0, 3, 3, 7]), np.array([False] * 6 + [True]))
    part = Part(np.arange(7), of, CONTEXT)
    assert (part.starts.tolist(), part.without_target) == ([3], 2)


def test_every_sample_is_in_one_window_and_its_batch_depends_on_nothing_else() -> None:
    lengths = np.random.default_rng(0).integers(2, 40, 300).tolist()  # some are cut
    ids, of = samples(lengths)
    packed, rows = (kind(Part(ids, of, CONTEXT), CONTEXT) for kind in (Packed, Padded))
    together, alone = packed.batch(every(packed)), rows.batch(every(rows))
    assert sorted(packed.order.tolist()) == list(range(len(rows)))
    for name in ("tokens", "targets"):
        kept = [part["targets"] != NO_TARGET for part in (together, alone)]
        found = [part[name][mask].sort().values for part, mask in zip((together, alone), kept, strict=True)]
        assert torch.equal(*found)
    again = packed.batch([SampleId(7, 3), SampleId(2, 5)])
    assert all(torch.equal(again[name], together[name][[7, 2]]) for name in again)


def networks(attention: str) -> dict[str, Any]:
    shape = {"vocab_size": 64, "attn_implementation": attention}
    llama = shape | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                n_positions=CONTEXT,
                n_embd=32,
                n_layer=2,
                n_head=2,
                **shape,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            )
        ),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **llama)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=5, **llama)),
    }


def model_of(kind: str, attention: str, packed: bool) -> LanguageModel:
    torch.manual_seed(0)
    network = networks(attention)[kind]()
    if not packed:
        use_causal_kernels(network, CONTEXT)
    return LanguageModel(network, kind, False)


def loss_and_gradients(model: nn.Module, batches: list[Batch]) -> list[torch.Tensor]:
    total = torch.zeros((), dtype=torch.float32)
    for batch in batches:
        total = total + GPT2(size="nano").loss(model, batch).loss_sum
    total.backward()
    return [total.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def distance(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest relative difference of the loss and the gradients; the key's bias has none but rounding."""
    scale = max(one.norm() for one in others[1:])
    parts = [(one - other).norm() / max(other.norm(), 1e-3 * scale) for one, other in zip(ones, others, strict=True)]
    return float(max(parts))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradients_are_those_of_each_sample_alone(packing: bool, kind: str, attention: str) -> None:
    lengths = [*np.random.default_rng(0).integers(3, 20, 30).tolist(), 40, CONTEXT + 1]
    ids, of = samples(lengths)
    part = Part(ids, of, CONTEXT)
    rows, together = Padded(part, CONTEXT), (Packed if packing else Padded)(part, CONTEXT)
    alone = []
    for index in range(len(rows)):
        batch, length = rows.batch([SampleId(index, None)]), int(part.lengths[index])
        alone.append({name: tensor[:, :length] for name, tensor in batch.items() if name != "lengths"})
    assert packing == (len(together) < len(rows))
    given = [together.batch(every(together)[first : first + 5]) for first in range(0, len(together), 5)]
    found = loss_and_gradients(model_of(kind, attention, packing or kind == "mistral"), given)  # which needs a mask
    expected = loss_and_gradients(model_of(kind, attention, True), alone)
    assert distance(found, expected) < 2e-5


@pytest.mark.parametrize("changed", ["positions", "mask"])
def test_without_positions_or_a_mask_they_would_differ(changed: str) -> None:
    """So the test above sees what it is to see."""
    ids, of = samples(np.random.default_rng(0).integers(3, 12, 12).tolist())
    data = Packed(Part(ids, of, CONTEXT), CONTEXT)
    batch = data.batch(every(data))
    expected = loss_and_gradients(model_of("llama", "sdpa", True), [batch])
    if changed == "positions":
        batch = batch | {"positions": torch.arange(CONTEXT).expand(len(data), -1)}
    found = loss_and_gradients(model_of("llama", "sdpa", changed != "mask"), [batch])
    assert distance(found, expected) > 1e-3


def test_a_batch_is_padded_to_its_longest_in_steps_of_64() -> None:
    ids, of = samples([10, 64, 65, 66, 150, 300])
    rows = Padded(Part(ids, of, 200), 200)
    widths = [rows.batch([SampleId(0, None), SampleId(index, None)])["tokens"].shape[1] for index in range(6)]
    assert widths == [64, 64, 64, 128, 192, 200]


def test_what_padding_there_is_is_said() -> None:
    lengths = [13] * 40  # of 12 tokens each: two fill a window
    data = sample_datasets(token_data(lengths, True), CONTEXT)
    assert (len(data.train), len(data.valid)) == (20, 10)
    assert "packed into 20 windows of 24 tokens, of which 0.0% are padding (without packing 50.0%)" in data.description
    assert "padding" not in sample_datasets(token_data(lengths, False), CONTEXT).description


def test_tokens_are_counted_without_padding() -> None:
    data = sample_datasets(token_data([13, 9], True), CONTEXT)
    assert GPT2(size="nano").count_units(data.train.batch([SampleId(0, None)])) == 20


def test_the_order_is_that_of_any_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are made once, and then drawn by seed, epoch and place, as samples of any data are."""
    from tests.helpers import compose

    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path))
    turns = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "x" * (n % 9)}] for n in range(90)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": turn}) for turn in turns))
    options = ("recipe=gpt2", "recipe.size=nano", "data=hub", f"data.name={tmp_path / 'a.jsonl'}", "data.packing=true")
    trainer = start(compose(*options, "data.tokenizer=bytes", "batch_size=4", "steps=12", "device=cpu"))
    train = Hub(name=str(tmp_path / "a.jsonl"), tokenizer="bytes", packing=True)
    data = GPT2(size="nano").datasets(train, 0).train
    batches, whole = trainer.batches(), data.batch(every(data))["tokens"].tolist()
    drawn = [row for _ in range(len(data) // 4) for batch in next(batches) for row in batch["tokens"].tolist()]
    assert len(drawn) > 16  # of the first epoch, which has each once
    assert drawn != whole[: len(drawn)]
    assert sorted(drawn) == sorted(row for row in whole if row in drawn)
