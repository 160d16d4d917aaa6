"""``init_from`` of image classifiers: published weights by name, a file, or the exported folder of a run."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.data.images.pixels import IMAGENET_MEAN, IMAGENET_STD
from recipes.data.images.source import ImageDatasets
from recipes.vision import architectures
from trainer.checkpoint.weights import SUFFIXES, read_weights
from trainer.errors import UserError, first_line, nearest
from trainer.files import read_config, read_object

DEFAULT = "DEFAULT"
"""The weights that the library recommends."""
_FILE = "give a file or the best/ of a run: init_from=weights.pth"


@dataclass(frozen=True)
class Weights:
    """Weights to start from, in memory."""

    state: dict[str, Tensor]
    """Tensors by the names of the model, on the CPU."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of the images they were trained on, as in ``ImageDatasets``."""
    classes: list[str] | None
    """The names of the head's outputs, where they are known."""
    note: str
    """Which tensors of a file they are, in words."""


def exported_config(pretrained: str) -> dict[str, Any]:
    """Return the ``config.json`` of an exported folder, also where its weights file is given; empty for all else.

    Raises:
        UserError: it is there, and cannot be read.
    """
    path = Path(pretrained).expanduser()
    config = read_config((path.parent if path.name == "model.safetensors" else path) / "config.json")
    return config if {"arch", "arch_options", "classes", "image_size", "mean", "std"} <= config.keys() else {}


def check(arch: str, pretrained: str) -> None:
    """Refuse weights that do not exist, as far as that can be known without a download.

    Raises:
        UserError: no such file, no such name (with the nearest one), or the folder of another architecture.
    """
    path = Path(pretrained).expanduser()
    if path.exists():
        other = exported_config(pretrained).get("arch", arch)
        if other != arch:
            raise UserError(f"recipe.arch={arch}: init_from={pretrained} is a {other}", f"recipe.arch={other}")
    elif "/" in pretrained or path.suffix in SUFFIXES:
        raise UserError(f"init_from={pretrained}: there is no such file or folder; {_FILE}")
    elif arch.startswith(architectures.TIMM):
        _check_timm(arch, pretrained)
    else:
        import torchvision

        names = list(torchvision.models.get_model_weights(arch).__members__)
        if pretrained not in names:
            raise UserError(
                f"init_from={pretrained} is not among torchvision's weights of {arch}"
                f"{nearest(pretrained, names)} ({', '.join(names) or 'it has none'}); or {_FILE}"
            )


def open_weights(arch: str, pretrained: str, image_size: int) -> Weights:
    """Load the weights; those with a name are downloaded, once for this machine.

    Raises:
        UserError: the download failed, or the file cannot be read.
    """
    path, about = Path(pretrained).expanduser(), dict[str, Any]()
    names, note, name = architectures.shapes(arch, image_size, 2), "", DEFAULT
    if path.exists():
        if path.is_dir() or path.name == "model.safetensors":
            config = read_config((path if path.is_dir() else path.parent) / "config.json")
        else:  # what is beside a file need not be of it
            config = read_object(path.parent / "config.json")
        state, note = read_weights(path, names, f"init_from={pretrained}")
        about = config.get("pretrained_cfg", config)  # timm's on the hub, or the export of a run
    else:
        published, name = _published(arch, pretrained, image_size), pretrained
        state = {key: value for key, value in published.items() if key in names}  # without heads for training only
    state, resized = resampled(state, arch, image_size)
    note = ", ".join(filter(None, [note, resized]))
    if {"mean", "std"} <= about.keys():
        return Weights(state, tuple(about["mean"]), tuple(about["std"]), about.get("classes"), note)
    return Weights(state, *_normalisation(arch, name), None, note)


def resampled(state: dict[str, Tensor], arch: str, image_size: int) -> tuple[dict[str, Tensor], str]:
    """Return weights of one of torchvision's vision transformers for images of this size, and what was done, in words.

    Its position embeddings are interpolated where they are of another size. Other weights are returned as they are.
    """
    positions, patches = (state.get(name) for name in ("encoder.pos_embedding", "conv_proj.weight"))
    if not arch.startswith("vit_") or positions is None or patches is None or positions.dim() != 3:
        return state, ""
    from torchvision.models.vision_transformer import interpolate_embeddings

    patch, side = patches.shape[-1], math.isqrt(positions.shape[1] - 1)
    if side == image_size // patch or side**2 != positions.shape[1] - 1:
        return state, ""
    new: dict[str, Tensor] = interpolate_embeddings(
        image_size, patch, OrderedDict(state | {"encoder.pos_embedding": positions.float()})
    )
    return new, f"position embeddings of {side * patch} pixels interpolated to {image_size}"


def new_head(state: dict[str, Tensor], classes: list[str] | None, arch: str, datasets: ImageDatasets) -> list[str]:
    """Return the names of the head's weights where weights of ``classes`` (None: not known) need a new head."""
    count = len(datasets.classes)
    shapes = architectures.shapes(arch, datasets.image_size, count)
    other = architectures.shapes(arch, datasets.image_size, count + 1)
    head = [name for name, shape in shapes.items() if shape != other[name]]
    fits = all(name in state and state[name].shape == shapes[name] for name in head)
    return [] if fits and classes in (None, datasets.classes) else head


def _published(arch: str, name: str, image_size: int) -> dict[str, Tensor]:
    """Build the published model, so that its library converts what has to be; and return its weights."""
    model: nn.Module
    try:
        # With its own classes; what is random about building it must not change the run.
        with torch.random.fork_rng(devices=[]):
            if arch.startswith(architectures.TIMM):
                import timm

                options = architectures.options(arch, image_size, 0)
                options.pop("num_classes")
                model = timm.create_model(arch.removeprefix(architectures.TIMM), pretrained=True, **options)
            else:
                import torchvision

                weights = torchvision.models.get_model_weights(arch)[name]
                model = torchvision.models.get_model(arch, weights=weights, progress=False)
    except Exception as error:  # of urllib, requests, httpx, the hub, or torch for a damaged file
        cache = "HF_HOME" if arch.startswith(architectures.TIMM) else "TORCH_HOME"
        raise UserError(
            f"init_from={name}: the weights of {arch} could not be downloaded or opened "
            f"({first_line(error.__cause__ or error)}); remove a damaged copy from its cache (see {cache}), or {_FILE}"
        ) from error
    return model.state_dict()


def _normalisation(arch: str, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the images that published weights of this architecture were trained on."""
    if arch.startswith(architectures.TIMM):
        import timm

        config = timm.get_pretrained_cfg(arch.removeprefix(architectures.TIMM))
        return (tuple(config.mean), tuple(config.std)) if config else (IMAGENET_MEAN, IMAGENET_STD)
    import torchvision

    if arch in ("googlenet", "inception_v3"):  # torchvision converts to this inside of the model (transform_input)
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    published = torchvision.models.get_model_weights(arch).__members__.get(name)
    if published is None:
        return IMAGENET_MEAN, IMAGENET_STD
    transform = published.transforms()
    return tuple(transform.mean), tuple(transform.std)


def _check_timm(arch: str, name: str) -> None:
    import timm

    model = arch.removeprefix(architectures.TIMM)
    if name != DEFAULT:
        tags = timm.list_models(f"{model.partition('.')[0]}.*", pretrained=True)
        choices = f" (by recipe.arch: {', '.join(f'timm/{tag}' for tag in tags)})" if tags else ""
        raise UserError(f"init_from={name} must be DEFAULT for an architecture of timm{choices}; or {_FILE}")
    if not timm.models.is_model_pretrained(model):
        raise UserError(f"init_from=DEFAULT: timm has no weights of {model}; {_FILE}")
