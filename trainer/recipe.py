"""The contract between what is trained (``recipes/``) and how it is trained (``trainer/``)."""

from __future__ import annotations

import copy
import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from mantissa.tensors import random_state, set_random_state
from trainer.checkpoint.weights import open_file
from trainer.data.contract import Batch, Dataset, Datasets, SampleId
from trainer.data.user_dataset import UserDataset
from trainer.errors import UserError
from trainer.hardware import Hardware

if TYPE_CHECKING:
    from torchmetrics import Metric

    from trainer.parallel.world import World


class LossOutput(NamedTuple):
    """What one forward pass returns: sums over the microbatch, never means, so that they can be added up."""

    loss_sum: Tensor
    """Scalar, fp32: the loss summed over the microbatch's valid targets."""
    metric_sums: dict[str, Tensor]
    """Scalars, detached: further sums over the same targets, such as the number of correct top-1 answers."""
    predictions: Any = None
    """Of a model in evaluation mode, detached, fp32: what the ``update`` of the recipe's torchmetrics takes. Of a
    classifier the probabilities of the classes, B × classes."""
    targets: Any = None
    """What ``update`` takes beside them. Of a classifier B class numbers, int64."""


@dataclass(frozen=True)
class Sizes:
    """What ``auto`` stands for in the sizes of a run; of the microbatch the most, lowered to divide the batch."""

    steps: int
    batch_size: int
    micro_batch_size: int
    why: str = ""
    """Empty: they are the default of the device."""


class Decision(NamedTuple):
    """One ``auto`` that was resolved: what it became, and why."""

    key: str
    value: object
    why: str


NO_OPTION = {"omegaconf_ignore": True}
"""Metadata of a config's field that users do not set."""
_MUST_HAVE = ("sizes", "datasets", "build_model", "count_targets", "loss")
"""The methods that every recipe defines."""


@dataclass
class DataSource:
    """The ``data`` config group; this base is ``data=own``: the recipe's ``datasets`` opens what it needs."""

    kind: ClassVar[str] = "own"
    """The choice ``data=<kind>``. (Not ``name``, which is an option of ``data=hub``.)"""
    has_images: ClassVar[bool] = False
    """Whether it can be read as images, so that ``augment`` may have an effect."""


@dataclass(frozen=True)
class Context:
    """The facts by which ``resolve`` turns an ``auto`` into a value."""

    hardware: Hardware
    world: World
    """The processes that train together; all of them resolve alike."""
    data: DataSource
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """The options of the run that is continued, by dotted key: they count as typed. Empty: a new run."""
    datasets: Any = None
    """The open data; None: it is not open yet, and what depends on it stays ``auto``."""
    micro_batch_size: int = 1
    free_bytes: int = 0
    """Free memory of the GPU that has least; known once the data is open."""


@dataclass
class Augment:
    """The ``augment`` config group: what training changes about a sample at random. This base changes nothing.

    What it means for images is in ``recipes/data/images/augment.py``.
    """

    kind: ClassVar[str] = "none"
    """The choice ``augment=<kind>``."""

    @property
    def micro_batch_multiple(self) -> int:
        """Return the number that ``micro_batch_size`` has to be a multiple of."""
        return 1

    def check(self, recipe: Recipe, data: DataSource) -> None:
        """Raise UserError where a part of it has no effect in this recipe, or on this data."""

    def effect(self) -> str | None:
        """Return what was asked for, as typed; None: nothing."""
        return None

    def resolve(self, context: Context) -> tuple[Augment, list[Decision]]:
        """Return the choice without ``auto``, and what was chosen."""
        return self, []

    def applied(self, datasets: Any) -> Any:
        """Return open data that is augmented in this way as it is fetched."""
        return datasets


@dataclass
class Recipe:
    """The ``recipe`` config group: model, data, loss and metrics of one family.

    Subclasses are dataclasses whose fields are the user's options, and a recipe holds nothing else; as all configs, it
    does not change: ``dataclasses.replace`` makes another one. What the data decides, such as the vocabulary, is in
    what ``datasets`` returns (a subclass of Datasets, if the recipe needs one); what the loss needs on the device is in
    the model. So methods take ``datasets: Any`` and ``model: Any``, which a recipe narrows to its own types. The
    trainer calls the methods in the order of this class.
    """

    name: ClassVar[str] = ""
    """The choice ``recipe=<name>``; also the MLflow experiment."""
    unit: ClassVar[str] = "samples"
    """What throughput counts: ``tokens``, ``images``, ``samples``."""
    best_metric: ClassVar[str] = "valid/loss"
    """The metric that marks the best checkpoint where ``checkpoint.best`` is ``auto``."""
    rising: ClassVar[tuple[str, ...]] = ("accuracy", "top1", "top5")
    """Sums whose highest value is the best. Of all others it is the lowest."""
    masks_attention: ClassVar[bool] = False
    """Whether the model gives ``scaled_dot_product_attention`` a mask or bias: cuDNN's kernel is then left out."""
    reads_data: ClassVar[bool] = False
    """Whether ``datasets`` opens what ``data`` names; otherwise every choice but ``data=own`` is refused."""
    mixes_images: ClassVar[bool] = False
    """Whether the loss carries out ``augment.mixup`` and ``cutmix``; otherwise they are refused."""
    known_sum: ClassVar[bool] = False
    """Whether a test holds that the loss is a sum; else the start compares that of some samples with theirs. A subclass
    with a loss of its own says it anew."""
    architecture: ClassVar[tuple[str, ...]] = ()
    """Fields that the names and shapes of the weights depend on: with ``init_from`` they are those of that run."""
    adjustable: ClassVar[tuple[str, ...]] = ()
    """Fields that ``init_from`` takes over, too, though the same weights can be used with other values: what the data
    decided (``about`` of ``adapt_weights`` has it), or the option."""
    fine_tuning_lr: ClassVar[float | None] = None
    """Factor of the optimizer's default learning rate with ``init_from``; None: it stays."""
    adapter_lr: ClassVar[float | None] = None
    """The same where only low-rank adapters are trained (``recipe.lora``)."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "loss" in vars(cls):
            cls.known_sum = bool(vars(cls).get("known_sum"))

    def check_complete(self) -> None:
        """Raise UserError where the recipe lacks a method that training calls."""
        for method in _MUST_HAVE:
            if getattr(type(self), method) is getattr(Recipe, method):
                of = f"{type(self).__name__} (recipe={self.name})"
                raise UserError(f"{of} has no {method}; write it, as recipes/bignet.py does")

    def returned(self, method: str, value: Any, wanted: type) -> Any:
        """Return what a method of a recipe has returned; raise UserError where that is of another type."""
        if isinstance(value, wanted):
            return value
        returns = f"{method} returns {type(value).__name__}, but has to return {wanted.__name__}"
        raise UserError(f'recipe={self.name}: {returns}; see "Your own recipe" in docs/recipes.md', shared=True)

    def check_reads(self, data: DataSource, typed: Iterable[str]) -> None:
        """Raise UserError where data were ``typed`` of which the recipe reads none."""
        if not self.reads_data and data.kind != DataSource.kind:
            problem = f"recipe={self.name} opens its own data, and cannot read data={data.kind}"
            raise UserError(f"{problem} (its class has no reads_data = True)", "", mistake=shlex.join(typed))

    @staticmethod
    def of(
        model: nn.Module | Callable[[], nn.Module],
        loss: Callable[[Any, Any], Tensor | LossOutput],
        train_dataset: Any,
        valid_dataset: Any,
        test_dataset: Any = None,
        *,
        targets: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> UserRecipe:
        """Return the recipe of a model and data that exist already, for ``trainer.train``.

        Args:
            model: in fp32; a copy of it is trained. Or a function that builds one, whose weights then follow ``seed``.
            loss: takes the model (in DDP, if there is) and a batch, under autocast; returns a scalar, the mean over the
                batch, or a ``LossOutput``. What it needs is in the model or the batch, which move to the device.
            train_dataset: a map-style dataset of torch, or a DataLoader: its dataset, batch size and ``collate_fn``.
                Samples are what torch's ``default_collate`` knows: tensors, numbers, tuples and dictionaries of them.
            valid_dataset: likewise.
            test_dataset: likewise; evaluated once, at the end, with the best weights.
            targets: takes a batch; returns how many targets the loss is a mean, or a sum, over, such as the tokens that
                are no padding; None: the samples. Of a batch with none the loss counts as 0; a mean of one's own
                divides by at least 1 there, for its gradient.
            collate_fn: as of torch's DataLoader.

        Raises:
            UserError: data that cannot be batched, a sample with NaN or infinity (eight are looked at), or a 16-bit
                model. A loss that is no mean is warned of. What model and loss raise with the first eight samples is a
                UserError of ``trainer.train``.
        """
        train, valid = UserDataset(train_dataset, collate_fn), UserDataset(valid_dataset, collate_fn)
        test = None if test_dataset is None else UserDataset(test_dataset, collate_fn)
        if any(each.structure != train.structure for each in (valid, test or valid)):
            raise UserError(f"{valid.name}: batches of all datasets must have the structure of {train.name}'s")
        own = UserRecipe(model, loss, train, valid, test, targets, getattr(train_dataset, "batch_size", None) or 32)
        own.check()
        return own

    def with_options(self, decisions: Iterable[Decision]) -> Self:
        """Return the recipe with these options (``recipe.<option>``) in the place of its own, for ``resolve``."""
        return replace(self, **{decision.key.removeprefix("recipe."): decision.value for decision in decisions})

    def lower_is_better(self, metric: str) -> bool:
        """Return whether the lowest value of a metric (such as ``valid/loss``) is the best."""
        return metric.rpartition("/")[2] not in self.rising

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        """Return the recipe without ``auto``, and what was chosen.

        It is called twice: before anything is loaded, so it must be quick, and on what that returned once the data is
        open, for what the data or the free memory decides.

        Raises:
            UserError: options that do not fit each other, the hardware or the data.
        """
        return self, []

    def sizes(self, hardware: Hardware) -> Sizes:
        """Return the values of ``steps``, ``batch_size`` and ``micro_batch_size`` where they are ``auto``."""
        raise NotImplementedError

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        """Open the data. Raises UserError where the user's data cannot work."""
        raise NotImplementedError

    def build_model(self, datasets: Any) -> nn.Module:
        """Build the model in fp32 on the CPU, from torch's global RNG, for the data that ``datasets`` returned."""
        raise NotImplementedError

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return the model's repeated blocks, none inside another: what activation checkpointing recomputes and
        ``parallel=fsdp`` shards one at a time.
        """
        return []

    def fp32_modules(self, model: Any) -> list[str]:
        """Return the names of submodules that compute in fp32 in every 16-bit format, beside ``precision.modules``."""
        return []

    def count_targets(self, batch: Batch) -> int:
        """Return the number of valid targets of a CPU microbatch: what the loss is averaged over."""
        raise NotImplementedError

    def count_units(self, batch: Batch) -> int:
        """Return the number of ``unit`` in a CPU microbatch, for throughput."""
        return self.count_targets(batch)

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        """Run the forward pass and the loss of one microbatch on the device, under autocast.

        Args:
            model: the built one, or DDP around it, which has the attributes of the built one, too.
            batch: of ``Dataset.batch``, on the device.
        """
        raise NotImplementedError

    def metrics(self, datasets: Any) -> dict[str, Metric]:
        """Return new torchmetrics objects by name, which evaluation updates with what ``loss`` returns.

        Import torchmetrics here: that takes seconds. Only random ones (``BootStrapper``) differ by the number of ranks.
        """
        return {}

    def report(self, loss: float, sums: dict[str, float], targets: int) -> dict[str, float]:
        """Turn the mean loss and the summed metrics over ``targets`` targets into what is reported."""
        return {"loss": loss} | {key: value / targets for key, value in sums.items()}

    def export(self, model: Any, datasets: Any, folder: Path) -> None:
        """Write everything that is needed to use the weights without this project.

        By default model.safetensors, under the model's own names, and ``description`` as config.json.
        """
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, str(folder / "model.safetensors"))
        (folder / "config.json").write_text(json.dumps(self.description(datasets), indent=2) + "\n", encoding="utf-8")

    def exported(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights that ``export`` wrote, by their names in the model.

        Raises:
            UserError: there are none, or they cannot be read.
        """
        found = [open_file(file, str(folder)) for file in sorted(folder.glob("[!.]*.safetensors"))]
        if not found:
            raise UserError(f"{folder} holds no *.safetensors; give the best/ of a run")
        return {name: tensor for tensors in found for name, tensor in tensors.items()}

    def adapt_weights(
        self, weights: dict[str, Tensor], model: Any, datasets: Any, about: dict[str, Any]
    ) -> tuple[dict[str, Tensor], list[Decision]]:
        """Return another run's weights as this model needs them, and what is not taken over.

        Args:
            weights: by name, on the host.
            model: new, on the host.
            datasets: of the new run.
            about: the ``config.json`` beside exported weights; for those of a checkpoint, what data of images keep.
        """
        return weights, []

    def description(self, datasets: Any) -> dict[str, Any]:
        """Return what an exported model is, as plain JSON types: by default the recipe and its options."""
        options = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.metadata != NO_OPTION}
        options = {key: value.name if isinstance(value, Enum) else value for key, value in options.items()}
        return {"recipe": self.name, "options": options, "torch": torch.__version__}

    def shown_by(self, datasets: Any) -> list[str]:
        """Return the command in ``scripts/`` that shows what a trained model can do, without ``run=``; empty: none."""
        return ["evaluate.py"]

    def summary_fields(self, model: Any, datasets: Any) -> dict[str, Any]:
        """Return further facts for the start block and MLflow tags, such as ``{"size": "124M"}``."""
        return {}


@dataclass
class UserRecipe(Recipe):
    """``recipe=own``: a model and data that a Python program has already, see ``Recipe.of``; it has no options."""

    name: ClassVar[str] = "own"
    known_sum = True  # ``check`` has warned
    model: Any = field(default=None, metadata=NO_OPTION)
    objective: Any = field(default=None, metadata=NO_OPTION)
    train: Any = field(default=None, metadata=NO_OPTION)
    valid: Any = field(default=None, metadata=NO_OPTION)
    test: Any = field(default=None, metadata=NO_OPTION)
    targets: Any = field(default=None, metadata=NO_OPTION)
    batch_size: int = field(default=32, metadata=NO_OPTION)

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        if self.model is None:
            raise UserError(
                "recipe=own is the model and the data of a Python program; give them there, as in "
                "trainer.train(Recipe.of(model, loss, train_dataset, valid_dataset)), also to resume or evaluate a "
                "run, or examine a step with mantissa.examine(model, loss, batches)"
            )
        return self, []

    def sizes(self, hardware: Hardware) -> Sizes:
        """Return one pass over the training data, in batches as the DataLoader's, or of 32."""
        size = min(self.batch_size, len(self.train))
        return Sizes(math.ceil(len(self.train) / size), size, size, "one epoch, in batches of the DataLoader, or of 32")

    def datasets(self, data: DataSource, seed: int) -> Datasets:
        about = f"{self.train.name}: {len(self.train):,} samples, {len(self.valid):,} for validation"
        return Datasets(self.train, self.valid, about, test=self.test)

    def build_model(self, datasets: Any) -> nn.Module:
        return copy.deepcopy(self.model).cpu() if isinstance(self.model, nn.Module) else self.model()

    def count_targets(self, batch: Batch) -> int:
        return int(self.targets(self.train.rebuilt(batch))) if self.targets else self.count_units(batch)

    def count_units(self, batch: Batch) -> int:
        return len(batch["0"])

    def loss(self, model: Any, batch: Batch) -> LossOutput:
        given = self.train.rebuilt(batch)
        value = self.objective(model, given)
        if isinstance(value, LossOutput):
            return value
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError("the loss must be a scalar tensor, the mean over the batch, or a LossOutput")
        count = self.targets(given) if self.targets else self.count_units(batch)
        value = value.reshape(()).to(torch.promote_types(value.dtype, torch.float32))
        none = torch.zeros_like(value)
        return LossOutput(torch.where(none < count, value * count, none), {})  # the mean over no targets is NaN

    def shown_by(self, datasets: Any) -> list[str]:
        return []  # what a script does needs that program

    def summary_fields(self, model: Any, datasets: Any) -> dict[str, Any]:
        return {"model": type(model).__name__}

    def check(self) -> None:
        """Look at some samples: refuse those that are not finite, and warn where their summed loss is not a sum.

        Raises:
            UserError: a weight has 16 bits, or a sample has NaN or infinity, and so has its loss.
        """
        model = self.model if isinstance(self.model, nn.Module) else self.model()
        if half := [name for name, each in model.named_parameters() if each.dtype in (torch.float16, torch.bfloat16)]:
            raise UserError(f"{half[0]} has 16 bits: give the model in fp32, model.float(), and choose with precision=")
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        found, of_valid = (losses_of_some(self, model, data, device) for data in (self.train, self.valid))
        for data, losses in ((self.train, found), (self.valid, of_valid)):
            for index, loss in losses.alone.items() if losses else ():
                if not math.isfinite(loss) and (why := data.not_finite(index)):
                    raise UserError(f"{data.name}: sample {index} has {why}, so its loss is {loss}")
        if found and found.no_sums:
            why = f"the metric {found.no_sums[0]} of {len(found.alone)} samples is no sum of that one by one"
            warnings.warn(f"{why}, and is divided by the number of targets: return a sum", stacklevel=3)
        differs = found and not math.isclose(found.together, found.total, rel_tol=1e-3, abs_tol=1e-6)
        if found and differs and math.isfinite(found.together):  # alone it may be NaN: the mean over no targets
            warnings.warn(
                f"the summed loss of {len(found.alone)} samples is {found.together:.5g} in one batch and "
                f"{found.total:.5g} one by one, so the gradient depends on micro_batch_size: return the mean over the "
                "batch, or a LossOutput with sums; for a mean over tokens, count them with targets=",
                stacklevel=3,
            )


class Losses(NamedTuple):
    """The summed losses of some samples."""

    together: float
    """In one batch."""
    alone: dict[int, float]
    """One by one, by the number of the sample."""
    mean: float
    """Of these, over the targets of all."""
    no_sums: list[str]
    """Names of metrics that are other ones in one batch than summed one by one."""

    @property
    def total(self) -> float:
        """Their sum, one by one."""
        return sum(self.alone.values())


@torch.no_grad()
def losses_of_some(recipe: Recipe, model: Any, data: Dataset, device: torch.device, most: int = 8) -> Losses | None:
    """Return the loss of samples from ``most`` random places, always the same, in one batch and one by one.

    None where these say nothing: the loss is random, targets are no sum, or the model takes no single sample. The model
    is in evaluation mode; it and the generators stay as they are.
    """
    places = np.random.default_rng(0).choice(len(data), min(most, len(data)), replace=False)
    if len(places) < 2:
        return None
    generators, modes = random_state(device), {module: module.training for module in model.modules()}
    model.eval()
    try:
        samples = data.batch([SampleId(index, 0) for index in places.tolist()])
        recipe.returned("batch of its datasets", samples, Mapping)
        set_random_state(generators, device)  # some data are augmented with them
        rows = [slice(len(places)), *(slice(row, row + 1) for row in range(len(places)))]
        parts = [{name: tensor[some] for name, tensor in samples.items()} for some in rows]
        targets, *of_each = map(recipe.count_targets, parts)
        on_device = ({name: tensor.to(device) for name, tensor in part.items()} for part in parts)
        outputs = [recipe.returned("loss", recipe.loss(model, part), LossOutput) for part in on_device]
        together, *alone = [float(output.loss_sum) for output in outputs]
        drawn = any(not torch.equal(state, generators[name]) for name, state in random_state(device).items())
    except UserError:
        raise
    except Exception:  # such as of a squeeze, which takes the batch away, too; an error of any batch comes again
        return None
    finally:
        for module, mode in modes.items():
            module.training = mode
        set_random_state(generators, device)
    if not 0 < targets == sum(of_each) or drawn:
        return None
    by_place = dict(zip(places.tolist(), alone, strict=True))
    mean = sum(count * loss for count, loss in zip(of_each, alone, strict=True)) / targets
    totals = {name: sum(float(each.metric_sums[name]) for each in outputs[1:]) for name in outputs[0].metric_sums}
    no_sums = [name for name, total in totals.items() if abs(outputs[0].metric_sums[name] - total) > abs(total) / 2]
    return Losses(together, by_place, mean, no_sums)
