"""Mixup and CutMix: drawn on the host from the samples' seeds, carried out on the device.

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

SHARE, PASTED = "share", "pasted"
"""Names in a batch: float32, B; int32, B × 4 (left, top, right and lower edge in pixels)."""

_PAIR = 1
"""Keeps the draws apart from those of crops and flips, which use the seed alone."""
_NOTHING = (0, 0, 0, 0)


def draw(augment: ImageAugment, samples: Sequence[SampleId], size: int) -> Batch:
    """Return what ``apply`` and ``soft_targets`` need of these samples; nothing in evaluation.

    Args:
        augment: its ``mixup`` and ``cutmix``.
        samples: of one microbatch, in the order of the stream.
        size: of the side of the images, in pixels.
    """
    seeds = [sample.seed for sample in samples if sample.seed is not None]
    if len(seeds) < len(samples) or not augment.on_device:
        return {}
    pairs = [_pair(augment, np.random.default_rng((seed, _PAIR)), size) for seed in seeds[: len(seeds) // 2 * 2 : 2]]
    both = [pair for pair in pairs for _ in range(2)]
    both += [(1.0, _NOTHING)] * (len(seeds) - len(both))  # without a neighbour, an image stays as it is
    return {
        SHARE: torch.tensor([share for share, _ in both], dtype=torch.float32),
        PASTED: torch.tensor([box for _, box in both], dtype=torch.int32),
    }


def apply(images: Tensor, batch: Batch) -> Tensor:
    """Return the images after what ``draw`` put into the batch; they keep their memory format.

    Args:
        images: float, B × C × S × S.
        batch: with the images' entries, on their device.
    """
    if SHARE not in batch:
        return images
    inside = _inside(batch[PASTED], images.shape[-1])
    share = batch[SHARE].view(-1, 1, 1, 1)
    left, top, right, bottom = batch[PASTED][:, :, None, None, None].unbind(1)
    own = torch.where((right > left) & (bottom > top), (~inside).to(share.dtype), share)
    return torch.lerp(_neighbours(images), images, own.to(images.dtype))


def soft_targets(label: Tensor, batch: Batch, classes: int) -> Tensor:
    """Return the labels' shares of each image, float32, B × classes: 0 and 1, or mixed as the images are.

    Args:
        label: int64, B; or float32, B × classes, which are those of images that are not mixed.
        batch: with the images' entries, on the labels' device.
        classes: outputs of the model.
    """
    targets = F.one_hot(label, classes).to(torch.float32) if label.ndim == 1 else label
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
