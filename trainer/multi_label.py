"""Metrics of samples with any number of labels. To import torchmetrics takes seconds: import this where needed."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score


class MeanAveragePrecision(MultilabelAveragePrecision):
    """Mean average precision (mAP) over the labels that occur; torchmetrics' own mean counts the others as 0."""

    def __init__(self, labels: int) -> None:
        super().__init__(labels, average="none")

    def compute(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No positive samples")
            values = super().compute()
        return values[torch.cat(self.target).any(0)].mean()


class MeanF1(MultilabelF1Score):
    """Mean F1 over the labels that occur or are given, which is at a probability above 0.5."""

    def __init__(self, labels: int) -> None:
        super().__init__(labels, average="none")

    def compute(self) -> Tensor:
        return super().compute()[self.tp + self.fp + self.fn > 0].mean()
