"""One pass over the samples of an evaluation: metrics, and what they are made of, batch by batch."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from inference.data import open_data, part_of
from inference.exported import Exported
from inference.model import in_precision, load_model, open_tokenizer
from inference.setting import Setting
from inference.textbytes import bytes_of_tokens
from recipes.data.text.corpus import TokenizedText
from recipes.language import LanguageRecipe
from trainer.data.contract import Dataset, Datasets, SampleId
from trainer.data.evaluation import evaluation_samples
from trainer.data.loader import to_device
from trainer.errors import UserError


@dataclass
class Evaluation:
    """The results of a pass."""

    metrics: dict[str, float]
    """The recipe's own; of a causal language model also ``bits_per_byte``."""
    targets: np.ndarray
    """int64: the valid targets of each batch."""
    sums: dict[str, np.ndarray]
    """float64: of each batch, the summed loss and the recipe's summed metrics."""
    samples: int
    batch_size: int
    """Samples of a batch; the last may have fewer."""
    units_per_s: float
    """Units of the recipe (images, tokens) per second from the second batch on, loading included; of a single batch,
    of that one."""
    not_timed: str | None = None
    """Why ``units_per_s`` is not the speed of the format; None: it is."""
    confusion: np.ndarray | None = None
    """int64, classes × classes of the model: how many samples of the row's class were given the column's."""


@dataclass
class Opened:
    """A model and its data, ready to be evaluated."""

    setting: Setting
    datasets: Datasets
    part: Dataset
    model: nn.Module
    bytes_of_tokens: np.ndarray | None
    """int64: the length of each token id's text in UTF-8; None: not a language model of text."""


def open_all(exported: Exported, setting: Setting, split: str) -> Opened:
    """Open the data and the model in the precision of the setting.

    Raises:
        UserError: the data does not suit the model, or the files cannot be read.
    """
    datasets = open_data(setting, exported)
    part = part_of(datasets, split, setting.config.data)
    if not len(part):
        raise UserError(f"split={split}: this part of the data is empty; choose another split")
    setting = setting.with_data(datasets)
    config = setting.config
    model = in_precision(load_model(exported, config.recipe, datasets), setting)
    table = None
    if isinstance(config.recipe, LanguageRecipe) and isinstance(config.data, TokenizedText):
        table = bytes_of_tokens(open_tokenizer(exported), exported.config["vocab_size"])
    return Opened(setting, datasets, part, model, table)


def evaluate(opened: Opened, at_least: int = 1) -> Evaluation:
    """Evaluate the samples, in batches of ``micro_batch_size``, or smaller ones so that there are ``at_least`` so many.

    Raises:
        UserError: there are fewer samples than ``at_least``.
    """
    config, hardware, model = opened.setting.config, opened.setting.hardware, opened.model
    recipe, device = config.recipe, hardware.device
    batches = _batches(opened, at_least)
    targets, units, text_bytes = [], [], 0
    sums: list[dict[str, Tensor]] = []
    confusion: Tensor | None = None
    opened.setting.apply()
    started, warm = _now(device), 0.0
    with torch.inference_mode():
        for microbatch in config.loader.batches(opened.part, batches, hardware):
            batch = to_device(microbatch, device)
            with config.precision.autocast(device):
                output = recipe.loss(model, batch)
            sums.append({"loss": output.loss_sum, **output.metric_sums})
            targets.append(recipe.count_targets(microbatch))
            units.append(recipe.count_units(microbatch))
            if output.scores is not None and "label" in batch:
                confusion = _counted(confusion, output.scores, batch["label"])
            if opened.bytes_of_tokens is not None:
                text_bytes += int(opened.bytes_of_tokens[microbatch["tokens"][:, 1:].numpy()].sum())
            warm = warm or _now(device)
        ended = _now(device)
    several = len(units) > 1
    per_batch = {name: torch.stack([each[name] for each in sums]).double().cpu().numpy() for name in sums[0]}
    totals = {name: float(values.sum()) for name, values in per_batch.items()}
    count = max(1, sum(targets))
    loss = totals["loss"] / count
    metrics = recipe.metrics(loss, {name: value for name, value in totals.items() if name != "loss"}, count)
    if text_bytes:
        metrics["bits_per_byte"] = totals["loss"] / (math.log(2) * text_bytes)
    return Evaluation(
        metrics,
        np.array(targets),
        per_batch,
        sum(map(len, batches)),
        len(batches[0]),
        sum(units[several:]) / max(ended - (warm if several else started), 1e-9),
        opened.setting.not_timed,
        None if confusion is None else confusion.cpu().numpy(),
    )


def _batches(opened: Opened, at_least: int) -> list[list[SampleId]]:
    length, limit = len(opened.part), opened.setting.eval_samples
    samples = length if limit is None else min(length, limit)
    if samples < at_least:
        raise UserError(
            f"{at_least} batches are needed for an interval, and there are {samples} samples; "
            "use eval_samples=… or more data"
        )
    size = opened.setting.config.micro_batch_size
    assert isinstance(size, int)
    return evaluation_samples(length, limit, min(size, samples // at_least))


def _counted(confusion: Tensor | None, scores: Tensor, label: Tensor) -> Tensor:
    """Return the confusion matrix with these samples added; it stays on the device.

    Args:
        confusion: int64, classes × classes; None: the first samples.
        scores: B × classes.
        label: int64, B.
    """
    classes = scores.shape[1]
    cells = torch.bincount(label * classes + scores.argmax(1), minlength=classes**2).view(classes, classes)
    return cells if confusion is None else confusion + cells


def _now(device: torch.device) -> float:
    """Return the time when the device has done what was requested so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
