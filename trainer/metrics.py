"""What an evaluation reports: a recipe's sums, and metrics of torchmetrics, exact over microbatches and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torchmetrics import Metric

    from trainer.parallel.world import World
    from trainer.recipe import LossOutput, Recipe

_SHARES = ("accuracy", "top1", "top5")
_MEAN = 1
"""Of torch's losses in the graph: at::Reduction."""


class Named(NamedTuple):
    """A choice of ``metrics=``, for classifiers."""

    kind: str
    """The class ``Multiclass…`` of torchmetrics.classification."""
    options: dict[str, Any]
    rises: bool = True
    """Whether the highest value is the best."""


NAMED = {
    "accuracy": Named("Accuracy", {"average": "micro"}),
    "precision_macro": Named("Precision", {"average": "macro"}),
    "recall_macro": Named("Recall", {"average": "macro"}),
    "f1_macro": Named("F1Score", {"average": "macro"}),
    "f1_weighted": Named("F1Score", {"average": "weighted"}),
    "auroc": Named("AUROC", {"average": "macro"}),
    "average_precision": Named("AveragePrecision", {"average": "macro"}),
    "mcc": Named("MatthewsCorrCoef", {}),
    "kappa": Named("CohenKappa", {}),
    "ece": Named("CalibrationError", {"n_bins": 15, "norm": "l1"}, rises=False),
}


def check_named(names: Iterable[str]) -> None:
    """Raise UserError where a name is not in ``NAMED``."""
    for name in names:
        if name not in NAMED:
            raise UserError(f"metrics=[{name}] is not one of {', '.join(NAMED)}{nearest(name, NAMED)}")


def reported(recipe: Recipe, sums: dict[str, float], targets: int) -> dict[str, float]:
    """Return what a recipe reports of the sums of an evaluation.

    Args:
        recipe: whose they are.
        sums: ``loss``, and by name what its loss returned as ``metric_sums``.
        targets: by ``count_targets``.

    Raises:
        UserError: more answers are right than there are targets.
    """
    others = {name: value for name, value in sums.items() if name != "loss"}
    found = recipe.report(sums["loss"] / max(1, targets), others, max(1, targets))
    for name in _SHARES:
        if found.get(name, 0) > 1:
            raise UserError(
                f"{name} is {found[name]:.3g}, and cannot be above 1: count_targets of recipe={recipe.name} counts "
                f"{targets} targets, fewer than its loss adds up"
            )
    return found


def averages(loss: Tensor) -> bool:
    """Return whether the last operation of a loss is a mean, as of ``F.cross_entropy`` without ``reduction="sum"``."""
    node = loss.grad_fn
    while node is not None and node.name().startswith(("ToCopy", "View", "Squeeze", "Clone")):
        node = node.next_functions[0][0]
    return node is not None and (node.name().startswith("Mean") or getattr(node, "_saved_reduction", None) == _MEAN)


class Metrics:
    """The torchmetrics objects of a run, which every evaluation begins anew.

    Only evaluation updates them: most wait for the device, or keep all predictions.

    Args:
        recipe: which may have its own.
        datasets: what ``Recipe.metrics`` takes.
        names: further ones, keys of ``NAMED``; they are made when the number of classes is known.
        device: of the predictions.
    """

    def __init__(self, recipe: Recipe, datasets: Any, names: list[str] | None, device: torch.device) -> None:
        self._recipe, self._names, self._device = recipe, names or [], device
        self._metrics = {name: self._ready(metric) for name, metric in recipe.metrics(datasets).items()}

    def __bool__(self) -> bool:
        return bool(self._metrics or self._names)

    def falls(self, metric: str) -> bool:
        """Return whether the lowest value of a metric (such as ``valid/ece``) is the best."""
        name = metric.rpartition("/")[2]
        for own, of in self._metrics.items():
            if (name == own or name.startswith(f"{own}_")) and of.higher_is_better is not None:
                return not of.higher_is_better
        return not NAMED[name].rises if name in NAMED else self._recipe.falls(name)

    def reset(self) -> None:
        """Begin an evaluation."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, output: LossOutput) -> None:
        """Take in a microbatch.

        Raises:
            UserError: the recipe's loss returns no predictions, or not those that ``metrics=`` needs.
        """
        import torch

        predictions = output.predictions
        if isinstance(predictions, torch.Tensor) and predictions.dtype in (torch.bfloat16, torch.float16):
            predictions = predictions.float()
        for name in self._names:
            if name not in self._metrics:
                self._metrics[name] = self._ready(self._of_classes(name, output))
        if self and predictions is None:
            raise UserError(f"recipe={self._recipe.name} has metrics, but its loss returns no predictions and targets")
        for metric in self._metrics.values():
            metric.update(predictions, output.targets)

    def names_in(self, output: LossOutput) -> list[str]:
        """Return the names of all that is reported of an evaluation with such microbatches; a check before training."""
        self.reset()
        self.update(output)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes without a sample
            names = [*_sums_in(self._recipe, output), *self._values()]
        self.reset()
        return names

    def values(self, world: World) -> dict[str, float]:
        """Return the values over what all ranks were updated with, and forget that; every rank has to call it.

        torchmetrics' own exchange would wait for ever where ranks have lists of different lengths.
        """
        found = self._values() if not self or world.size == 1 else self._of_ranks(world)
        self.reset()  # what lists hold of the device's memory
        return found

    def _of_ranks(self, world: World) -> dict[str, float]:
        updated = {name: metric for name, metric in self._metrics.items() if metric.update_called}
        states = {name: [_on_host(part.metric_state) for part in _parts(metric)] for name, metric in updated.items()}
        ranks = world.gather_on_first(states)
        return world.on_first(partial(self._merged, ranks))

    def _merged(self, ranks: list[dict[str, list[dict[str, Any]]]]) -> dict[str, float]:
        import torch

        for name, metric in self._metrics.items():
            for part, *states in zip(_parts(metric), *(rank[name] for rank in ranks if name in rank), strict=True):
                for key, reduction in part._reductions.items():
                    values = [state[key] for state in states]
                    if isinstance(values[0], list):
                        merged = [each.to(self._device) for value in values for each in value]
                    else:
                        stacked = torch.stack(values).to(self._device)
                        merged = stacked if reduction is None else reduction(stacked)
                    setattr(part, key, merged)
        return self._values()

    def _values(self) -> dict[str, float]:
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            value = metric.compute()
            found |= (
                {f"{name}_{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
            )
        for name, value in found.items():
            if value.numel() != 1:
                raise UserError(
                    f"the metric {name} has {value.numel()} values; set its average, or wrap it in torchmetrics' "
                    "ClasswiseWrapper"
                )
        return {name: float(value) for name, value in found.items()}

    def _ready(self, metric: Metric) -> Metric:
        """Return a metric on the device, with states in fp64 where there is any, and without an exchange of its own."""
        import torch

        for part in _parts(metric):
            part.distributed_available_fn = None  # type: ignore[assignment]
            if self._device.type != "mps":
                part.set_dtype(torch.float64)
        return metric.to(self._device)

    def _of_classes(self, name: str, output: LossOutput) -> Metric:
        """Return the metric of a name for the classes that these predictions are of."""
        shares, labels, known = output.predictions, output.targets, _sums_in(self._recipe, output)
        reports = f"recipe={self._recipe.name} reports {', '.join(known)}"
        if name in known:
            raise UserError(f"metrics=[{name}] has no effect: {reports} already; leave it out")
        shapes = getattr(shares, "ndim", None), getattr(labels, "ndim", None)
        if shapes != (2, 1) or not ((shares.sum(1) - 1).abs() < 1e-2).all():
            raise UserError(
                f"metrics=[{name}] needs the probabilities of classes, which {self._recipe.name}'s loss does not "
                f"return as predictions; leave it out: {reports}"
            )
        from torchmetrics import classification

        choice = NAMED[name]
        metric: Metric = getattr(classification, f"Multiclass{choice.kind}")(
            num_classes=shares.shape[1], validate_args=False, **choice.options
        )
        return metric


def _sums_in(recipe: Recipe, output: LossOutput) -> list[str]:
    return list(recipe.report(0.0, dict.fromkeys(output.metric_sums, 0.0), 1))


def _parts(metric: Metric) -> list[Metric]:
    """Return a metric and those inside of it, where it is a wrapper."""
    return [part for part in metric.modules() if hasattr(part, "metric_state")]


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [each.cpu() for each in value] if isinstance(value, list) else value.cpu() for key, value in state.items()
    }
