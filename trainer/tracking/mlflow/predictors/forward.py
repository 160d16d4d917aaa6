"""Any recipe's model as an MLflow model: arrays in, the output of ``forward`` out. Run by MLflow, never imported here.

Beside it are the exported weights, ``serving.json``, and the source of the recipe, which builds the model again.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel
from safetensors.torch import load_model


class Forward(PythonModel):
    """Calls the model in evaluation mode, in fp32."""

    def load_context(self, context: Any) -> None:
        """Build the recipe's model and load its best weights."""
        facts = json.loads(Path(context.artifacts["serving"], "serving.json").read_text(encoding="utf-8"))
        of = facts["recipe"]
        recipe = getattr(import_module(of["module"]), of["class"])(**of["options"])
        self.model = recipe.build_model(SimpleNamespace(**of["datasets"])).eval()
        load_model(self.model, Path(context.artifacts["best"], "model.safetensors"), device="cpu")
        self.model.float()
        self.inputs = facts["inputs"]

    @torch.no_grad()
    def predict(self, context: Any, model_input: np.ndarray, params: dict[str, Any] | None = None) -> Any:
        """Return the output: an array, or arrays by name.

        The input is an array where ``forward`` takes one, else arrays by the names of its parameters.
        """
        given = model_input if isinstance(model_input, dict) else {self.inputs[0]: model_input}
        output = self.model(**{name: torch.from_numpy(np.array(given[name])) for name in self.inputs})
        if isinstance(output, torch.Tensor):
            return output.numpy()
        return {name: value.numpy() for name, value in output.items() if isinstance(value, torch.Tensor)}


set_model(Forward())
