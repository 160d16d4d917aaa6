"""What an evaluation reports: a recipe's sums, and torchmetrics, exact over microbatches and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainer.errors import UserError, nearest
from trainer.hardware import kind_of

if TYPE_CHECKING:
    from torchmetrics import Metric

    from trainer.parallel.world import World
    from trainer.recipe import LossOutput, Recipe

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy": ("Accuracy", {"average": "micro"}),
    "precision_macro": ("Precision", {"average": "macro"}),
    "recall_macro": ("Recall", {"average": "macro"}),
    "f1_macro": ("F1Score", {"average": "macro"}),
    "f1_weighted": ("F1Score", {"average": "weighted"}),
    "auroc": ("AUROC", {"average": "none"}),
    "average_precision": ("AveragePrecision", {"average": "none"}),
    "mcc": ("MatthewsCorrCoef", {}),
    "kappa": ("CohenKappa", {}),
    "ece": ("CalibrationError", {"n_bins": 15, "norm": "l1"}),
}
"""The choices of ``metrics=``: a class ``Multiclass…`` of torchmetrics.classification, or ``Multilabel…`` where a
sample has any number of labels, and its options."""


def check_named(names: Iterable[str]) -> None:
    """Raise UserError where a name is not in ``NAMED``."""
    for name in names:
        if name not in NAMED:
            raise UserError(f"metrics=[{name}] is not one of {', '.join(NAMED)}{nearest(name, NAMED)}")


def reported(recipe: Recipe, sums: dict[str, float], targets: int) -> dict[str, float]:
    """Return what a recipe reports of sums over ``targets`` targets, the ``loss`` among them."""
    others = {name: value for name, value in sums.items() if name != "loss"}
    return recipe.report(sums["loss"] / max(1, targets), others, max(1, targets))


class Metrics:
    """The torchmetrics objects of a run. Only evaluation updates them: most of them wait for the device.

    Args:
        recipe: which may have its own.
        datasets: what ``Recipe.metrics`` takes.
        names: further ones, of ``NAMED``; they are made when the number of classes is known.
        device: of the predictions.
    """

    def __init__(self, recipe: Recipe, datasets: Any, names: list[str] | None, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._metrics = {name: self._ready(metric) for name, metric in recipe.metrics(datasets).items()}
        self._named: dict[str, Any] = {}
        if names:
            from torchmetrics import classification

            self._named = {name: getattr(classification, f"Multiclass{NAMED[name][0]}") for name in names}

    def __bool__(self) -> bool:
        return bool(self._metrics or self._named)

    def lower_is_better(self, metric: str) -> bool:
        """Return whether the lowest value of a metric (such as ``valid/ece``) is the best."""
        name = metric.rpartition("/")[2]
        rises = _rises(name, {**self._metrics, **self._named})
        return self._recipe.lower_is_better(name) if rises is None else not rises

    def reset(self) -> None:
        """Begin an evaluation."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, output: LossOutput) -> None:
        """Take in a microbatch, whose predictions have at least fp32.

        Raises:
            UserError: it has no predictions.
        """
        predictions = output.predictions
        if self and predictions is None:
            known, name = ", ".join(self._sums(output)), self._recipe.name
            lacks = f"recipe={name} returns no predictions, so it has only {known}"
            if self._named:
                raise UserError(f"metrics=[{','.join(self._named)}]: {lacks}", "", mistake="metrics")
            raise UserError(f"{lacks}; return them and the targets as the third and fourth parts of LossOutput")
        if isinstance(predictions, torch.Tensor) and predictions.dtype in (torch.bfloat16, torch.float16):
            predictions = predictions.float()
        for name, kind in self._named.items():
            if name not in self._metrics:
                classes, options = "num_classes", {"validate_args": False} | NAMED[name][1]
                if getattr(output.targets, "shape", None) == predictions.shape:  # any number of labels to a sample
                    from torchmetrics import classification

                    classes, kind = "num_labels", getattr(classification, f"Multilabel{NAMED[name][0]}", None)
                    if kind is None:
                        raise UserError(f"metrics=[{name}] is for one label to a sample", "", mistake="metrics")
                self._metrics[name] = self._ready(kind(**{classes: predictions.shape[1]}, **options))
        for metric in self._metrics.values():
            metric.update(predictions, output.targets)

    def names_in(self, output: LossOutput) -> list[str]:
        """Return the names of all that an evaluation with such microbatches reports; a check before training."""
        self.update(output)
        with warnings.catch_warnings(action="ignore"):  # of classes without a sample
            values = self._values()
        self.reset()
        return [*self._sums(output), *values]

    def _sums(self, output: LossOutput) -> list[str]:
        return list(self._recipe.report(0.0, dict.fromkeys(output.metric_sums, 0.0), 1))

    def values(self, world: World) -> dict[str, float]:
        """Return the values over what all ranks were updated with, and forget that; every rank has to call it."""
        if self and world.size > 1:  # torchmetrics' own exchange waits for ever where lists differ in length
            every = {name: _parts(metric) for name, metric in self._metrics.items()}
            updated = {name: parts for name, parts in every.items() if any(part.update_called for part in parts)}
            states = {name: [part.metric_state for part in parts] for name, parts in updated.items()}
            found = world.run_on_main(partial(self._merged, world.gather_on_main(_on("cpu", states))))
        else:
            found = self._values()
        self.reset()  # lists hold the device's memory
        return found

    def _merged(self, ranks: list[dict[str, list[dict[str, Any]]]]) -> dict[str, float]:
        ranks = _on(self._device, ranks)
        for name, metric in self._metrics.items():
            for part, *states in zip(_parts(metric), *(rank[name] for rank in ranks if name in rank), strict=True):
                for key, reduction in part._reductions.items():
                    whole = [state[key] for state in states]
                    if isinstance(whole[0], list):
                        setattr(part, key, [each for entries in whole for each in entries])
                    else:
                        setattr(part, key, (reduction or torch.Tensor.clone)(torch.stack(whole)))
        return self._values()

    def _values(self) -> dict[str, float]:
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            by_class = name in self._named and getattr(metric, "average", None) == "none"
            value = _macro(metric) if by_class else metric.compute()
            found |= (
                {f"{name}_{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
            )
        for name, value in found.items():
            try:
                found[name] = float(value)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"the metric {name} is not a scalar; for one value per class, wrap it in torchmetrics' "
                    "ClasswiseWrapper(metric), otherwise choose an average"
                ) from error
        return found

    def _ready(self, metric: Metric) -> Metric:
        """Return a metric on the device, with states in fp64 where there is any, and without an exchange of its own."""
        from torchmetrics import MetricCollection

        for part in metric.modules():
            if isinstance(part, MetricCollection):  # else metrics whose first states are equal share them for ever
                part._enable_compute_groups = False
        for part in _parts(metric):
            part.distributed_available_fn = None
            part.set_dtype(kind_of(self._device).wide)
        return metric.to(self._device)


def _macro(metric: Any) -> Tensor:
    """Return the mean over the classes that occur; torchmetrics' own counts the others as 0."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No positive samples|No negative samples")
        values = metric.compute().cpu()
    target = torch.cat(metric.target).cpu()
    counts = target.sum(0) if target.ndim > 1 else torch.bincount(target, minlength=len(values))
    return values[(counts > 0) & (counts < len(target))].mean()


def _parts(metric: Metric) -> list[Metric]:
    """Return a metric and those inside of it, where it is a wrapper or a MetricCollection."""
    return [part for part in metric.modules() if hasattr(part, "update_called")]


def _rises(name: str, metrics: dict[str, Any]) -> bool | None:
    """Return whether the highest value is the best of what metrics, or classes of them, report by a name."""
    for own, of in metrics.items():
        if name != own and not name.startswith(f"{own}_"):
            continue
        if hasattr(of, "items"):  # a MetricCollection
            return _rises(name.removeprefix(f"{own}_"), dict(of.items()))
        from torchmetrics.wrappers.abstract import WrapperMetric

        for part in _parts(of) if isinstance(of, WrapperMetric) else [of]:
            if part.higher_is_better is not None:
                return bool(part.higher_is_better)
    return None


def _on(device: Any, states: Any) -> Any:
    """Return nested states with their tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), states)
