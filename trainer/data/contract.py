"""The interface between the datasets of ``recipes/`` and the loader, and what holds of any data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.errors import UserError

Batch = dict[str, Tensor]
"""One microbatch: named tensors whose first dimension is the sample."""


class SampleId(NamedTuple):
    """One sample to fetch. Its randomness comes from ``seed`` only, not from the worker or rank that fetches it."""

    index: int  # type: ignore[assignment]
    seed: int | None
    """Of the augmentation; None: no augmentation (evaluation)."""


class Dataset(Protocol):
    """Map-style data, fetched one microbatch at a time, so that arrays need no Python loop over samples.

    Where ``batch`` uses torch's global generator, the dataset has an attribute ``uses_global_generator`` that is true:
    no thread beside the training then calls it. Where it has an attribute ``pins``, the loader sets this to whether it
    may put its batches into page-locked memory (``torch.empty(…, pin_memory=True)``), which saves a copy. An attribute
    ``unreadable`` (bool, one for each sample) marks those whose place others have taken; the run counts them.
    """

    def __len__(self) -> int:
        """Return the number of samples in one epoch."""
        ...

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return the CPU tensors of these samples, stacked in the order given. A thread may call it."""
        ...


@dataclass
class Datasets:
    """The data of a run. A recipe's subclass adds what else the data decides."""

    train: Dataset
    valid: Dataset
    description: str
    """One line for the terminal, such as ``python_docs: 5.1M tokens, own BPE of 4096``."""
    decodes: bool = False
    """Whether fetching a sample takes considerable CPU time (decoding an image), so that workers are worthwhile."""
    test: Dataset | None = field(default=None, kw_only=True)
    """The test data, evaluated once, at the end, with the best weights; None: there is none."""

    def __post_init__(self) -> None:
        for role in ("train", "valid") if self.test is None else ("train", "valid", "test"):
            if not (hasattr(given := getattr(self, role), "batch") and hasattr(given, "__len__") and len(given)):
                raise UserError(
                    f"Datasets: {role} is {type(given).__name__}, and is to have a __len__ above 0 and a method "
                    'batch(samples); see "Your own recipe" in docs/recipes.md'
                )

    def facts(self) -> dict[str, str]:
        """Return what a person knows these data by, such as counts, to say what differs on resume."""
        return {"training samples": f"{len(self.train):,}", "validation samples": f"{len(self.valid):,}"}

    def keep(self, folder: Path) -> None:
        """Write into the run folder what a later run needs of this data beside the weights."""


def fingerprint(*datasets: Dataset) -> str:
    """Return a hash of the sizes and of a few samples of datasets: it changes with corpus, split and tokenizer."""
    digest = hashlib.sha256()
    for dataset in datasets:
        length = len(dataset)
        digest.update(str(length).encode())
        chosen = [SampleId(index, None) for index in sorted({0, length // 3, 2 * length // 3, length - 1})]
        for name, tensor in sorted(dataset.batch(chosen).items()):
            digest.update(name.encode() + str((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_no_overlap(key: str, files: Sequence[str], others: Sequence[str], role: str) -> None:
    """Refuse data with a file that has another role, whatever it is called there: a link or a hard link.

    Args:
        key: the option that names the data, for messages.
        files: of these data.
        others: those with the other role.
        role: such as ``training``.

    Raises:
        UserError: they share a file.
    """
    known, compared = ({os.stat(file)[1:3]: file for file in each if os.path.exists(file)} for each in (others, files))
    if shared := [file for inode, file in compared.items() if inode in known]:  # what is missing is reported later
        option = key.partition("=")[0]
        raise UserError(f"{key}: {shared[0]} is {role} data, too; set {option} to data that is used for nothing else")
