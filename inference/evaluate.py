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
from trainer.data.contract import Dataset, Datasets
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
    setting, model = opened.setting, opened.model
    config, device, recipe = setting.config, setting.hardware.device, setting.config.recipe
    samples = min(len(opened.part), setting.eval_samples or len(opened.part))
    if samples < at_least:
        raise UserError(
            f"{at_least} batches are needed for an interval, and there are {samples} samples; "
            "use eval_samples=… or more data"
        )
    size = min(int(config.micro_batch_size), samples // at_least)
    targets, units, text_bytes = [], [], 0
    sums: list[dict[str, Tensor]] = []
    confusion: Tensor | None = None
    setting.apply()
    times = [_now(device)]
    with torch.inference_mode():
        batches = evaluation_samples(len(opened.part), setting.eval_samples, size)
        for microbatch in config.loader.batches(opened.part, batches, setting.hardware):
            batch = to_device(microbatch, device)
            with config.precision.autocast(device):
                output = recipe.loss(model, batch)
            sums.append({"loss": output.loss_sum, **output.metric_sums})
            targets.append(recipe.count_targets(microbatch))
            units.append(recipe.count_units(microbatch))
            if output.scores is not None and "label" in batch:
                classes = output.scores.shape[1]
                cells = torch.bincount(batch["label"] * classes + output.scores.argmax(1), minlength=classes**2)
                confusion = cells if confusion is None else confusion + cells
            if opened.bytes_of_tokens is not None:
                text_bytes += int(opened.bytes_of_tokens[microbatch["tokens"][:, 1:].numpy()].sum())
            if len(units) == 1:
                times.append(_now(device))
        times.append(_now(device))
    first = int(len(units) > 1)  # the first batch also warms up
    per_batch = {name: torch.stack([each[name] for each in sums]).double().cpu().numpy() for name in sums[0]}
    totals = {name: float(values.sum()) for name, values in per_batch.items()}
    loss, count = totals.pop("loss"), max(1, sum(targets))
    metrics = recipe.metrics(loss / count, totals, count)
    if text_bytes:
        metrics["bits_per_byte"] = loss / (math.log(2) * text_bytes)
    return Evaluation(
        metrics,
        np.array(targets),
        per_batch,
        samples,
        size,
        sum(units[first:]) / max(times[-1] - times[first], 1e-9),
        setting.not_timed,
        None if confusion is None else confusion.view(math.isqrt(len(confusion)), -1).cpu().numpy(),
    )


def _now(device: torch.device) -> float:
    """Return the time when the device has done what was requested so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
