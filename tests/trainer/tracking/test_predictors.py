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
        from trainer.tracking.mlflow.predictors.image_classifier import ImageClassifier

        made = ImageClassifier()
    made.config = {"image_size": 56, "evaluated_part": 0.875, "classes": ["white", "else"]}
    made.config |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    made.model = lambda images: torch.stack([images.flatten(1).amin(1), torch.full((len(images),), 0.9)], 1)
    return made


def test_an_image_is_cut_as_evaluation_cut_it(classifier: Any) -> None:
    # White is what evaluation takes of 64 × 128: the middle square of 7/8 of the shorter side.
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[4:60, 36:92] = 255
    assert classifier.predict(None, pixels[None])["label"].tolist() == ["white"]
    pixels[4] = 0
    assert classifier.predict(None, pixels[None])["label"].tolist() == ["else"]


def test_an_image_of_the_models_size_is_taken_whole(classifier: Any) -> None:
    pixels = np.full((56, 56, 3), 255, np.uint8)
    assert classifier.predict(None, pixels[None])["label"].tolist() == ["white"]
    pixels[0, 0] = 0
    assert classifier.predict(None, pixels[None])["label"].tolist() == ["else"]
