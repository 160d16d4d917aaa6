"""A classifier of torchvision or timm as an MLflow model: images in, classes out. Run by MLflow only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torchvision
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel
from safetensors.torch import load_file
from torchvision.transforms.v2 import functional as images


class ImageClassifier(PythonModel):
    """Scales to what evaluation took, takes the middle, normalises, classifies; an image of the model's size stays."""

    def load_context(self, context: Any) -> None:
        """Build the architecture that config.json names, and load its best weights."""
        best = Path(context.artifacts["best"])
        self.config = json.loads((best / "config.json").read_text(encoding="utf-8"))
        self.model = _build(self.config["arch"], self.config["arch_options"]).eval()
        self.model.load_state_dict(load_file(best / "model.safetensors"))
        self.model.float()

    @torch.no_grad()
    def predict(self, context: Any, model_input: np.ndarray, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return a table with the ``label`` and its ``probability`` for each image: RGB, N × H × W × 3, uint8."""
        size = self.config["image_size"]
        pixels = torch.from_numpy(np.array(model_input)).permute(0, 3, 1, 2)
        if pixels.shape[2:] != (size, size):
            shorter_side = round(size / self.config["evaluated_part"])  # so that the middle is what was evaluated
            pixels = images.center_crop(images.resize(pixels, [shorter_side], antialias=True), [size, size])
        mean, std = (torch.tensor(self.config[name]).view(3, 1, 1) for name in ("mean", "std"))
        probability, best = self.model((pixels.float() / 255 - mean) / std).softmax(1).max(1)
        names = self.config["classes"]  # the head may have more outputs than the data has classes
        labels = [names[index] if index < len(names) else str(index) for index in best.tolist()]
        return pd.DataFrame({"label": labels, "probability": probability.double().numpy()})


def _build(arch: str, options: dict[str, Any]) -> torch.nn.Module:
    model: torch.nn.Module
    if arch.startswith("timm/"):
        import timm

        model = timm.create_model(arch.removeprefix("timm/"), **options)
    else:
        model = torchvision.models.get_model(arch, **options)
    return model


set_model(ImageClassifier())
