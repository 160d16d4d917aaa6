"""Image classification with any classifier of torchvision or timm (He et al. 2015 and after)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mantissa.display import shortened
from recipes.data.images import mixing
from recipes.data.images.source import ImageDatasets, ImageSource
from recipes.vision import architectures, objective, pretrained
from recipes.vision.pretrained import Weights
from trainer.checkpoint.reader import fill
from trainer.data.contract import Batch
from trainer.errors import UserError, check_choice, check_number, check_range, no_effect
from trainer.hardware import Hardware
from trainer.recipe import Context, DataSource, Decision, LossOutput, Recipe, Sizes

if TYPE_CHECKING:
    from torchmetrics import Metric

ON_CPU = "resnet18"
TOP5_FROM = 10
"""With fewer classes, a guess is in the first five too often for top-5 to say anything."""


@dataclass
class ResNet(Recipe):
    """Images to classes: cross-entropy, top-1 and, from ten classes on, top-5; with several labels to an image binary
    cross-entropy, mAP and F1.

    Evaluation reports the plain loss, whatever the training loss is, so that runs can be compared.
    """

    name: ClassVar[str] = "resnet"
    unit: ClassVar[str] = "images"
    mixes_images: ClassVar[bool] = True
    known_sum = True
    reads_data = True
    rising: ClassVar[tuple[str, ...]] = (*Recipe.rising, "exact_match")
    fine_tuning_lr: ClassVar[float | None] = 0.1  # Kornblith et al. 2019: SGD at about 0.01, where training takes 0.1
    architecture: ClassVar[tuple[str, ...]] = ("arch",)
    adjustable: ClassVar[tuple[str, ...]] = ("image_size", "mean", "std")

    arch: str = "auto"
    """Any classifier of torchvision.models, such as resnet18, vit_b_16 or convnext_tiny, or of timm with the prefix
    ``timm/``. auto: resnet18 on a CPU, resnet50 on a GPU."""
    image_size: int | str = "auto"
    """Side of the images in pixels; auto: that of the data."""
    train_image_size: int | None = None
    """Side of the training images in pixels, if it differs from evaluation: a smaller size trains faster, and objects
    look larger in random crops (Touvron et al. 2019). null: ``image_size``."""
    pretrained: str | None = None
    """What ``init_from`` sets where it is no run: a torchvision name, such as IMAGENET1K_V2, or DEFAULT (also for
    timm), a file (.pth, .safetensors), or an exported folder. The head is new if the classes differ, and images are
    normalised as the weights need it."""
    mean: list[float] | None = None
    """Mean of each channel (red, green, blue; 0 to 1) for normalisation; null: that of the pretrained weights, else of
    the data."""
    std: list[float] | None = None
    """Standard deviation of each channel, likewise."""
    channels_last: bool = True
    """Keep weights and images in NHWC order, which tensor cores prefer."""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss: the part of the target spread evenly over all classes; usual: 0.1 (Szegedy
    et al. 2016)."""
    criterion: str = "auto"
    """The training loss: ``cross_entropy``, or ``bce``: binary cross-entropy of each class (Wightman et al. 2021).
    auto: ``bce`` where an image may have several labels."""
    bce_threshold: float | None = None
    """Threshold of ``bce``: targets of mixed images above it become 1, all others 0; null: they stay fractions."""
    class_weights: Any = None
    """Class weights of the training loss: a list, or ``balanced``, from the class counts of the training data. The
    weighted sum is divided by the number of images; torch's mean divides by the sum of the weights, which on average is
    the same if the weights have a mean of 1 over the images, as ``balanced`` ones do."""

    def __post_init__(self) -> None:
        check_number("recipe.image_size", self.image_size)
        check_number("recipe.train_image_size", self.train_image_size)
        if (self.mean is None) != (self.std is None):
            raise UserError("recipe.mean and recipe.std normalise images together; set both or neither of them")
        for key, colours, above in (("mean", self.mean, -math.inf), ("std", self.std, 0.0)):
            if colours is not None and not (len(colours) == 3 and all(above < colour < math.inf for colour in colours)):
                raise UserError(
                    f"recipe.{key}={colours} must be three numbers{', each above 0' if key == 'std' else ''}: of red, "
                    "green and blue"
                )
        check_range("recipe.label_smoothing", self.label_smoothing, "[0, 1)")
        check_choice("recipe.criterion", self.criterion, objective.CRITERIA)
        if self.bce_threshold is not None:
            check_range("recipe.bce_threshold", self.bce_threshold, "[0, 1)")
            if self.criterion != "bce":
                given = f"recipe.bce_threshold={self.bce_threshold}"
                raise no_effect(given, "it is of recipe.criterion=bce alone", "recipe.criterion=bce")
        objective.check_class_weights(self.class_weights)

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        """Choose the architecture, or check the requested one; of open data, say what becomes of pretrained weights."""
        if context.datasets is not None:
            recipe, decisions = self._with_criterion(context.datasets)
            if self.pretrained is not None:
                decisions.append(Decision("init_from", self.pretrained, context.datasets.weights_note))
            return recipe, decisions
        _image_source(context.data)
        if self.criterion == "auto" and (criterion := context.recorded.get("recipe.criterion")):
            return replace(self, criterion=criterion).resolve(context)
        choices = {} if self.pretrained is None else pretrained.exported_config(self.pretrained)
        why = "that of init_from"
        if not choices and context.hardware.is_gpu:
            choices, why = {"arch": "resnet50"}, "for a GPU; recipe.arch=resnet18 is smaller"
        elif not choices:
            choices, why = {"arch": ON_CPU}, "for a CPU; recipe.arch=resnet50 is the published size"
        decisions = [
            Decision(f"recipe.{name}", choices[name], why)
            for name in ("arch", "image_size")
            if name in choices and getattr(self, name) == "auto"
        ]
        recipe = self.with_options(decisions)
        architectures.check(recipe.arch)
        if recipe.pretrained is not None:
            pretrained.check(recipe.arch, recipe.pretrained)
        return recipe, decisions

    def sizes(self, hardware: Hardware) -> Sizes:
        """Return some minutes of digits, at most, on two CPU cores; on a GPU larger batches of the other models."""
        if not hardware.is_gpu:
            return Sizes(steps=200, batch_size=64, micro_batch_size=64)
        return Sizes(steps=200, batch_size=64 if self.arch == ON_CPU else 512, micro_batch_size=512)

    def datasets(self, data: DataSource, seed: int) -> ImageDatasets:
        """Open the images, and check that the head and the architecture can take them."""
        # The options stay as the user set them: a resumed run is compared by them.
        datasets = _image_source(data).images(self.image_size if isinstance(self.image_size, int) else None)
        objective.class_weights(self.class_weights, datasets)
        architectures.check_size(self.arch, datasets.image_size, len(datasets.classes))
        if self.train_image_size is not None:
            self._set_train_size(datasets)
        if self.pretrained is not None:  # opened before the other ranks do, and normalised as the weights need it
            weights = pretrained.open_weights(self.arch, self.pretrained, datasets.image_size)
            datasets = replace(datasets, mean=weights.mean, std=weights.std)
            datasets.weights_note = self._about(weights, datasets)
        if self.mean is None or self.std is None:
            return datasets
        return replace(datasets, mean=tuple(self.mean), std=tuple(self.std))

    def _with_criterion(self, datasets: ImageDatasets) -> tuple[Self, list[Decision]]:
        if not datasets.multi_label:
            return replace(self, criterion="cross_entropy" if self.criterion == "auto" else self.criterion), []
        if self.criterion == "cross_entropy":
            mistake = "recipe.criterion=cross_entropy"
            problem = f"{mistake} is for one label to an image, and these data may have several"
            raise UserError(problem, "recipe.criterion=bce", "", mistake=mistake)
        decision = Decision("recipe.criterion", "bce", "an image may have several labels")
        return self.with_options([decision]), [decision] * (self.criterion == "auto")

    def _about(self, weights: Weights, datasets: ImageDatasets) -> str:
        """Return what becomes of the pretrained weights, in words."""
        colours = ", ".join(f"{value:.3g}" for value in (*(self.mean or weights.mean), *(self.std or weights.std)))
        if new := pretrained.new_head(weights.state, weights.classes, self.arch, datasets):
            head = f"a new head for {len(datasets.classes)} classes ({', '.join(new)})"
        elif weights.classes is None:
            head = f"its head is kept, whose outputs are taken for {shortened(datasets.classes)}"
        else:
            head = "its head is kept"
        others = "set recipe.mean and recipe.std where the weights need others"
        return "; ".join(filter(None, (weights.note, head, f"images are normalised with {colours}", others)))

    def build_model(self, datasets: ImageDatasets) -> nn.Module:
        """Build the classifier, random or pretrained. Its attribute ``normalise`` makes its input of pixels."""
        model: Any = architectures.build(self.arch, datasets.image_size, len(datasets.classes))
        if self.pretrained is not None and torch.get_default_device().type != "meta":  # which needs only the shapes
            weights = pretrained.open_weights(self.arch, self.pretrained, datasets.image_size)
            state, _ = self.adapt_weights(weights.state, model, datasets, {"classes": weights.classes})
            size = datasets.image_size
            fill(model, state, f"recipe.arch={self.arch}, for images of {size} × {size}: init_from={self.pretrained}")
        model.normalise = Normalise(datasets.mean, datasets.std)
        # No buffer, which would be saved, and converted with the weights.
        model.class_weights = objective.class_weights(self.class_weights, datasets)
        classifier: nn.Module = model.to(memory_format=torch.channels_last) if self.channels_last else model
        return classifier

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks of the architecture."""
        return architectures.blocks(model)

    def count_targets(self, batch: Batch) -> int:
        """Return the number of images."""
        return len(batch["label"])

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        """Normalise and mix on the device, classify, and add up the loss and the correct answers in fp32.

        Of a mixed image, the answer is its own label, whatever its share is.
        """
        label = batch["label"]
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        logits = model(mixing.apply(model.normalise(batch["image"], layout), batch)).float()
        if label.ndim > 1:
            return self._multi_label(model, logits, batch)
        loss_sum = (
            self._training_loss(model, logits, batch) if model.training else objective.cross_entropy(logits, batch)
        )
        best = logits.detach().topk(5 if logits.shape[1] >= TOP5_FROM else 1).indices
        right = best == label[:, None]
        sums = {"top1": right[:, 0].sum(dtype=torch.float32)}
        if logits.shape[1] >= TOP5_FROM:
            sums["top5"] = right.sum(dtype=torch.float32)
        shares = None if model.training else logits.detach().softmax(1)
        return LossOutput(loss_sum, sums, shares, label)

    def _multi_label(self, model: Any, logits: Tensor, batch: Batch) -> LossOutput:
        """Return the same of any number of labels to an image; its answer is correct where each label is."""
        label, given = batch["label"], logits.detach()
        loss_sum = (
            self._training_loss(model, logits, batch)
            if model.training
            else objective.binary_cross_entropy(logits, batch)
        )
        right = ((given > 0) == (label > 0.5)).all(1).sum(dtype=torch.float32)
        shares = None if model.training else given.sigmoid()
        return LossOutput(loss_sum, {"exact_match": right}, shares, label.to(torch.int64))

    def metrics(self, datasets: ImageDatasets) -> dict[str, Metric]:
        """Return mean average precision and F1, means over the classes, where an image may have several labels."""
        if not datasets.multi_label:
            return {}
        from trainer.multi_label import MeanAveragePrecision, MeanF1

        return {"mAP": MeanAveragePrecision(len(datasets.classes)), "f1_macro": MeanF1(len(datasets.classes))}

    def _training_loss(self, model: Any, logits: Tensor, batch: Batch) -> Tensor:
        weights = None
        if self.class_weights is not None:
            weights = model.class_weights = model.class_weights.to(logits.device)  # a copy in the first step only
        if self.criterion == "bce":
            return objective.binary_cross_entropy(logits, batch, self.label_smoothing, weights, self.bce_threshold)
        return objective.cross_entropy(logits, batch, self.label_smoothing, weights)

    def adapt_weights(
        self, weights: dict[str, Tensor], model: nn.Module, datasets: ImageDatasets, about: dict[str, Any]
    ) -> tuple[dict[str, Tensor], list[Decision]]:
        """Return the weights, but a new head where the classes are others."""
        own = model.state_dict()
        counts = {name: own[name] for name in own.keys() - weights.keys() if name.endswith("num_batches_tracked")}
        weights = weights | counts  # which old files lack
        weights, resampled = pretrained.resampled(weights, self.arch, datasets.image_size)
        decisions = [Decision("init_from", "position embeddings", resampled)] if resampled else []
        head = pretrained.new_head(weights, about.get("classes"), self.arch, datasets)
        if not head:
            return weights, decisions
        heads = tuple(f"{name.rpartition('.')[0]}." for name in head)
        old = [weights[name] for name in sorted(weights) if name.startswith(heads)]
        new = architectures.new_weights(self.arch, datasets.image_size, len(datasets.classes), old)
        weights = {name: tensor for name, tensor in weights.items() if name in own or not name.startswith(heads)}
        why = f"a new head ({', '.join(head)}): the run it starts from has other classes"
        decisions.append(Decision("init_from", "all but the head", why))
        return weights | {name: new[name] for name in head}, decisions

    def description(self, datasets: ImageDatasets) -> dict[str, Any]:
        """Return what the model's library needs to build it again, and how images become its input."""
        return {
            **architectures.library(self.arch),
            "torch": torch.__version__,
            "arch": self.arch,
            "arch_options": architectures.options(self.arch, datasets.image_size, len(datasets.classes)),
            "classes": datasets.classes,
            "multi_label": datasets.multi_label,
            "image_size": datasets.image_size,
            "mean": list(datasets.mean),
            "std": list(datasets.std),
            "evaluated_part": datasets.augment.eval_crop,
            "input": "RGB, B x 3 x image_size x image_size, values from 0 to 1, less mean, divided by std",
            "evaluated_on": "the middle square, evaluated_part of the shorter side, scaled to image_size; "
            "upright by its EXIF orientation, on white where it is transparent; "
            "an image of that size as it is",
        }

    def shown_by(self, datasets: ImageDatasets) -> list[str]:
        """Return the command that classifies a validation image, where that is a file."""
        files = getattr(datasets.valid, "files", None)
        return super().shown_by(datasets) if files is None else ["predict.py", f"path={os.fsdecode(files[0])}"]

    def summary_fields(self, model: nn.Module, datasets: ImageDatasets) -> dict[str, Any]:
        """Return the architecture as the size, with what it was built for."""
        facts = {"size": self.arch, "image_size": datasets.image_size, "classes": len(datasets.classes)}
        return facts if self.pretrained is None else facts | {"pretrained": self.pretrained}

    def _set_train_size(self, datasets: ImageDatasets) -> None:
        size = self.train_image_size
        if not isinstance(getattr(datasets.train, "image_size", None), int):
            raise no_effect(f"recipe.train_image_size={size}", "this data has no images of a size")
        architectures.check_size(self.arch, datasets.image_size, len(datasets.classes), size)
        datasets.train.image_size = size  # type: ignore[attr-defined]


class Normalise:
    """From pixels to the model's input: less the mean, divided by the standard deviation of each channel, in fp32.

    It is not a module, and its tensors are not buffers: nothing saves, counts, exchanges or converts them.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        # In units of the uint8 pixels, so that it takes one subtraction and one multiplication.
        self.mean = torch.tensor(mean, device="cpu").reshape(1, 3, 1, 1) * 255
        self.factor = 1 / (torch.tensor(std, device="cpu").reshape(1, 3, 1, 1) * 255)

    def __call__(self, pixels: Tensor, layout: torch.memory_format) -> Tensor:
        """Return fp32 images in this layout, of uint8 ``pixels``, both B × 3 × H × W and on one device."""
        if self.mean.device != pixels.device:
            self.mean, self.factor = self.mean.to(pixels.device), self.factor.to(pixels.device)
        return pixels.to(torch.float32, memory_format=layout).sub_(self.mean).mul_(self.factor)


def _image_source(data: DataSource) -> ImageSource:
    if not isinstance(data, ImageSource):
        raise UserError(
            f"recipe=resnet needs images, as of data=imagefolder or hub, and data={data.kind} has none",
            "data=digits",
            "data=synthetic",
        )
    return data
