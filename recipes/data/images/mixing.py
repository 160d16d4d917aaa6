"""Mixup, CutMix and random erasing: drawn on the host from the samples' seeds, carried out on the device.

Images are mixed in pairs: those at the positions 2k and 2k + 1 of the stream of samples, both by the draw of the
first one. So neither the microbatch nor the number of processes changes what an image is mixed with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.data.images.augment import ImageAugment
from trainer.data.contract import Batch, SampleId

SHARE, PASTED, ERASED = "share", "pasted", "erased"
"""Names in a batch: float32, B; int32, B × 4; int32, B × 4 (left, top, right and lower edge in pixels)."""

# They keep the draws apart from those of crops and flips, which use the seed alone.
_PAIR, _ERASE = 1, 2

_AREA, _RATIO = (0.02, 0.33), (0.3, 3.3)
"""Bounds of an erased box: share of the image, height over width; the values of Zhong et al. and of torchvision."""
_NOTHING = (0, 0, 0, 0)


def draw(augment: ImageAugment, samples: Sequence[SampleId], size: int) -> Batch:
    """Return what ``apply`` and ``soft_targets`` need of these samples; nothing in evaluation.

    Args:
        augment: its ``mixup``, ``cutmix`` and ``erasing``.
        samples: of one microbatch, in the order of the stream.
        size: of the side of the images, in pixels.
    """
    seeds = [sample.seed for sample in samples if sample.seed is not None]
    drawn: Batch = {}
    if len(seeds) < len(samples):
        return drawn
    if augment.mixes:
        pairs = [
            _pair(augment, np.random.default_rng((seed, _PAIR)), size) for seed in seeds[: len(seeds) // 2 * 2 : 2]
        ]
        both = [pair for pair in pairs for _ in range(2)]
        both += [(1.0, _NOTHING)] * (len(seeds) - len(both))  # without a neighbour, an image stays as it is
        drawn[SHARE] = torch.tensor([share for share, _ in both], dtype=torch.float32)
        drawn[PASTED] = torch.tensor([box for _, box in both], dtype=torch.int32)
    if augment.erasing:
        boxes = [_erased(augment.erasing, np.random.default_rng((seed, _ERASE)), size) for seed in seeds]
        drawn[ERASED] = torch.tensor(boxes, dtype=torch.int32)
    return drawn


def apply(images: Tensor, batch: Batch) -> Tensor:
    """Return the images after what ``draw`` put into the batch; they keep their memory format.

    Args:
        images: float, B × C × S × S, normalised: the mean colour is 0.
        batch: with the images' entries, on their device.
    """
    if ERASED in batch:
        images = images.masked_fill(_inside(batch[ERASED], images.shape[-1]), 0.0)
    if SHARE in batch:
        inside = _inside(batch[PASTED], images.shape[-1])
        share = batch[SHARE].view(-1, 1, 1, 1)
        left, top, right, bottom = batch[PASTED][:, :, None, None, None].unbind(1)
        own = torch.where((right > left) & (bottom > top), (~inside).to(share.dtype), share)
        images = torch.lerp(_neighbours(images), images, own.to(images.dtype))
    return images


def soft_targets(label: Tensor, batch: Batch, classes: int) -> Tensor:
    """Return the labels' shares of each image, float32, B × classes: one-hot, or mixed as the images are.

    Args:
        label: int64, B.
        batch: with the images' entries, on the labels' device.
        classes: outputs of the model.
    """
    targets = F.one_hot(label, classes).to(torch.float32)
    return torch.lerp(_neighbours(targets), targets, batch[SHARE][:, None]) if SHARE in batch else targets


def _neighbours(rows: Tensor) -> Tensor:
    """Return the rows 1, 0, 3, 2, …; a last row without a neighbour stays."""
    order = torch.arange(len(rows), device=rows.device) ^ 1
    neighbours = rows.index_select(0, order.clamp_(max=len(rows) - 1))
    if rows.ndim == 4 and rows.is_contiguous(memory_format=torch.channels_last):
        return neighbours.contiguous(memory_format=torch.channels_last)
    return neighbours


def _inside(boxes: Tensor, size: int) -> Tensor:
    """Return a mask of the boxes' pixels, bool, B × 1 × size × size."""
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    place = torch.arange(size, device=boxes.device)
    across, down = (place >= left) & (place < right), (place >= top) & (place < bottom)
    return (down[:, :, None] & across[:, None, :])[:, None]


def _pair(augment: ImageAugment, random: np.random.Generator, size: int) -> tuple[float, tuple[int, int, int, int]]:
    """Draw the share that an image keeps of itself, and the box that it takes from its neighbour, if any."""
    cut = random.random() < 0.5 if augment.mixup and augment.cutmix else bool(augment.cutmix)
    alpha = augment.cutmix if cut else augment.mixup
    share = float(random.beta(alpha, alpha))
    if not cut:
        return share, _NOTHING
    # As in the published code and torchvision: the box may reach over the edge, which makes it smaller.
    x, y = random.integers(size, size=2).tolist()
    half = int(0.5 * math.sqrt(1 - share) * size)
    left, top, right, bottom = max(x - half, 0), max(y - half, 0), min(x + half, size), min(y + half, size)
    return 1 - (right - left) * (bottom - top) / size**2, (left, top, right, bottom)


def _erased(probability: float, random: np.random.Generator, size: int) -> tuple[int, int, int, int]:
    """Draw the box that is erased; ten tries, as in torchvision."""
    if random.random() >= probability:
        return _NOTHING
    for _ in range(10):
        area = size**2 * random.uniform(*_AREA)
        ratio = math.exp(random.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < height < size and 0 < width < size:
            left, top = int(random.integers(size - width + 1)), int(random.integers(size - height + 1))
            return left, top, left + width, top + height
    return _NOTHING
