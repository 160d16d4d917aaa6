"""A served model in MLflow processes its input as evaluation did."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def classifier() -> Any:
    with warnings.catch_warnings():  # MLflow's own, when it is imported
        warnings.simplefilter("ignore")
        from trainer.tracking.predictor import ImageClassifier

    made = object.__new__(ImageClassifier)
    made.config = {"image_size": 56, "evaluated_part": 0.875, "classes": ["white", "else"]}
    made.config |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    made.model = lambda images: torch.stack([images.flatten(1).amin(1), torch.full((len(images),), 0.9)], 1)
    return made


@pytest.mark.parametrize(
    ("shape", "white", "then_black"),
    [
        # White is what evaluation takes of 64 × 128: the middle square of 7/8 of the shorter side.
        ((64, 128), np.s_[4:60, 36:92], np.s_[4]),
        ((56, 56), np.s_[:], np.s_[0, 0]),  # an image of the model's size is taken whole
    ],
)
def test_an_image_is_cut_as_evaluation_cut_it(
    classifier: Any, shape: tuple[int, int], white: Any, then_black: Any
) -> None:
    pixels = np.zeros((*shape, 3), np.uint8)
    pixels[white] = 255
    assert classifier(pixels[None])["label"].tolist() == ["white"]
    pixels[then_black] = 0
    assert classifier(pixels[None])["label"].tolist() == ["else"]
