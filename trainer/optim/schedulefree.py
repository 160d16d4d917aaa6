"""Schedule-free AdamW: the optimizer averages its weights itself, in the place of a schedule.

Defazio et al., "The Road Less Scheduled", 2024. Gradients are taken at y, between the average x and the fast weights z.
The model (or its masters) holds y, the optimizer's state z; x, which is evaluated and exported, follows from both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import schedulefree
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.errors import UserError
from trainer.optim.ema import WeightAverage, schedule_free_average


class AdamWScheduleFree(schedulefree.AdamWScheduleFree):
    """The library's, always in its training mode; its warm-up is left to ``schedule=constant``.

    (Its own ``eval`` and ``train`` change the weights by a rounding each time, so that training would depend on how
    often it is evaluated. ``ScheduleFreeAverage`` is used instead.)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        foreach: bool = True,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, **options, r=r, weight_lr_power=weight_lr_power, foreach=foreach)
        self.train()

    def average(
        self, model: nn.Module, changed: Iterable[tuple[str, nn.Parameter]], kept: dict[str, nn.Parameter]
    ) -> ScheduleFreeAverage:
        """Return the averaged weights.

        Args:
            model: in training.
            changed: what this optimizer changes, by the names of the model's parameters.
            kept: the fp32 masters among it that exist between steps.

        Raises:
            UserError: the model has batch norm, whose statistics are not those of the averaged weights.
        """
        if any(isinstance(module, _NormBase) and module.track_running_stats for module in model.modules()):
            raise UserError(
                "optimizer.name=AdamWScheduleFree evaluates averaged weights, for which the running statistics of "
                "batch norm are wrong; use another optimizer, with ema=default for averaged weights"
            )
        return ScheduleFreeAverage(model, changed, kept, self)


class ScheduleFreeAverage(WeightAverage):
    """x of a schedule-free optimizer, fp32, computed when it is needed, see ``schedule_free_average``."""

    from_optimizer = True

    def __init__(
        self,
        model: nn.Module,
        changed: Iterable[tuple[str, nn.Parameter]],
        kept: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._live = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._sources = self._live | kept
        self._changed = dict(changed)

    @property
    @torch.no_grad()
    def _averages(self) -> dict[str, Tensor]:  # type: ignore[override]
        beta = {id(each): group["betas"][0] for group in self._optimizer.param_groups for each in group["params"]}
        averages = {}
        for name, source in self._sources.items():
            own = self._changed[name]
            averages[name] = source.detach().float()
            if "z" in (state := self._optimizer.state.get(own, {})):  # not before the first step
                averages[name] = schedule_free_average(source.detach(), state["z"], beta[id(own)])
        return averages

    def update(self, step: int) -> None:
        """Do nothing: the optimizer has done it."""

    def held(self) -> dict[str, Tensor]:
        """Return nothing: a checkpoint has y and z."""
        return {}

    def buffers(self) -> list[Tensor]:
        """Return nothing: buffers are not averaged."""
        return []
