"""Images per second of loading alone: this project's, torchvision's own loop, and timm's where it is installed.

Each is measured in one process with one thread, as in a loading process: that is the rate of a core. Loading processes
are not compared side by side, because one that waits for its turn fills its queue meanwhile.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.jobs import endless
from benchmarks.rows import Bench, Row, ratios
from trainer.config.compose import compose
from trainer.data.loader import Batching, DataOrder
from trainer.hardware import Hardware, threads

HEIGHT, WIDTH = 375, 500
"""Of the images, in pixels: ImageNet's most frequent size."""
SIZE, BATCH = 224, 32
POLICIES = ("imagenet", "randaugment")
Loop = Callable[[int], None]
"""Loads a number of batches."""


def loader(bench: Bench, images: int = 128, batches: int = 4) -> Iterator[Row]:
    """Measure decoding, cropping and augmenting JPEGs, each loop in turn.

    Args:
        bench: only the CPU of its hardware is used; its folder is where the JPEGs are written.
        images: how many there are.
        batches: of ``BATCH`` images that a loop loads in a repeat.
    """
    folder = bench.folder
    write_jpegs(folder / "train", images)
    write_jpegs(folder / "val", 4)
    for policy in POLICIES:
        torchvision = _loop(endless(torchvision_loader(folder / "train", policy)))
        loops = {"Mantissa": ours(folder, policy), "torchvision": torchvision}
        if policy == "imagenet" and importlib.util.find_spec("timm") is not None:
            loops["timm"] = _loop(endless(timm_loader(folder / "train")))
        with threads(1):
            times = bench.times(loops, batches)
        how = f"augment={policy}, JPEGs of {WIDTH} × {HEIGHT} to {SIZE} × {SIZE}, batches of {BATCH}, one thread"
        rates = [batches * BATCH / seconds for seconds in times["Mantissa"]]
        yield Row(f"loading alone, {policy}, Mantissa", "images/s", rates, how)
        for name in list(loops)[1:]:
            yield Row(f"loading, {policy}, Mantissa / {name}", "x", ratios(times, name, "Mantissa"), how)


def write_jpegs(folder: Path, count: int) -> None:
    """Write images of two classes: blurred noise with some grain, about 60 KB each, as photos have."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (HEIGHT // 25, WIDTH // 25, 3), np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        grain = random.integers(-12, 13, smooth.shape, np.int16)
        file = folder / f"class{number % 2}" / f"{number:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, quality=90)


def ours(folder: Path, policy: str) -> Loop:
    """Return the loop of this project's loader: uint8, normalised on the device by the recipe."""
    config = compose(
        [
            *("recipe=resnet", f"recipe.image_size={SIZE}", "data=imagefolder", f"data.path={folder}"),
            *(f"augment={policy}", "loader=plain", "loader.workers=0", "device=cpu", f"batch_size={BATCH}"),
        ]
    )
    hardware = Hardware(torch.device("cpu"), "CPU", 0, 1)
    config = config.resolve(hardware).config
    data = config.open_datasets().train
    order, batching = DataOrder(len(data), 0), Batching(BATCH, BATCH)
    return _loop(config.loader.steps(data, order, batching, 0, 10**9, hardware))


def torchvision_loader(folder: Path, policy: str) -> DataLoader[Any]:
    """Return torchvision's ImageFolder and torch's DataLoader, with the transforms of torchvision's references."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import InterpolationMode, v2

    bilinear = InterpolationMode.BILINEAR
    steps: list[Any] = [v2.RandomResizedCrop(SIZE, interpolation=bilinear, antialias=True), v2.RandomHorizontalFlip()]
    if policy == "randaugment":
        steps.append(v2.RandAugment(interpolation=bilinear))
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    steps.append(v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return DataLoader(ImageFolder(str(folder), v2.Compose(steps)), BATCH, shuffle=True, drop_last=True)


def timm_loader(folder: Path) -> Any:
    """Return timm's loader with random crops and flips, normalised in the process that loads."""
    from timm.data import create_dataset, create_loader

    return create_loader(
        create_dataset("", str(folder)),
        (3, SIZE, SIZE),
        BATCH,
        is_training=True,
        use_prefetcher=False,
        num_workers=0,
        persistent_workers=False,
        color_jitter=None,
        interpolation="bilinear",
    )


def _loop(batches: Iterator[Any]) -> Loop:
    def load(count: int) -> None:
        for _ in range(count):
            next(batches)

    return load
