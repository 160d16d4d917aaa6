"""Datasets of samples that are texts of their own, such as chats: a row each, or several packed into a window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mantissa.display import counted
from recipes.data.text.tokens import Ids, Samples, TextDatasets, TokenData
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.errors import UserError

NO_TARGET = -100
"""In ``targets``: nothing is to be predicted here; torch's own ``ignore_index``."""
_MULTIPLE = 64
"""Batches are padded to a multiple of so many tokens, so that compiled code and allocators see few shapes."""


class Part:
    """The samples of a part, cut at the end to ``context`` tokens and what follows the last; without those that then
    have no target.

    Args:
        ids: of all samples, one after the other.
        samples: where they begin, and which ids are to be predicted.
        context: tokens that the model takes.
    """

    def __init__(self, ids: Ids, samples: Samples, context: int) -> None:
        self.ids, self.targets = ids, samples.targets
        lengths = np.diff(samples.starts)
        kept = np.minimum(lengths, context + 1)
        # Where each begins and, cut, ends, in turn: numpy reduces what lies between two places, or after the last.
        places = np.stack([samples.starts[:-1], samples.starts[:-1] + kept], 1).ravel()
        found = np.zeros(len(places), dtype=bool)
        inside = places[places < len(ids)]
        found[: len(inside)] = np.logical_or.reduceat(samples.targets, inside)
        used = np.flatnonzero(found[::2] & (kept > 1))
        self.starts, self.lengths = samples.starts[:-1][used], kept[used] - 1
        self.cut, self.without_target = int((lengths[used] > kept[used]).sum()), len(lengths) - len(used)

    def fill(self, row: int, tokens: np.ndarray, targets: np.ndarray) -> None:
        """Write the tokens of a sample into the beginning of an array, and into the other what follows each."""
        first, length = int(self.starts[row]), int(self.lengths[row])
        ids = self.ids[first : first + length + 1]
        tokens[:length] = ids[:-1]
        targets[:length] = ids[1:]
        targets[:length][~self.targets[first + 1 : first + length + 1]] = NO_TARGET


class Padded:
    """A sample in each row of a batch, padded to the longest of the batch, in steps of 64 tokens.

    Padding needs no token of its own: it is no target, and comes after all that a causal model predicts from.
    """

    def __init__(self, part: Part, context: int) -> None:
        self.part, self.context = part, context

    def __len__(self) -> int:
        return len(self.part.starts)

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``tokens`` and ``targets`` (-100: none), int64 B × T, and ``lengths``, the tokens of each row."""
        rows = [sample.index for sample in samples]
        lengths = self.part.lengths[rows]
        longest = min(-(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE, self.context)
        tokens = np.zeros((len(rows), longest), dtype=np.int64)
        targets = np.full_like(tokens, NO_TARGET)
        for place, row in enumerate(rows):
            self.part.fill(row, tokens[place], targets[place])
        return _tensors(tokens=tokens, targets=targets, lengths=lengths)


class Packed:
    """Windows of ``context`` tokens, each with several samples one after the other, and padding at the end.

    The positions begin anew with each sample. What follows the last one continues its positions: it is no target, and
    does not make another text.
    """

    def __init__(self, part: Part, context: int) -> None:
        self.part, self.context = part, context
        windows = first_fit_decreasing(part.lengths, context)
        self.order = np.argsort(windows, kind="stable")
        self.starts = np.concatenate([[0], np.cumsum(np.bincount(windows))])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return ``tokens``, ``targets`` (-100: none) and ``positions``, int64 B × ``context``, and ``lengths``, the
        tokens of each window.
        """
        tokens = np.zeros((len(samples), self.context), dtype=np.int64)
        targets, positions = np.full_like(tokens, NO_TARGET), np.zeros_like(tokens)
        lengths = np.zeros(len(samples), dtype=np.int64)
        for place, (window, _) in enumerate(samples):
            first = 0
            for row in self.order[self.starts[window] : self.starts[window + 1]]:
                self.part.fill(row, tokens[place, first:], targets[place, first:])
                positions[place, first:] = np.arange(self.context - first)
                first += int(self.part.lengths[row])
            lengths[place] = first
        return _tensors(tokens=tokens, targets=targets, positions=positions, lengths=lengths)


def _tensors(**arrays: np.ndarray) -> Batch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def first_fit_decreasing(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the window of each sample, int64: from the longest to the shortest, the first window with room for it.

    Samples of one length, in their order, are placed at once: each window takes as many as fit, the first ones first.

    Args:
        lengths: of the samples, at least 1 and at most ``size``.
        size: of a window.
    """
    order = np.argsort(-lengths, kind="stable")
    windows = np.empty(len(lengths), dtype=np.int64)
    room = np.full(len(lengths), size, dtype=np.int32)
    opened = placed = 0
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        used = np.flatnonzero(room[:opened] >= length)
        new = -(-max(0, count - int((room[used] // length).sum())) // (size // length))
        used = np.concatenate([used, np.arange(opened, opened + new)])
        fitting = room[used] // length
        taken = np.clip(count - (np.cumsum(fitting) - fitting), 0, fitting)
        room[used] -= (taken * length).astype(np.int32)
        windows[order[placed : placed + count]] = np.repeat(used, taken)
        opened, placed = opened + new, placed + count
    return windows


def sample_datasets(tokens: TokenData, context: int, known: int = 0, positions: int | None = None) -> TextDatasets:
    """Return datasets of the samples, each cut to ``context`` tokens.

    Args:
        tokens: with ``samples``.
        context: tokens that the model takes.
        known: token ids that a pretrained model has; 0: it is new.
        positions: tokens that a pretrained model takes at most; None: any number.

    Raises:
        UserError: no sample of a part has a target there.
    """
    given = {"train": tokens.train, "valid": tokens.valid, "test": tokens.test}
    parts = {name: Part(ids, tokens.samples[name], context) for name, ids in given.items() if ids is not None}
    if tokens.valid is tokens.train:
        parts["valid"] = parts["train"]
    for name, part in parts.items():
        if not len(part.starts):
            starts, targets = tokens.samples[name]
            longest = int(np.diff(starts).max()) - 1
            fits = context < longest <= (positions or longest) and targets.any()
            remedies = [f"recipe.context={longest}"] if fits else []
            what = f"no {'training' if name == 'train' else name} row of {tokens.description.partition(':')[0]}"
            raise UserError(f"{what} has a target within recipe.context={context}: a text of the assistant", *remedies)
    different = {id(part): part for part in parts.values()}.values()
    used, cut, without = (sum(counts) for counts in zip(*map(_counts, different), strict=True))
    about = (
        [f"{cut:,} of {counted(used, 'row')} ({cut / used:.0%}) cut at the end to {context + 1} tokens"] if cut else []
    )
    about += [f"{counted(without, 'row')} without a target left out"] if without else []
    datasets: dict[str, Dataset] = {}
    for name, part in parts.items():
        same = name == "valid" and part is parts["train"]
        datasets[name] = datasets["train"] if same else (Packed if tokens.packing else Padded)(part, context)
    if tokens.packing:
        filled, samples = int(parts["train"].lengths.sum()), len(parts["train"].starts)
        before, after = (1 - filled / (count * context) for count in (samples, len(datasets["train"])))
        about.append(
            f"packed into {counted(len(datasets['train']), 'window')} of {context} tokens, of which {after:.1%} are "
            f"padding (without packing {before:.1%})"
        )
    if known and tokens.added:
        about.append(f"{tokens.added} tokens are new to the model")
    return TextDatasets(
        datasets["train"],
        datasets["valid"],
        "; ".join([tokens.description, *about]),
        test=datasets.get("test"),
        tokens=tokens,
        tokenizer=tokens.tokenizer,
        vocabulary=max(tokens.tokenizer.vocab_size, known),
    )


def _counts(part: Part) -> tuple[int, int, int]:
    return len(part.starts), part.cut, part.without_target
