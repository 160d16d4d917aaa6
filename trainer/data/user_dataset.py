"""The data of a Python program: torch's map-style datasets, whose samples a function collates to batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from mantissa.errors import described
from trainer.data.contract import Batch, SampleId
from trainer.errors import UserError


class UserDataset:
    """A torch dataset, or a DataLoader's with its ``collate_fn``. The tensors of a batch go by their place in it.

    What a sample draws from the generators of torch, numpy and Python is a function of the microbatch alone, so that
    neither loading processes nor a resume change it.

    Raises:
        UserError: it has no samples by number, another order than the trainer's, or samples that are no tensors.
    """

    uses_global_generator = True

    def __init__(self, given: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset, own = given, default_collate
        if isinstance(given, DataLoader):
            self.dataset, own = given.dataset, given.collate_fn
        self.name = type(self.dataset).__name__
        if not (hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__") and len(self.dataset)):
            raise UserError(f"{self.name}: give a map-style dataset, with __getitem__ and a __len__ above 0")
        if isinstance(given, DataLoader):
            sampler: Any = given.sampler if given.batch_size else given.batch_sampler or given.sampler
            whole = type(sampler) in (RandomSampler, SequentialSampler) and len(sampler) == len(self.dataset)
            if not whole or getattr(sampler, "replacement", False):
                raise UserError(
                    f"the {type(sampler).__name__} of a DataLoader has no effect: the seed decides the order, of all "
                    "samples; leave it out, and set batch_size"
                )
        self.collate = collate or own
        _, self.structure = self._drawn([0], 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return the tensors of these samples by their place, ``0`` and so on."""
        indices = [sample.index for sample in samples]
        tensors, structure = self._drawn(indices, samples[0].seed or samples[0].index)
        if structure != self.structure:
            raise UserError(f"{self.name}: sample {indices[0]} has another structure than sample 0")
        return {str(place): tensor for place, tensor in enumerate(tensors)}

    def not_finite(self, index: int) -> str:
        """Return which tensor of a sample has NaN or infinity; empty: none."""
        for path, tensor in tree_flatten_with_path(self.rebuilt(self.batch([SampleId(index, 0)])))[0]:
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return f"{'NaN' if tensor.isnan().any() else 'infinity'} in {keystr(path) or 'its tensor'}"
        return ""

    def rebuilt(self, batch: Batch) -> Any:
        """Return a batch as the collating function made it, of tuples, lists and dictionaries."""
        return tree_unflatten([batch[str(place)] for place in range(len(batch))], self.structure)

    def _drawn(self, indices: list[int], seed: int) -> tuple[list[Tensor], Any]:
        """Return the tensors of some samples and their structure, drawn with the seed."""
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            fetch = getattr(self.dataset, "__getitems__", None)  # as torch's own DataLoader does
            return self._flat(fetch(indices) if fetch else [self.dataset[each] for each in indices])
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])

    def _flat(self, samples: list[Any]) -> tuple[list[Tensor], Any]:
        try:
            batch = self.collate(samples)
        except Exception as error:  # of any kind: what is in a sample decides
            what = f"{self.name}: samples cannot be batched ({described(error)})"
            raise UserError(f"{what}; leave out what is no tensor, or set a collate_fn") from error
        leaves, structure = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (len(samples),):
                what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:60]
                raise UserError(
                    f"{self.name}: {len(samples)} collated samples hold {what}; leave it out, or set a collate_fn that "
                    "makes tensors with the samples in their first dimension"
                )
        return leaves, structure
