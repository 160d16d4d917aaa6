"""The command of scripts/predict.py: the classes of photos."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inference.exported import Exported
from inference.options import PredictOptions
from inference.setting import Setting, configure
from recipes.data.images.augment import ImageNet
from recipes.data.images.folder import EXTENSIONS, FolderImages, images_below
from recipes.data.images.source import ImageDatasets
from trainer.config.options import parse
from trainer.data.contract import Batch, SampleId
from trainer.data.evaluation import evaluation_samples
from trainer.data.loader import to_device
from trainer.errors import UserError
from trainer.run.terminal import on_error_stream

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
        super().__init__({"": [str(file) for file in files]}, [""])
        self.image_size, self.augment = config["image_size"], ImageNet(eval_crop=config["evaluated_part"])

    def image(self, index: int) -> Image.Image:
        """Decode one image; one that cannot be decoded is black."""
        from PIL import Image

        try:
            return super().image(index)
        except UserError:
            self.unreadable[index] = True
            return Image.new("RGB", (self.image_size, self.image_size))

    def batch(self, samples: Sequence[SampleId]) -> Batch:
        """Return the batch of ``DecodedImages``, and ``readable`` (bool, B)."""
        batch = super().batch(samples)
        return batch | {"readable": ~self.unreadable[[sample.index for sample in samples]]}


@on_error_stream()
def predict(arguments: list[str]) -> int:
    """Print the most probable classes of each photo, and write them as CSV; 1: some cannot be read."""
    options, overrides = parse(arguments, PredictOptions, "overrides")
    exported = options.find()
    if "classes" not in exported.config:
        raise UserError(
            f"run={exported.given} is a {exported.recipe}, which does not classify images; "
            "give a run of recipe=resnet, or use scripts/generate.py for a language model"
        )
    files = _files(options.path)
    setting = configure(exported, overrides, with_data=False)
    names: list[str] = exported.config["classes"]
    top = min(options.top, len(names))
    target = Path(options.output).expanduser() if options.output else exported.results / "predictions.csv"
    width, classified = max(len(str(file)) for file in files), 0
    heading = ["path", *(f"{what}_{place}" for place in range(1, top + 1) for what in ("class", "probability"))]
    try:
        with target.open("w", newline="", encoding="utf-8") as table:
            rows = csv.writer(table)
            rows.writerow(heading)
            for file, best in _predictions(exported, setting, files, options.batch_size, top):
                if not best:
                    print(f"{file} cannot be read as an image; it is left out", file=sys.stderr)
                    continue
                classified += 1
                rows.writerow([file, *(part for index, share in best for part in (names[index], share))])
                shown = "  ".join(f"{names[index]} {share:.3f}" for index, share in best)
                print(f"{file!s:<{width}}  {shown}")
    except OSError as error:
        raise UserError(f"output={target} cannot be written ({error.strerror}); choose another file") from error
    if not classified:
        raise UserError(f"path={options.path}: no photo can be read; give images such as .jpg or .png files")
    print(f"\n{classified} photo{'s' * (classified != 1)}, written to {target}")
    return 0 if classified == len(files) else 1


@torch.inference_mode()
def _predictions(
    exported: Exported, setting: Setting, files: list[Path], batch_size: int, top: int
) -> Iterator[tuple[Path, list[tuple[int, float]]]]:
    """Yield each file with the model's ``top`` most probable outputs, and their probabilities (softmax, fp32).

    Of a file that cannot be decoded, there are none.
    """
    config = exported.config
    photos, classes = Photos(files, config), config["classes"]
    datasets = ImageDatasets(
        photos,
        photos,
        "photos",
        decodes=len(files) >= _WORKERS_FROM,
        classes=classes,
        image_size=config["image_size"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )
    setting = setting.with_data(datasets)
    recipe, precision, device = setting.config.recipe, setting.config.precision, setting.hardware.device
    model = setting.in_precision(exported.model(recipe, datasets))
    left = iter(files)
    batches = evaluation_samples(len(files), None, batch_size)
    for batch in setting.config.loader.batches(photos, batches, setting.hardware):
        readable = batch.pop("readable").tolist()
        with precision.autocast(device):
            shares = recipe.loss(model, to_device(batch, device)).predictions[:, : len(classes)]
        best = (shares / shares.sum(1, keepdim=True)).topk(top)
        for decoded, indices, shares in zip(readable, best.indices.tolist(), best.values.tolist(), strict=True):
            yield next(left), list(zip(indices, shares, strict=True)) if decoded else []


def _files(given: str) -> list[Path]:
    """Return the photo, or those in a folder and below it, sorted.

    Raises:
        UserError: there are none.
    """
    path = Path(given).expanduser()
    if path.is_file():
        return [path]
    found = sorted(map(Path, images_below(path)))
    if not found:
        raise UserError(f"path={given}: no images in this folder (looked for {', '.join(EXTENSIONS)})")
    return found
