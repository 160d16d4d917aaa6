"""What the first optimizer step shows of a training's precision, and no tensor tells later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from mantissa.tensors import changed_by, local, measurable, wide_dtype
from mantissa.watch.hooks import Listener, observing
from mantissa.watch.scale import LossScale


class FirstStep:
    """Sees what a setup needs and no tensor tells later, from before the first step on until ``close``.

    Args:
        model: without the wrappers of DDP and torch.compile.
        optimizer: torch's own, not a library's wrapper of it.
        scale: of its losses.
        hooked: whether hooks on submodules do no harm; they would, where the model is compiled.
        missed: hears why something cannot be seen.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        hooked: bool,
        missed: Callable[[Exception], None],
    ) -> None:
        self.model, self.optimizer, self.scale, self._missed = model, optimizer, scale, missed

        # As the model was before the step.
        self.device = next(model.parameters()).device
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.ties = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        self.began = {id(parameter): parameter._version for parameter in model.parameters()}
        named = model.named_parameters()
        self.frozen = [(name, weight, weight._version) for name, weight in named if not weight.requires_grad]

        # What the passes show.
        self.autocast: dict[str, torch.dtype | None] = {}
        """Autocast dtype in the forward passes, by submodule that multiplies; None: off in all."""
        self.islands: set[str] = set()
        """Those that were called outside of autocast by a module that was called in it."""
        self._around: list[bool] = []
        """Whether each module that has not returned yet was called in autocast, from the outermost to the innermost."""
        self.calls: Counter[str] = Counter()
        self._scaled: dict[int, torch.Tensor] = {}
        """Norm of each gradient as backward left it, with the loss scale."""
        self._added: dict[int, int] = {}
        """Updates of the loss scale when something was added to the gradient of each weight last."""
        self.mixes_scales = False
        """Whether gradients of several loss scales were added up."""

        # What stands before the update.
        self.gradients: Counter[torch.dtype] = Counter()
        self.idle = False
        """Whether the model's weights had no gradient when the optimizer stepped, or only gradients of 0."""
        self.sparse: list[str] = []
        self.in_autocast = self.unscaled = False
        """Whether the optimizer steps inside of an autocast that caches weights; whether gradients have no scale."""
        self.clipped_to = 0.0
        """Norm to which gradients were clipped while they had the loss scale; 0: they were not."""
        self.updates = 1
        """Number of times that the optimizer stepped before the step was said to be over."""
        self.losses: set[torch.dtype] = set()
        """Dtypes of its losses; empty: they are not known."""

        self._hooks = ExitStack()
        for name, module in model.named_modules() if hooked else ():
            multiplies = any(weight.ndim > 1 for weight in module.parameters(recurse=False))
            if multiplies and not isinstance(module, nn.Embedding):
                self._hooks.callback(module.register_forward_pre_hook(Listener(partial(self._called, name))).remove)
            if next(module.children(), None) is not None:
                self._hooks.callback(module.register_forward_pre_hook(Listener(self._entered)).remove)
                self._hooks.callback(module.register_forward_hook(Listener(self._left), always_call=True).remove)
        scaled = [weight for weight in changed_by(optimizer) if weight.requires_grad and weight.is_leaf]
        for weight in scaled if hooked and scale.enabled else ():
            self._hooks.callback(weight.register_hook(Listener(partial(self._accumulates, weight))).remove)
            self._hooks.callback(weight.register_post_accumulate_grad_hook(Listener(self._accumulated)).remove)

    @observing
    def _called(self, name: str, module: nn.Module, arguments: Any) -> None:
        kind = next(module.parameters()).device.type
        if torch._C._current_autograd_node() is None and torch.is_grad_enabled():  # not one that is recomputed
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            self.autocast[name] = dtype or self.autocast.get(name)  # out of it in one pass of several, on purpose
            self.calls[name] += 1
            if dtype is None and self._around and self._around[-1]:
                self.islands.add(name)

    @observing
    def _entered(self, *_: Any) -> None:
        self._around.append(torch.is_autocast_enabled(self.device.type))

    @observing
    def _left(self, *_: Any) -> None:
        self._around.pop()

    @observing
    @torch.no_grad()
    def _accumulates(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        before, now = self._added.get(id(parameter)), self.scale.updates
        self._added[id(parameter)] = now
        if before not in (None, now) and measurable(parameter.grad) and bool(parameter.grad.any()):  # and not cleared
            self.mixes_scales = True

    @observing
    @torch.no_grad()
    def _accumulated(self, parameter: torch.Tensor) -> None:
        if measurable(parameter.grad):
            self._scaled[id(parameter)] = torch.linalg.vector_norm(parameter.grad, dtype=wide_dtype([parameter.grad]))

    def before_update(self) -> None:
        """Look at the gradients, just before the optimizer's step."""
        parameters = changed_by(self.optimizer)
        given = [parameter for parameter in parameters if parameter.grad is not None]
        self.gradients = Counter(parameter.grad.dtype for parameter in given if parameter.grad is not None)
        trains = any(weight.requires_grad for weight in parameters)
        trains = trains and all(id(weight) in self.names for weight in parameters)
        values = [local(gradient) if measurable(gradient := weight.grad) else None for weight in given]
        self.idle = trains and not any(value is None or bool(value.any()) for value in values)
        self.sparse = [self.names.get(id(dense), "a master") for dense in given if not measurable(dense.grad)]
        in_autocast = any(map(torch.is_autocast_enabled, {weight.device.type for weight in parameters}))
        self.in_autocast = in_autocast and torch.is_autocast_cache_enabled()
        if self.scale.enabled:
            self.unscaled = self.scale.unscaled
            self._look_for_clipping([weight for weight in given if id(weight) in self._scaled])

    def _look_for_clipping(self, parameters: list[nn.Parameter]) -> None:
        """Compare gradients with those that backward left.

        Clipping shrinks them to a norm of about 1, which dividing by a loss scale makes far smaller. Clipped after
        that, they would have that norm.
        """
        if not self.unscaled or not parameters:
            return
        scale, left = self.scale.read(), getattr(self.optimizer, "grad_scale", None)
        before = torch.stack([self._scaled[id(weight)] for weight in parameters]).norm().item()
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        now = torch.stack(torch._foreach_norm(gradients, dtype=wide_dtype(gradients))).norm().item()
        clipped = now if left is not None else now * scale
        if clipped < 0.1 * before and clipped / scale < scale**-0.5:
            self.clipped_to = clipped

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that train, by name."""
        named = self.model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad and weight.is_floating_point()}

    @property
    def masters(self) -> bool:
        """Whether the optimizer changes fp32 tensors in the place of the model's 16-bit ones."""
        others = [weight for weight in changed_by(self.optimizer) if id(weight) not in self.names]
        half = any(weight.dtype.itemsize == 2 for weight in self.trainable.values())
        return half and bool(others) and all(weight.dtype == torch.float32 for weight in others)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
