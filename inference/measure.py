"""One pass over the samples of an evaluation: metrics, and what they are made of, batch by batch."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference.data import open_data, part_of
from inference.exported import Exported
from inference.setting import Setting
from recipes.data.text.tokens import TextDatasets, TokenData
from recipes.language import LanguageRecipe, TokenWindows
from trainer.data.evaluation import evaluation_samples
from trainer.data.loader import to_device
from trainer.devices import synchronise
from trainer.errors import UserError
from trainer.metrics import Metrics, reported
from trainer.parallel.world import World
from trainer.progress import work


@dataclass
class Evaluation:
    """The results of a pass."""

    metrics: dict[str, float]
    """The recipe's own; of a causal language model of text also ``bits_per_byte``."""
    targets: np.ndarray
    """int64: the valid targets of each batch."""
    sums: dict[str, np.ndarray]
    """float64: of each batch, the summed loss and the recipe's summed metrics."""
    samples: int
    rest: str
    """What of the split is left out, in words."""
    batch_size: int
    """Samples of a batch; the last may have fewer."""
    units_per_s: float
    """Units of the recipe (images, tokens) per second from the second batch on, loading included; of a single batch,
    of that one."""
    not_timed: str | None
    """Why ``units_per_s`` is not the speed of the format; None: it is."""
    data: str
    """The description of the data."""
    classes: list[str]
    """Their names; empty where the data has none."""
    confusion: np.ndarray | None
    """int64, classes × classes of the model: how many samples of the row's class were given the column's."""


def measure(exported: Exported, setting: Setting, split: str, at_least: int = 1) -> Evaluation:
    """Open data and model in the precision of the setting, and evaluate the samples of ``split``.

    Batches are of ``micro_batch_size``, or smaller so that there are ``at_least`` so many.

    Raises:
        UserError: the data does not suit the model, the files cannot be read, or there are too few samples.
    """
    datasets = open_data(setting, exported, split)
    part = part_of(datasets, split, setting.config.data)
    setting = setting.with_data(datasets)
    config, device, recipe = setting.config, setting.hardware.device, setting.config.recipe
    samples = min(len(part), setting.eval_samples or len(part))
    texts = [each for each in getattr(part, "datasets", [part]) if isinstance(each, TokenWindows)]
    tokens = sum((len(each.tokens) - 1) % each.context for each in texts)
    rest = f"; the last {tokens} tokens, less than a sample, are left out" if tokens else ""
    if samples < len(part):
        rest = f"; {len(part) - samples:,} more are left out (eval_samples={samples})"
    if samples < at_least:
        raise UserError(
            f"{at_least} batches are needed for an interval, and there are {samples} samples; "
            "use eval_samples=… or more data"
        )
    size = min(int(config.micro_batch_size), samples // at_least)
    model = setting.in_precision(exported.model(recipe, datasets))
    bytes_of = None
    if isinstance(recipe, LanguageRecipe) and isinstance(datasets, TextDatasets) and datasets.tokens.text_bytes:
        bytes_of = bytes_of_tokens(exported.tokenizer(), exported.config["vocab_size"])
        text_factor = _text_factor(datasets.tokens, split, bytes_of)
    targets, units, text_bytes = [], [], 0
    sums: list[dict[str, Tensor]] = []
    metrics = Metrics(recipe, datasets, config.metrics, device)
    confusion: Tensor | None = None
    times = [_now(device)]
    batches = evaluation_samples(len(part), setting.eval_samples, size)
    evaluating = work(f"evaluating in {config.precision.mode}", len(batches), "batches")
    with torch.inference_mode(), evaluating as advance:
        for number, microbatch in enumerate(config.loader.batches(part, batches, setting.hardware)):
            advance(number)
            batch = to_device(microbatch, device)
            with config.precision.autocast(device):
                output = recipe.loss(model, batch)
            sums.append({"loss": output.loss_sum, **output.metric_sums})
            metrics.update(output)
            targets.append(recipe.count_targets(microbatch))
            units.append(recipe.count_units(microbatch))
            if output.predictions is not None and "label" in batch:
                classes = output.predictions.shape[1]
                cells = torch.bincount(batch["label"] * classes + output.predictions.argmax(1), minlength=classes**2)
                confusion = cells if confusion is None else confusion + cells
            if bytes_of is not None:
                text_bytes += int(bytes_of[microbatch["tokens"][:, 1:].numpy()].sum())
            if len(units) == 1:
                times.append(_now(device))
        times.append(_now(device))
    first = int(len(units) > 1)  # the first batch also warms up
    per_batch = {name: torch.stack([each[name] for each in sums]).double().cpu().numpy() for name in sums[0]}
    totals = {name: float(values.sum()) for name, values in per_batch.items()}
    values = reported(recipe, totals, sum(targets)) | metrics.values(World())
    if text_bytes:
        values["bits_per_byte"] = totals["loss"] / (math.log(2) * text_bytes * text_factor)
    return Evaluation(
        values,
        np.array(targets),
        per_batch,
        samples,
        rest,
        size,
        sum(units[first:]) / max(times[-1] - times[first], 1e-9),
        setting.not_timed,
        datasets.description,
        getattr(datasets, "classes", []),
        None if confusion is None else confusion.view(math.isqrt(len(confusion)), -1).cpu().numpy(),
    )


def bytes_of_tokens(tokenizer: Any, vocabulary: int) -> np.ndarray:
    """Return the length in UTF-8 of the text of each token id of one of transformers' tokenizers, int64.

    Losses per byte compare models with different tokenizers. Special tokens (such as the end of a document) stand for
    no text. A token of a byte-level BPE has one character for each byte, also where it is only a part of a character;
    elsewhere, and where it was added to the vocabulary, a token's text is encoded. Of tokenizers that change the text
    (case, white space, unknown words) that is an estimate, see ``_text_factor``.

    Args:
        tokenizer: of an exported folder.
        vocabulary: the model's number of ids; those that the tokenizer does not have stand for nothing.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = (json.loads(backend.to_str())["decoder"] or {}) if backend else {}
    byte_level = "ByteLevel" in json.dumps(decoder)
    sizes = np.zeros(vocabulary, dtype=np.int64)
    special, added = set(tokenizer.all_special_tokens), tokenizer.get_added_vocab()
    for token, number in tokenizer.get_vocab().items():
        if number < vocabulary and token not in special:
            sizes[number] = len(token) if byte_level and token not in added else _length(token)
    return sizes


def _text_factor(tokens: TokenData, split: str, bytes_of: np.ndarray) -> float:
    """Return the bytes of the text of ``split`` over those that its tokens stand for: 1 where nothing was lost."""
    parts = [part for part in (("train", "valid") if split == "all" else (split,)) if part in tokens.text_bytes]
    chunks = (
        ids[start : start + 2**20]
        for ids in (getattr(tokens, part) for part in parts)
        for start in range(0, len(ids), 2**20)
    )
    return sum(tokens.text_bytes[part] for part in parts) / max(1, sum(int(bytes_of[ids].sum()) for ids in chunks))


def _length(token: str) -> int:
    if token.startswith("<0x") and len(token) == 6:  # sentencepiece's fallback to single bytes
        return 1
    return len(token.replace("▁", " ").encode())


def _now(device: torch.device) -> float:
    """Return the time when the device has done what was requested so far."""
    synchronise(device)
    return time.perf_counter()
