"""The command of scripts/predict.py: the classes of photos."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inference.evaluate import SURE
from inference.load import Exported
from inference.options import PredictOptions
from inference.run_config import RunConfig, configure
from recipes.data.images.augment import ImageNet
from recipes.data.images.folder import EXTENSIONS, FolderImages, find_images, numbers
from recipes.data.images.source import ImageDatasets
from trainer.config.options import parse
from trainer.data.evaluation import evaluation_samples
from trainer.data.loader import to_device
from trainer.errors import UserError, no_effect
from trainer.parallel.world import World
from trainer.recipe import Context
from trainer.terminal import on_error_stream

if TYPE_CHECKING:
    from PIL import Image

_WORKERS_FROM = 256
"""Photos. Starting processes takes longer than decoding fewer of them."""


class Photos(FolderImages):
    """Image files without labels, cut and scaled as in the evaluation of the model.

    Args:
        files: that Pillow can decode, of any size.
        config: ``config.json`` of an exported classifier.
    """

    def __init__(self, files: Sequence[Path], config: dict[str, Any]) -> None:
        shape = [len(files), len(config["classes"])] if config.get("multi_label") else [len(files)]
        super().__init__([str(file) for file in files], torch.zeros(shape, dtype=torch.int64))
        self.image_size, self.augment = config["image_size"], ImageNet(eval_crop=config["evaluated_part"])

    def decoded(self, index: int) -> tuple[Image.Image, int]:
        """Decode one image; one that cannot be decoded is black, and among ``unreadable``."""
        from PIL import Image

        try:
            return self.image(index), index
        except UserError:
            self.unreadable[index] = True
            return Image.new("RGB", (self.image_size, self.image_size)), index


@on_error_stream()
def predict(arguments: list[str]) -> int:
    """Print the most probable classes of each photo, and write them as CSV; 1: some cannot be read.

    Where a photo may have several labels, print those above ``SURE``, and write the probability of each.
    """
    options, overrides = parse(arguments, PredictOptions, "overrides")
    exported = options.find()
    if "classes" not in exported.config:
        texts = f' or transformers\' pipeline("text-classification", "{exported.folder}")'
        raise UserError(
            f"run={exported.given} is a {exported.recipe}, which does not classify images; give a run of "
            f"recipe=resnet, or use scripts/evaluate.py{texts * (exported.recipe == 'text_classifier')}"
        )
    path, others = Path(options.path).expanduser(), Counter[str]()
    files = [path] if path.is_file() else [Path(file) for file in find_images(str(path), others)]
    passed = f"; passed over: {numbers(others)}" if others.total() else ""
    if not files:
        raise UserError(f"path={path}: no images in this folder (looked for {', '.join(EXTENSIONS)}{passed})")
    run = configure(exported, overrides, with_data=False)
    names: list[str] = exported.config["classes"]
    several = exported.config.get("multi_label", False)
    if several and any(argument.startswith("top=") for argument in arguments):
        raise no_effect(f"top={options.top}", "a photo may have several labels")
    top = len(names) if several else min(options.top, len(names))
    target = Path(options.output).expanduser() if options.output else exported.results / "predictions.csv"
    width, classified = max(len(str(file)) for file in files), 0
    ranks = [f"{what}_{place}" for place in range(1, top + 1) for what in ("class", "probability")]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w", newline="", encoding="utf-8") as table:
            rows = csv.writer(table)
            rows.writerow(["path", *(names if several else ranks)])
            for file, best in zip(files, _predictions(exported, run, files, options.batch_size, top), strict=True):
                if not best:
                    print(f"{file} cannot be read as an image; it is left out", file=sys.stderr)
                    continue
                classified += 1
                ranked = [part for index, share in best for part in (names[index], share)]
                rows.writerow([file, *([share for _, share in sorted(best)] if several else ranked)])
                given = [f"{names[index]} {share:.3f}" for index, share in best if not several or share > SURE]
                print(f"{file!s:<{width}}  {'  '.join(given) or f'no label above {SURE}'}")
    except OSError as error:
        raise UserError(f"output={target} cannot be written ({error.strerror}); choose another file") from error
    if not classified:
        raise UserError(f"path={path}: no photo can be read; give images such as .jpg or .png files")
    print(f"\n{classified} photo{'s' * (classified != 1)}, written to {target}{passed}")
    return 0 if classified == len(files) else 1


@torch.inference_mode()
def _predictions(
    exported: Exported, run: RunConfig, files: list[Path], batch_size: int, top: int
) -> Iterator[list[tuple[int, float]]]:
    """Yield the ``top`` most probable outputs for each file, and their probabilities; none if it cannot be decoded."""
    config, photos = exported.config, Photos(files, exported.config)
    datasets = ImageDatasets(
        photos,
        photos,
        "photos",
        decodes=len(files) >= _WORKERS_FROM,
        classes=config["classes"],
        image_size=config["image_size"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )
    recipe, device = run.config.recipe, run.hardware.device
    loader, _ = run.config.loader.resolve(Context(run.hardware, World(), run.config.data, datasets=datasets))
    model = run.in_precision(exported.model(recipe, datasets, run.config.precision.loaded_dtype))
    batches = evaluation_samples(len(files), None, batch_size)
    for samples, batch in zip(batches, loader.batches(photos, batches, run.hardware), strict=True):
        with run.config.precision.autocast(device):
            best = recipe.loss(model, to_device(batch, device)).predictions.topk(top)
        for sample, indices, values in zip(samples, best.indices.tolist(), best.values.tolist(), strict=True):
            yield [] if photos.unreadable[sample.index] else list(zip(indices, values, strict=True))
