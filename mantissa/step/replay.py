"""The passes and the update of a step, taken any number of times from the same start, in any format."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from mantissa.errors import UsageError
from mantissa.formats import FP32, TF32, Format, plain
from mantissa.step.batch import Batch, map_tensors
from mantissa.step.flags import flags_of
from mantissa.step.step import Built, Step
from mantissa.step.trace import Op, Trace, user_line
from mantissa.step.updates import UpdateMeter
from mantissa.step.widened import Widened
from mantissa.tensors import (
    finite,
    in_dtype,
    moments,
    perturbed,
    random_state,
    set_random_state,
    unregistered,
)

Gradients = dict[str, Tensor]
"""True gradients of a step by parameter, fp64 and dense, and its loss by an empty name."""
LEAST_SCALE = 2.0**-10
"""Loss scale below which a skipped step is not tried again."""
_STATE = (int, float, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Types of what a module may keep from one forward pass to the next, besides tensors."""


@dataclass
class ReplayResult:
    """What a replay of a step leaves. The buffers are the model's own, and change with the next run."""

    loss: Tensor
    """Loss of the whole step, fp32 scalar."""
    correction: float
    """Factor that the gradients still need besides the inverse of the loss scale."""
    gradients: dict[str, Tensor]
    """Gradients that the optimizer is given, by parameter; masters' own where there are some."""
    buffers: dict[str, Tensor]
    before: dict[str, Tensor]
    """Buffers that the step started from."""

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Loss, gradients and buffers by name: all that must be finite."""
        return {"loss": self.loss} | self.gradients | self.buffers

    @cached_property
    def nonfinite(self) -> list[str]:
        """The names of the outputs that are not finite, and were before the step.

        Kept once read: read it before the next run, which changes the buffers. It is not computed with the result,
        because a mode that records the step's operators would record these, too.
        """
        return [
            name
            for name, tensor in self.outputs.items()
            if not finite(tensor) and (name not in self.before or finite(self.before[name]))
        ]


class Replay:
    """The forward and backward passes of a step in one format: taken any number of times, from the same start.

    Args:
        step: that is taken.
        format: in which.
        built: the model in it.
        as_run: whether it starts from the run's stored weights and loss scale.
        wide: the dtype of a reference, which every narrower one becomes; None: it is none.
    """

    def __init__(
        self, step: Step, format: Format, built: Built, as_run: bool = False, wide: torch.dtype | None = None
    ) -> None:
        self.format, self.built = format, built
        self.model, self.masters, self.optimizer = built.model, built.masters, built.optimizer
        self.fp32_modules = built.fp32_modules
        self.changed = False
        """Whether the loss has changed a batch that it was given."""
        self.own_autocast: torch.dtype | None = None
        """Dtype of the autocast that the loss, or the model, enters itself; None: none."""
        wide = wide or format.wide
        self._as_run, self._wide, self._in_loss = as_run, wide, False
        if wide is not None:
            cast_training(self.model, self.optimizer, wide)
        for parameter in self.model.parameters() if step.unhooked else ():
            (parameter._backward_hooks or {}).clear()
            (parameter._post_accumulate_grad_hooks or {}).clear()
        self._states = _states(self.model)
        self._parameters = set(map(id, self.model.parameters()))
        self._take(step)
        self.scale = step.scale if as_run else 1.0
        """Loss scale, which may be set."""
        self.start()

    @classmethod
    def in_format(cls, step: Step, format: Format) -> Self:
        """Return a replay in a format, on fp32 weights, eager and in one process, with a loss scale of 1.

        Modules and operators that compute in fp32 do so where the format has 16 bits.

        Raises:
            FormatError: the model cannot.
        """
        step = step if format.half is not None else replace(step, fp32_modules=[], fp32_ops=[])
        return cls(step, format, step.build(format, as_run=False))

    @classmethod
    def as_run(cls, step: Step) -> Self:
        """Return a replay as the run takes the step, eager: with its stored weights and its loss scale."""
        return cls(step, step.format, step.build(step.format, as_run=True), as_run=True)

    @classmethod
    def reference(cls, step: Step, dtype: torch.dtype = torch.float32) -> Self:
        """Return a replay in fp32 or fp64, in which explicit casts to narrower formats have no effect either."""
        exact, step = plain(FP32), replace(step, fp32_modules=[], fp32_ops=[])
        return cls(step, exact, step.build(exact, as_run=False), wide=dtype)

    @classmethod
    def exact(cls, step: Step) -> Self:
        """Return the replay that a step's format is compared with."""
        return cls.reference(step, step.exact_dtype)

    def _take(self, step: Step) -> None:
        """Start from what a step starts from."""
        self.step = step
        self.weights = step.stored if self._as_run else step.weights
        """Weights that the model starts from."""

    def after(self, count: int) -> Step:
        """Return the step that follows ``count`` steps, which this replay has trained, from their weights."""
        step, kept = self.step, self.masters or self.model
        return replace(
            step,
            number=step.number + count,
            microbatches=step.following(count + 1)[-1],
            weights={
                name: in_dtype(weight.detach().cpu(), torch.float32).clone() for name, weight in kept.named_parameters()
            },
            stored={name: tensor.detach().to("cpu", copy=True) for name, tensor in self.model.named_parameters()},
            buffers={name: buffer.detach().to("cpu", copy=True) for name, buffer in self.model.named_buffers()},
            scale=self.scale,
        )

    def of(self, step: Step) -> Replay:
        """Return a replay in the same model, at the same scale, of a step that starts from other tensors."""
        other = copy.copy(self)
        other._take(step)
        return other

    @torch.no_grad()
    def start(self) -> None:
        """Restore the weights, the buffers and the generators, and clear the gradients; no mode of torch sees it."""
        with _disable_current_modes():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name])
                parameter.grad = None
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.step.buffers[name])
            if self.masters is not None:
                for name, master in self.masters.persistent_weights():
                    master.copy_(self.step.weights[name])
                for _, master in self.masters.named_parameters():
                    master.grad = None
            self.restore_generators()
            _restore(self._states)

    def keep_attributes(self) -> None:
        """Let every run start from the attributes that the model's modules have now."""
        self._states = _states(self.model)

    def restore_generators(self) -> None:
        """Give all random generators the state from which the step starts."""
        set_random_state(self.step.generators, self.step.device)

    def run(self, microbatches: list[Batch] | None = None) -> ReplayResult:
        """Take the passes of the step, from its start.

        Args:
            microbatches: a part of the step, whose loss is divided as that of the whole; None: all of them.
        """
        # Forward and backward.
        self.start()
        whole = self.step.microbatches
        with self.around():
            loss, correction = self.gradients(whole if microbatches is None else microbatches, whole)

        # What they leave.
        if self.masters is not None:
            self.masters.take_gradients()
        changed = (self.masters or self.model).named_parameters()
        gradients = {name: parameter.grad for name, parameter in changed if parameter.grad is not None}
        return ReplayResult(loss, correction, gradients, dict(self.model.named_buffers()), self.step.buffers)

    def run_with_backoff(self, scales: Sequence[float] = ()) -> ReplayResult:
        """Run with one loss scale after another until all is finite; return the last result, whose scale stays.

        Args:
            scales: to try; empty: those of the step.
        """
        for scale in scales or self.step.scales:
            self.scale = scale
            result = self.run()
            if not result.nonfinite or "loss" in result.nonfinite:  # no scale cures a forward pass
                break
        return result

    def gradients(self, microbatches: list[Batch], whole: list[Batch]) -> tuple[Tensor, float]:
        """Add up the gradients of microbatches, of the loss times ``scale``, and change nothing but buffers.

        Args:
            microbatches: those that are taken.
            whole: all of the step, by whose number the loss is divided.

        Returns:
            ``loss`` and ``correction`` of a result.
        """
        divisor, correction = self.step.loss_divisor(self.step.count(whole), self.format)
        total: Tensor | None = None
        for batch in microbatches:
            share = self.loss(batch) * self.step.loss_factor / divisor
            if share.requires_grad:
                self._backward(share * self.scale)
            total = share.detach() if total is None else total + share.detach()
        assert total is not None
        total = total if correction == 1 else total * correction
        return total.float() if total.itemsize < 4 else total, correction

    def _backward(self, loss: Tensor) -> None:
        """Give the model its gradients, and leave those of other leaves as they are, such as a discriminator's."""
        others = [leaf for leaf in leaves(loss) if id(leaf) not in self._parameters]
        if any(id(leaf) in self.step.originals for leaf in others):
            raise UsageError(
                "a gradient goes to the model that was given, and not to its copy: let the loss use the model that it "
                "is called with, and no forward keep a method of the model from before it was replaced"
            )
        if others and (hidden := unregistered(self.model, self.optimizer, set(others).__contains__)):
            raise UsageError(hidden)
        kept = [other.grad for other in others]
        for other in others:
            other.grad = None
        try:
            loss.backward()
        finally:
            for other, gradient in zip(others, kept, strict=True):
                other.grad = gradient

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of one microbatch in the format, a scalar in the dtype in which it was computed."""
        wide, changes = self._wide, self.step.changes_batches

        def copied(tensor: Tensor) -> Tensor:
            """Return a tensor in no fewer bits than a reference has, and a copy where the loss may change it."""
            widens = tensor.is_floating_point() and wide is not None and tensor.itemsize <= wide.itemsize
            given = tensor.to(wide) if widens else tensor
            return tensor.clone() if given is tensor and changes else given

        # Autocast of the format is no autocast that the loss enters itself.
        batch = map_tensors(batch, copied)
        self._in_loss = False
        with self.built.autocast():
            self._in_loss = True
            loss = self.built.loss(batch)
            self._in_loss = False
        self.changed |= changes and any(tensor._version for tensor in batch.values())
        return loss

    def _uncast(self, op: Op) -> Any:
        if op.asks_for_half and str(user_line() or "") in self.step.uncast:
            op.kwargs = op.kwargs | {"dtype": torch.float32}
        return op.run()

    def train(self, steps: Iterable[list[Batch]]) -> list[float]:
        """Train some steps from this one's start, as the run does; one that is skipped is taken at half the scale.

        Args:
            steps: the microbatches of each.

        Returns:
            The loss of each; NaN where it would be skipped for ever.
        """
        self.start()
        self.built.stand_before(self.step)
        return [self._train_step(microbatches) for microbatches in steps]

    def _train_step(self, microbatches: list[Batch]) -> float:
        scaled, masters = self.format.needs_loss_scale, self.masters.named_parameters() if self.masters else ()
        generators, states = (random_state(self.step.device), _states(self.model)) if scaled else ({}, [])
        changed = [*self.model.parameters(), *(master for _, master in masters)]
        while True:
            for weight in changed:
                weight.grad = None

            # As ``run``, but from the weights of the step before. (Masters take their gradients in the update.)
            with self.around():
                loss, correction = self.gradients(microbatches, microbatches)
            if not scaled or all(finite(weight.grad) for weight in changed if weight.grad is not None):
                break
            if self.scale <= LEAST_SCALE or not self.step.least_scale:
                return math.nan

            # Again at half the scale, as a dynamic scaler would, with the same dropout.
            self.scale /= 2
            set_random_state(generators, self.step.device)
            _restore(states)
        self.update(correction)
        return loss.item()

    def update(self, correction: float, meter: UpdateMeter | None = None) -> None:
        """Change the weights by the gradients of the last passes; a meter measures how."""
        with self.around():
            self.built.end_step(self.scale, correction, meter)

    def true_gradients(self, microbatches: list[Batch] | None = None) -> Gradients:
        """Run, and return the gradients without a loss scale; for ``microbatches`` see ``run``."""
        result = self.run(microbatches)
        factor = result.correction / self.scale
        gradients = {
            name: in_dtype(gradient.to_dense() if gradient.is_sparse else gradient, torch.float64) * factor
            for name, gradient in result.gradients.items()
        }
        return gradients | {"": result.loss.double()}

    def forward(self, *modes: AbstractContextManager[Any]) -> Tensor:
        """Return the loss of a few samples, from the start of the step, in some modes."""
        self.start()
        with ExitStack() as contexts:
            for mode in (*modes, self.around(), torch.enable_grad()):
                contexts.enter_context(mode)
            return self.loss(self.step.first_samples()[0])

    def perturb(self, unit: float, seed: int, steps: Iterable[list[Batch]] = ()) -> Iterator[list[Batch]]:
        """Start from weights changed by ±``unit``, relative to their size, and return steps with inputs changed so."""
        generator, dtype = torch.Generator().manual_seed(seed), self._wide or torch.float32
        self.weights = {
            name: perturbed(in_dtype(weight, dtype), unit, generator) for name, weight in self.step.weights.items()
        }
        change = partial(perturbed, unit=unit, generator=generator, data=True)
        return ([map_tensors(batch, change) for batch in microbatches] for microbatches in steps)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Return what passes and updates run in: casts of the code left out, or all redirected in a wider reference.

        Autocast that the code enters itself is noted, and is that of the format, and so are torch's flags of fp32
        products. Only the step as the run takes it has what the run has.
        """
        enter, half, kind = torch.autocast.__enter__, self.format.half, self.step.device.type
        as_written = self._as_run and self.format is self.step.written_in

        def enter_other(autocast: Any) -> Any:
            if not autocast._enabled or autocast.device != kind:
                return enter(autocast)
            if self._in_loss:
                self.own_autocast = self.own_autocast or autocast.fast_dtype
            if as_written:
                return enter(autocast)
            with patch.multiple(autocast, _enabled=half is not None, fast_dtype=half or autocast.fast_dtype):
                return enter(autocast)

        with ExitStack() as contexts:
            if not as_written or self.format.number is TF32:  # which the flags alone make what it is
                contexts.enter_context(flags_of(self.format.number))
            contexts.enter_context(patch.object(torch.autocast, "__enter__", enter_other))
            if self.step.uncast:
                contexts.enter_context(Trace(None, run=self._uncast))
            if self._wide is not None:
                contexts.enter_context(Widened(self._wide))
            yield


def cast_training(model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype) -> None:
    """Cast weights, buffers and the optimizer's state, as ``model.to(dtype)`` before training does."""
    model._apply(lambda tensor: in_dtype(tensor, dtype))
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        state.update({key: value.to(dtype) for key, value in moments(state, parameter).items()})


def _states(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return what a forward pass may change besides buffers: numbers, tensors and generators that modules keep."""
    return [
        (
            module,
            {
                name: copy.deepcopy(value)
                for name, value in vars(module).items()
                if isinstance(value, _STATE) or (isinstance(value, Tensor) and not value.requires_grad)
            },
        )
        for module in model.modules()
    ]


def _restore(states: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, state in states:
        vars(module).update(copy.deepcopy(state))


def leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors in which a backward pass leaves gradients."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]
