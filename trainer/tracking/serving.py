"""What makes exported weights a servable model: the folder ``serving``, written when a run ends, without MLflow.

``serving.json`` says which class of ``predictor.py`` answers, what it needs, and an example; for recipes that no
library knows the source is there, too. ``models.py`` makes an MLflow model of it and ``best/``.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import shutil
import sys
from dataclasses import fields
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mantissa.display import dtype_name
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.files import roots, write_json
from trainer.recipe import Recipe
from trainer.tracking.models import SERVING

EXAMPLE_ROWS = 2
_PACKAGES = {
    "text_generation": ("torch", "transformers"),
    "question_answering": ("torch", "transformers", "pandas"),
    "text_to_text": ("torch", "transformers", "pandas"),
    "image_classifier": ("torch", "torchvision", "safetensors", "pandas", "numpy"),
    "forward": ("filelock", "numpy", "safetensors", "torch"),
}


def write_serving(
    folder: Path, recipe: Recipe, model: nn.Module, device: torch.device, datasets: Datasets, step: int
) -> None:
    """Write the folder ``serving``, which is not there.

    Args:
        folder: the run's.
        recipe: with its options resolved.
        model: the exported one, in evaluation mode.
        device: where it runs; call this under autocast.
        datasets: of the validation samples the example is made.
        step: the optimizer step of the weights.
    """
    target = folder / SERVING
    target.mkdir()
    packages = (*_PACKAGES[recipe.predictor], *recipe.extra_requirements())
    # Without what follows a plus: builds for one device are in no index.
    versions = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in packages]
    facts: dict[str, Any] = {"step": step, "predictor": recipe.predictor, "requirements": versions}
    if recipe.predictor == "forward":
        samples = [SampleId(index, None) for index in range(min(EXAMPLE_ROWS, len(datasets.valid)))]
        batch = {name: tensor.to(device) for name, tensor in datasets.valid.batch(samples).items()}
        facts |= _forward_facts(target, recipe, datasets, model.to(device), batch)
        for file in source_files(str(sys.modules[type(recipe).__module__].__file__)):
            root = next(root for root in roots if file.is_relative_to(root))
            copy = target / "code" / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    else:
        example = recipe.example(datasets)
        if isinstance(example, np.ndarray):
            save_file({"input": torch.from_numpy(example)}, target / "example.safetensors")
        else:
            facts["example"] = example
    write_json(target / "serving.json", facts)


def source_files(module: str) -> list[Path]:
    """Return the files of this project, and of recipes elsewhere, that a module's file imports, directly or not, in
    functions too, and itself.
    """
    finder = ModuleFinder([*map(str, roots)])
    finder.run_script(module)
    return [Path(file) for found in finder.modules.values() if (file := getattr(found, "__file__", None))]


def _forward_facts(target: Path, recipe: Recipe, datasets: Datasets, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Record the model's inputs and outputs for validation samples: the example and the signature."""
    given, output = _watch(recipe, model, batch)
    tensors = {name: _plain(value) for name, value in given.items() if isinstance(value, Tensor)}
    save_file(tensors, target / "example.safetensors")
    outputs = {"": output} if isinstance(output, Tensor) else dict(output)
    return {
        "inputs": list(tensors),
        "outputs": {
            name: {"dtype": dtype_name(_plain(value).dtype), "shape": list(value.shape)}
            for name, value in outputs.items()
            if isinstance(value, Tensor)
        },
        "recipe": {
            "module": type(recipe).__module__,
            "class": type(recipe).__name__,
            "options": {entry.name: getattr(recipe, entry.name) for entry in fields(recipe)},
            "datasets": {key: value for key, value in vars(datasets).items() if _is_json(value)},
        },
    }


def _watch(recipe: Recipe, model: nn.Module, batch: Batch) -> tuple[dict[str, Any], Any]:
    """Return the arguments and the output of the model's first forward pass in ``recipe.loss``."""
    seen: list[tuple[dict[str, Any], Any]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments), output))

    with model.register_forward_hook(record, with_kwargs=True):
        recipe.loss(model, batch)
    return seen[0]


def _plain(tensor: Tensor) -> Tensor:
    """Return it on the host, in a dtype of numpy that fp32 weights accept."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.float() if tensor.is_floating_point() else tensor


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
