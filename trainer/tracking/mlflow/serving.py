"""The files that make exported weights a servable model, written beside ``best/`` when a run ends, without MLflow.

``serving/`` holds ``serving.json`` (which file of ``predictors/`` answers, what it needs, an example) and for recipes
that no library knows, the source that builds the model. ``models.py`` makes an MLflow model of both folders.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mantissa.display import dtype_name
from trainer.data.contract import Batch, Datasets, SampleId
from trainer.files import PROJECT, write_json
from trainer.recipe import Recipe
from trainer.tracking.mlflow.models import SERVING

EXAMPLE_ROWS = 2
_PACKAGES = {
    "text_generation": ("torch", "transformers"),
    "question_answering": ("torch", "transformers", "pandas"),
    "text_to_text": ("torch", "transformers", "pandas"),
    "image_classifier": ("torch", "torchvision", "safetensors", "pandas", "numpy"),
}


def remove_serving(folder: Path) -> None:
    """Remove the folder ``serving`` before ``best/`` changes: after a kill in between, the two would not match."""
    shutil.rmtree(folder / SERVING, ignore_errors=True)


def write_serving(
    folder: Path, recipe: Recipe, model: nn.Module, device: torch.device, datasets: Datasets, step: int
) -> None:
    """Write the folder ``serving``.

    Args:
        folder: the run's.
        recipe: with its options resolved.
        model: the exported one, in evaluation mode.
        device: where it runs; call this under autocast.
        datasets: of the validation samples the example is made.
        step: the optimizer step of the weights.
    """
    remove_serving(folder)
    target = folder / SERVING
    target.mkdir()
    facts: dict[str, Any] = {"step": step, "predictor": recipe.predictor}
    if recipe.predictor == "forward":
        samples = [SampleId(index, None) for index in range(min(EXAMPLE_ROWS, len(datasets.valid)))]
        batch = {name: tensor.to(device) for name, tensor in datasets.valid.batch(samples).items()}
        facts |= _forward_facts(target, recipe, datasets, model.to(device), batch)
    else:
        example = recipe.example(datasets)
        if isinstance(example, np.ndarray):
            save_file({"input": torch.from_numpy(example)}, target / "example.safetensors")
        else:
            facts["example"] = example
        facts["requirements"] = _requirements([*_PACKAGES[recipe.predictor], *recipe.packages()])
    write_json(target / "serving.json", facts)


def _requirements(packages: tuple[str, ...] | list[str]) -> list[str]:
    # Without what follows a plus: builds for one device are in no index.
    return [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in packages]


def _forward_facts(target: Path, recipe: Recipe, datasets: Datasets, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Record the model's inputs and outputs for validation samples: the example and the signature."""
    given, output = _watch(recipe, model, batch)
    tensors = {name: _plain(value) for name, value in given.items() if isinstance(value, Tensor)}
    save_file(tensors, target / "example.safetensors")
    outputs = {"": output} if isinstance(output, Tensor) else dict(output)
    module = sys.modules[type(recipe).__module__]
    packages = _copy_source(target / "code", Path(str(module.__file__)))
    return {
        "inputs": list(tensors),
        "outputs": {
            name: {"dtype": dtype_name(_plain(value).dtype), "shape": list(value.shape)}
            for name, value in outputs.items()
            if isinstance(value, Tensor)
        },
        "recipe": {
            "module": module.__name__,
            "class": type(recipe).__name__,
            "options": {entry.name: getattr(recipe, entry.name) for entry in fields(recipe)},
            "datasets": {key: value for key, value in vars(datasets).items() if _is_json(value)},
        },
        "requirements": _requirements(packages),
    }


def _watch(recipe: Recipe, model: nn.Module, batch: Batch) -> tuple[dict[str, Any], Any]:
    """Return the arguments and the output of the model's first forward pass in ``recipe.loss``."""
    seen: list[tuple[dict[str, Any], Any]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments), output))

    hook = model.register_forward_hook(record, with_kwargs=True)
    try:
        recipe.loss(model, batch)
    finally:
        hook.remove()
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


def _copy_source(target: Path, file: Path) -> list[str]:
    """Copy a module and all modules of this project that it imports, in functions too; return the packages it needs."""
    waiting, done, packages = [file], set[Path](), set[str]()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        place = target / path.relative_to(PROJECT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
        everywhere, at_once = _imported(path)
        packages |= {name.partition(".")[0] for name in (everywhere if path == file else at_once)}
        for name in everywhere:
            base = PROJECT.joinpath(*name.split("."))
            found = [one for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()]
            waiting += found + [init for init in [base.parent / "__init__.py"] if found and init.is_file()]
    distributions = _distributions()
    return sorted({distributions[name][0] for name in packages if name in distributions} | {"safetensors"})


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions that an import's first name may come from, which takes a third of a second to read."""
    return importlib.metadata.packages_distributions()


def _imported(path: Path) -> tuple[list[str], list[str]]:
    """Return the modules that a file imports anywhere, and those that it imports at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return _names(ast.walk(tree)), _names(tree.body)


def _names(nodes: Iterable[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
