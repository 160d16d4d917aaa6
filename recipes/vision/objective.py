"""The training loss of image classification, and the weights of its classes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.data.images import mixing
from recipes.data.images.source import ImageDatasets
from trainer.data.contract import Batch
from trainer.errors import UserError

CRITERIA = ("auto", "cross_entropy", "bce")
BALANCED = "balanced"


def cross_entropy(logits: Tensor, batch: Batch, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """Return the cross-entropy, summed over the images of a batch; mixed images have mixed targets.

    Args:
        logits: fp32, B × classes.
        batch: ``label`` and what ``mixing.draw`` returned, on the device of the logits.
        smoothing: share of the target that all classes get in equal parts.
        weights: factors of the classes' terms, fp32, one for each class.
    """
    mixed = mixing.SHARE in batch
    target = mixing.soft_targets(batch["label"], batch, logits.shape[1]) if mixed else batch["label"]
    return F.cross_entropy(logits, target, weights, reduction="sum", label_smoothing=smoothing)


def binary_cross_entropy(
    logits: Tensor,
    batch: Batch,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    """Return the binary cross-entropy of every class, averaged over the classes and summed over the images.

    As timm's BinaryCrossEntropy: each class is a question of its own, so a mixed image may be of two classes
    (Wightman et al. 2021).

    Args:
        logits: fp32, B × classes.
        batch: ``label`` and what ``mixing.draw`` returned, on the device of the logits.
        smoothing: share of the target that all classes get in equal parts.
        weights: factors of the classes' terms, fp32, one for each class.
        threshold: targets above it count as 1, all others as 0; None: they keep their shares.
    """
    classes = logits.shape[1]
    targets = mixing.soft_targets(batch["label"], batch, classes) * (1 - smoothing) + smoothing / classes
    if threshold is not None:
        targets = (targets > threshold).to(targets.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum") / classes


def check_class_weights(weights: Any) -> None:
    """Refuse what is neither ``balanced`` nor a list of numbers."""
    if weights is None or weights == BALANCED:
        return
    numbers = isinstance(weights, list) and all(isinstance(weight, (int, float)) for weight in weights)
    if not numbers or not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise UserError(
            f"recipe.class_weights={weights} must be balanced, or a list of one number of at least 0 for each class, "
            "such as '[1,2.5]'"
        )


def class_weights(weights: Any, datasets: ImageDatasets) -> Tensor | None:
    """Return the factors of the classes, fp32; None: all are 1.

    ``balanced`` is images / (classes × images of the class), as in scikit-learn: their mean over the training images
    is 1. Classes without images have 1.

    Raises:
        UserError: not one number for each class; ``balanced`` for data that does not say its labels.
    """
    if weights is None:
        return None
    if weights != BALANCED:
        if len(weights) != len(datasets.classes):
            raise UserError(
                f"recipe.class_weights has {len(weights)} numbers, but there are {len(datasets.classes)} classes"
            )
        return torch.tensor(weights, dtype=torch.float32, device="cpu")
    labels = getattr(datasets.train, "labels", None)
    if not isinstance(labels, Tensor):
        raise UserError("recipe.class_weights=balanced needs labels before training; set a list, such as [1,2.5]")
    if labels.ndim > 1:
        raise UserError(
            "recipe.class_weights=balanced is for one label to an image; set a list, one number for each class"
        )
    counts = torch.bincount(labels, minlength=len(datasets.classes)).to(torch.float64)
    present = counts > 0
    factors = counts.sum() / (present.sum() * counts.clamp(min=1))
    return torch.where(present, factors, 1.0).to(torch.float32)
