"""Image classifiers by name: torchvision's, and with the prefix ``timm/`` those of timm (PyTorch Image Models)."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError, nearest

TIMM = "timm/"
"""The prefix of an architecture of timm; what follows is its name there, perhaps with the tag of its weights."""
_BLOCKS = {
    *("BasicBlock", "Bottleneck", "ResBottleneckBlock", "_DenseBlock"),  # ResNet and variants, RegNet, DenseNet
    *("EncoderBlock", "SwinTransformerBlock", "SwinTransformerBlockV2", "MaxVitLayer", "CNBlock"),
    *("MBConv", "FusedMBConv", "InvertedResidual", "_InvertedResidual", "Fire"),
    *("Inception", "InceptionA", "InceptionB", "InceptionC", "InceptionD", "InceptionE"),
}
_TIMM_BLOCKS = re.compile(r"Block|Bottle\w*neck|Residual|Basic$|Separable(Conv)?$|Inception|XceptionModule")
"""A part of the class names of timm's building blocks. They are too many to list."""


def check(arch: str) -> None:
    """Refuse an architecture that does not exist, or whose library is not installed.

    Raises:
        UserError: with the nearest name, or the command that installs the library.
    """
    if arch.startswith(TIMM):
        _check_timm(arch.removeprefix(TIMM))
        return
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if arch not in known:
        raise UserError(
            f"recipe.arch={arch} is not a classifier of torchvision.models{nearest(arch, known)} "
            "(recipe.arch=timm/… is one of timm)"
        )


def build(arch: str, image_size: int, classes: int) -> nn.Module:
    """Return the classifier with random weights from torch's global generator, fp32.

    Args:
        arch: has passed ``check``.
        image_size: in pixels, for architectures that are built for one.
        classes: outputs of the head.
    """
    model: nn.Module
    if arch.startswith(TIMM):
        import timm

        model = timm.create_model(arch.removeprefix(TIMM), **options(arch, image_size, classes))
    else:
        import torchvision

        model = torchvision.models.get_model(arch, weights=None, **options(arch, image_size, classes))
    return model


def new_weights(arch: str, image_size: int, classes: int, before: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return random weights that have nothing to do with those of another model of this architecture.

    They follow the seed, as the first weights do, and ``before``, the other model's tensors that some of them replace:
    a model that was built with the same seed drew the same numbers.
    """
    digest = hashlib.sha256(str(torch.initial_seed()).encode())
    for tensor in before:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest.digest()[:7]))
        return build(arch, image_size, classes).state_dict()


def options(arch: str, image_size: int, classes: int) -> dict[str, Any]:
    """Return the arguments of an architecture's constructor."""
    given: dict[str, Any] = {"num_classes": classes}
    if arch.startswith(TIMM):
        import timm

        given["in_chans"] = 3
        config = timm.get_pretrained_cfg(arch.removeprefix(TIMM))
        return given | ({"img_size": image_size} if config is not None and config.fixed_input_size else {})
    if arch in ("googlenet", "inception_v3"):  # their auxiliary heads would need a loss of their own
        return given | {"aux_logits": False, "init_weights": True}
    if arch.startswith("vit_"):
        return given | {"image_size": image_size}
    return given | ({"input_size": [image_size, image_size]} if arch.startswith("maxvit") else {})


def library(arch: str) -> dict[str, Any]:
    """Return the library of an architecture with its version, and the Python line that builds it from config.json."""
    name, built = "torchvision", "torchvision.models.get_model(config['arch'], **config['arch_options'])"
    if arch.startswith(TIMM):
        name, built = "timm", f"timm.create_model(config['arch'].removeprefix('{TIMM}'), **config['arch_options'])"
    load = f"model = {built}; model.load_state_dict(safetensors.torch.load_file('model.safetensors'))"
    return {"library": name, name: importlib.import_module(name).__version__, "load": load}


def shapes(arch: str, image_size: int, classes: int) -> dict[str, torch.Size]:
    """Return the shapes of an architecture's weights and buffers by name."""
    try:
        with torch.device("meta"):
            model = build(arch, image_size, classes)
    except NotImplementedError:  # regnet computes with tensors while it is built
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = build(arch, image_size, classes)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules whose class is one of the libraries' building blocks."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in list(model.modules())[1:]:
        if id(module) not in inside and _is_block(type(module)):
            found.append(module)
            inside |= {id(child) for child in module.modules()}
    return found


def check_size(arch: str, image_size: int, classes: int, train_size: int | None = None) -> None:
    """Refuse images that the architecture cannot take, by trying it on tensors without memory.

    Args:
        arch: has passed ``check``.
        image_size: in pixels, what the model is built for.
        classes: outputs of the head.
        train_size: another size of the images; None: that one.

    Raises:
        UserError: it cannot take them, or is no classifier.
    """
    given = train_size or image_size
    try:
        with torch.device("meta"), torch.no_grad():
            output = build(arch, image_size, classes).eval()(torch.empty(1, 3, given, given))
    except NotImplementedError:
        return  # regnet computes with tensors while it is built; it takes images of any size
    except (RuntimeError, ValueError, AssertionError) as error:
        if train_size is not None:
            mistake = f"recipe.train_image_size={train_size}"
            raise UserError(
                f"recipe.arch={arch}, built for images of {image_size} × {image_size}, cannot train on {mistake}",
                "",
                mistake=mistake,
            ) from error
        raise UserError(
            f"recipe.arch={arch} cannot take images of {image_size} × {image_size}; set recipe.image_size=… to what it "
            "was made for, most often 224"
        ) from error
    if not isinstance(output, torch.Tensor) or output.shape != (1, classes):
        raise UserError(f"recipe.arch={arch} is no classifier: it has no head with a number of classes")


def _is_block(cls: type) -> bool:
    if cls.__module__.startswith("timm."):
        return _TIMM_BLOCKS.search(cls.__name__) is not None
    return cls.__name__ in _BLOCKS


def _check_timm(name: str) -> None:
    if importlib.util.find_spec("timm") is None:
        raise UserError(
            f"recipe.arch=timm/{name} needs timm, which is not installed; pip install 'timm>=1.0.20', or use a "
            "recipe.arch of torchvision"
        )
    import timm

    base, dot, tag = name.partition(".")
    if not timm.is_model(base):
        near = nearest(base, timm.list_models(), TIMM)
        raise UserError(f"recipe.arch=timm/{name} is not a model of timm {timm.__version__}{near}")
    tags = [name.partition(".")[2] for name in timm.list_models(f"{base}.*", pretrained=True)]
    if dot and tag not in tags:
        near = nearest(tag, tags, f"{TIMM}{base}.")
        raise UserError(f"recipe.arch=timm/{name}: timm has no weights of that tag{near} ({', '.join(tags) or 'none'})")
