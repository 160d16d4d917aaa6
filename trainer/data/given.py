"""Data that a Python program has already: torch's map-style datasets, whose samples a function collates to a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from trainer.data.contract import Batch, SampleId
from trainer.errors import UserError


class Collated:
    """The samples of a torch dataset, collated to batches whose tensors go by their place in the batch.

    What a dataset draws from the generators of torch, numpy and Python is a function of the microbatch alone, so that
    neither loading processes nor a resume change it.
    """

    uses_global_generator = True

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self.structure = self._flat([dataset[0]])[1]
        """What ``rebuilt`` makes of a batch: the tuples, lists and dictionaries that hold its tensors."""

    @classmethod
    def of(cls, given: Any, collate: Callable[[list[Any]], Any] | None) -> Collated:
        """Return the samples of a dataset, or of a DataLoader's, whose collating function counts, too.

        Raises:
            UserError: it has no samples by number, or samples that are no tensors.
        """
        if isinstance(given, DataLoader):
            if type(given.sampler) not in (RandomSampler, SequentialSampler):
                raise UserError(
                    f"the {type(given.sampler).__name__} of a DataLoader cannot be followed: the order of the samples "
                    "is a function of the seed; give the DataLoader's dataset"
                )
            given, collate = given.dataset, collate or given.collate_fn
        if not (hasattr(given, "__getitem__") and hasattr(given, "__len__") and len(given)):
            raise UserError(f"{type(given).__name__}: give a map-style dataset, with __getitem__ and a __len__ above 0")
        return cls(given, collate or default_collate)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return the tensors of these samples by their place, ``0`` and so on."""
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        index, seed = samples[0]
        seed = index if seed is None else seed
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            indices = [sample.index for sample in samples]
            fetch = getattr(self.dataset, "__getitems__", None)  # as torch's own DataLoader does
            tensors, structure = self._flat(fetch(indices) if fetch else [self.dataset[each] for each in indices])
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
        if structure != self.structure:
            raise UserError(f"sample {indices[0]} of {type(self.dataset).__name__} is made up otherwise than sample 0")
        return {str(place): tensor for place, tensor in enumerate(tensors)}

    def rebuilt(self, batch: Batch) -> Any:
        """Return a batch as the dataset's collating function made it."""
        return tree_unflatten([batch[str(place)] for place in range(len(batch))], self.structure)

    def _flat(self, samples: list[Any]) -> tuple[list[Tensor], TreeSpec]:
        batch = self.collate(samples)
        leaves, structure = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (len(samples),):
                what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:60]
                raise UserError(
                    f"{len(samples)} collated samples of {type(self.dataset).__name__} hold {what}; a batch is made up "
                    "of tensors with the samples in their first dimension: leave it out, or set collate_fn"
                )
        return leaves, structure
