"""The data that a trained model is evaluated on: with its tokenizer, its classes and its normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.load import Exported
from inference.run_config import RunConfig
from mantissa.display import shortened
from recipes.data.images.source import ImageDatasets
from recipes.data.text.corpus import TokenizedText
from recipes.data.text.labelled import EncodedTexts, LabelledDatasets
from recipes.data.text.samples import NO_TARGET
from recipes.data.text.shards import TokenShards
from recipes.data.text.tokens import TextDatasets
from trainer.data.contract import Batch, Dataset, Datasets, SampleId
from trainer.errors import UserError
from trainer.recipe import DataSource


def open_data(run: RunConfig, exported: Exported, split: str) -> Datasets:
    """Open the data as the model knows it; for ``split=all`` text without a cut.

    Raises:
        UserError: the recipe cannot read it, its text has characters without a token, or it has other classes.
    """
    config, data = run.config, run.config.data
    recipe: Any = config.recipe
    tuned = exported.run and exported.run.config().get("recipe.pretrained")  # such a model brought its tokenizer
    if isinstance(data, TokenizedText):
        # The parts of what was streamed are fixed: split=all joins them.
        data = replace(data, whole=split == "all" and getattr(data, "max_tokens", None) is None)
        if (tuned or data.whole or not run.own_data) and data.tokenizer != "bytes":
            recipe = replace(recipe, pretrained=str(exported.folder))  # which brings its tokenizer, too
    if isinstance(data, TokenShards) and not run.own_data:
        data = replace(data, tokenizer=str(exported.folder), vocab_size=None)
    try:
        datasets: Datasets = recipe.datasets(data, config.seed)
    except UserError as error:  # which names the option of training
        problem = error.problem.replace(f"init_from={exported.folder}", f"run={exported.given}")
        raise UserError(problem, *error.remedies, mistake=error.mistake) from error
    if isinstance(datasets, ImageDatasets) and "classes" in exported.config:
        colours = {name: tuple(exported.config[name]) for name in ("mean", "std")}
        known = _with_classes(datasets, exported.config["classes"], exported.config.get("multi_label", False))
        return replace(known, **colours)
    if isinstance(datasets, LabelledDatasets):
        multi_label = exported.config.get("problem_type") == "multi_label_classification"
        return _with_classes(datasets, [*exported.config["id2label"].values()], multi_label)
    if isinstance(datasets, TextDatasets):
        exported.check_tokens(f"data={config.data.kind}", datasets.vocabulary)
    return datasets


def part_of(datasets: Datasets, split: str, data: DataSource) -> Dataset:
    """Return the samples of ``split``: see ``EvaluateOptions``; ``data`` is where the datasets are from.

    Raises:
        UserError: there is no such split.
    """
    if isinstance(datasets, TextDatasets) and split == "all" and datasets.tokens.valid is datasets.tokens.train:
        return datasets.train
    if split == "all" and isinstance(train := datasets.train, EncodedTexts):
        return train.followed_by(datasets.valid)
    if split == "all":
        return Joined([datasets.train, datasets.valid])
    part: Dataset | None = getattr(datasets, split)
    if part is None:
        given = " (data.test=… names one)" if hasattr(data, "test") else ""
        raise UserError(f"split={split}: there is none in {datasets.description}{given}", "split=valid", "split=all")
    return part


def tokens_per_byte(datasets: Datasets, split: str) -> float | None:
    """Return the tokens of a split of text for each byte of it in UTF-8; None: it is no text."""
    if not (isinstance(datasets, TextDatasets) and datasets.tokens.text_bytes):
        return None
    tokens = datasets.tokens
    parts = [part for part in (("train", "valid") if split == "all" else (split,)) if part in tokens.text_bytes]
    return sum(len(getattr(tokens, part)) for part in parts) / sum(tokens.text_bytes[part] for part in parts)


def _with_classes(datasets: Any, names: list[str], multi_label: bool) -> Any:
    """Return labelled images or texts with the classes of a trained model."""
    if datasets.multi_label != multi_label:
        one, several = "one label", "any number of labels"
        gives, has = (one, several) if datasets.multi_label else (several, one)
        raise UserError(f"the model gives {gives} to a sample, and in this data one has {has}; give data like its own")
    if unknown := [name for name in datasets.classes if name not in names]:
        raise UserError(
            f"the data has the class {unknown[0]!r}, which the model was not trained on (its {len(names)} classes: "
            f"{shortened(names, 5)}); leave such samples out, or rename their class"
        )
    labels = torch.tensor([names.index(name) for name in datasets.classes])
    given: dict[str, Any] = {name: getattr(datasets, name) for name in ("train", "valid", "test")}
    parts = {name: copy(part) for name, part in given.items() if part is not None}  # they share the samples
    for part in parts.values():
        if part.labels.dtype == torch.bool:  # a column for each class
            columns = part.labels.new_zeros(len(part.labels), len(names))
            part.labels = columns.index_copy(1, labels, part.labels)
        else:
            part.labels = labels[part.labels]
    return replace(datasets, **parts, classes=names)


class Joined:
    """Datasets one after the other."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = datasets

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return the samples, which lie in the order of the datasets, as those of an evaluation do."""
        parts, first = [], 0
        for dataset in self.datasets:
            end = first + len(dataset)
            inside = [SampleId(index - first, seed) for index, seed in samples if first <= index < end]
            parts += [dataset.batch(inside)] if inside else []
            first = end
        return {name: torch.cat(_of_one_width(name, [part[name] for part in parts])) for name in parts[0]}


def _of_one_width(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """Pad the second dimension to that of the widest: rows of text may be padded to the longest of their part."""
    widths = {tensor.shape[1:2] for tensor in tensors}
    if len(widths) == 1:
        return tensors
    (widest,), value = max(widths), NO_TARGET if name == "targets" else 0
    return [F.pad(tensor, (0, widest - tensor.shape[1]), value=value) for tensor in tensors]
