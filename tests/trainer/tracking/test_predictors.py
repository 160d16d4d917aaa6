"""A served model in MLflow processes its input as evaluation did."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file


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


def test_a_model_whose_recipe_an_earlier_version_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe held what the data decides, and its source is stored with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trainer.tracking.mlflow.predictors.forward import Forward
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "earlier_recipe.py").write_text(
        "import torch\n\nclass Linear:\n    def __init__(self, bias):\n        self.bias = bias\n\n"
        "    def build_model(self):\n        return torch.nn.Linear(self.features, 2, self.bias)\n"
    )
    of = {"module": "earlier_recipe", "class": "Linear", "options": {"bias": False}, "state": {"features": 3}}
    facts = {"recipe": of, "positional": ["input"], "named": []}
    (tmp_path / "serving.json").write_text(json.dumps(facts))
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    monkeypatch.syspath_prepend(tmp_path / "code")
    model = Forward()
    model.load_context(SimpleNamespace(artifacts={"serving": str(tmp_path), "best": str(tmp_path)}))
    assert model.predict(None, np.ones((1, 3), np.float32)).tolist() == [[3, 3]]
