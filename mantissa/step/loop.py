"""Any model, loss function and batches as a step that can be replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from mantissa.errors import FormatError, UsageError
from mantissa.formats import Format, plain
from mantissa.step.batch import Batch
from mantissa.step.islands import cast_inputs, keep_fp32
from mantissa.step.operators import OperatorPolicy
from mantissa.step.replay import LEAST_SCALE, cast_training
from mantissa.step.step import Step
from mantissa.step.updates import UpdateMeter
from mantissa.tensors import in_dtype, random_state

Loss = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch to the mean loss, a scalar."""
_FIRST_SCALE = 65536.0
"""Loss scale with which torch's scaler begins."""


class LoopBatch(dict[str, Tensor]):
    """The tensors of one batch by name, and how the batch is made of them again."""

    def __init__(self, batch: Any) -> None:
        nested = dict(batch) if isinstance(batch, Mapping) else batch  # also what torch does not know as a dict
        leaves, self._structure = tree_flatten_with_path(nested)
        self._leaves = [(keystr(path), leaf) for path, leaf in leaves]
        super().__init__({name: leaf for name, leaf in self._leaves if isinstance(leaf, Tensor)})

    def whole(self) -> Any:
        """Return the batch as it was given, with the tensors of now; a loss may ask for gradients of its own."""
        tensors = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in self.items()}
        return tree_unflatten([tensors.get(name, leaf) for name, leaf in self._leaves], self._structure)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopStep(Step):
    """A step of a loop that somebody else wrote."""

    model: nn.Module
    """A copy of the model, which is copied again for each replay."""
    optimizer: torch.optim.Optimizer | None
    """That of the copy; None: the weights stay."""
    mean_loss: Loss
    first: int
    """Number of the step that the batches begin with."""
    steps: list[list[Batch]]
    """Microbatches of each step; after the last one they begin anew."""
    given_scale: float | None
    fixed_scale: bool
    enters_autocast: bool = False
    """Whether the loss or the model enters autocast itself, so that nothing is entered around it."""

    @classmethod
    def copied(
        cls,
        model: nn.Module,
        loss: Loss,
        batches: Sequence[Any],
        format: Format,
        optimizer: torch.optim.Optimizer | None = None,
        scale: float | None = None,
        fixed_scale: bool = False,
        accumulate: int = 1,
        number: int = 1,
        generators: dict[str, Tensor] | None = None,
    ) -> Self:
        """Copy what a step starts from; the arguments are those of ``mantissa.examine``.

        Raises:
            FormatError: the model or the optimizer cannot be copied, and how to make it so.
        """
        # A copy of the model and of its optimizer.
        original = getattr(model, "_orig_mod", model)
        device = next(original.parameters()).device
        generators = generators or random_state(device)
        try:
            its_model, its_optimizer = _copy(original, optimizer)
        except Exception as error:  # of many kinds: what is in a model decides
            raise FormatError(
                f"the model or its optimizer cannot be copied, so the step cannot be replayed ({error}); "
                "give a model that copy.deepcopy can copy, such as the one before it is wrapped or sharded"
            ) from error

        # The optimizer's weights in fp32, then the model's own in the dtype that it trains in.
        parameters = dict(its_model.named_parameters())
        weights = {name: in_dtype(weight.detach(), torch.float32).clone() for name, weight in parameters.items()}
        if format.half_weights is not None:
            cast_training(its_model, its_optimizer, format.half_weights)

        # The batches as steps of some microbatches.
        flat: list[Batch] = [LoopBatch(batch) for batch in batches]
        steps = [flat[first : first + accumulate] for first in range(0, len(flat), accumulate)]

        # What is known of the optimizer and of the loss scale.
        groups = its_optimizer.param_groups if its_optimizer is not None else []
        state = its_optimizer.state if its_optimizer is not None else {}
        changed = {id(weight) for group in groups for weight in group["params"]}
        first_scale, least_scale = _scales(format, scale, fixed_scale)
        return cls(
            number=number,
            format=format,
            written_in=format,
            device=device,
            microbatches=steps[0],
            weights=weights,
            stored={name: weight.detach().clone() for name, weight in parameters.items()},
            buffers={name: buffer.detach().clone() for name, buffer in its_model.named_buffers()},
            generators=generators,
            moments={name: state[weight] for name, weight in parameters.items() if weight in state},
            scale=first_scale,
            least_scale=least_scale,
            eps=max((group.get("eps") or 0.0 for group in groups), default=0.0),
            optimized=frozenset(name for name, weight in parameters.items() if id(weight) in changed),
            different=len(steps) if optimizer is None else None,  # the weights stay
            compiles=original is not model or getattr(model, "_compiled_call_impl", None) is not None,
            changes_batches=True,  # until it is known
            originals=frozenset(map(id, original.parameters())),
            model=its_model,
            optimizer=its_optimizer,
            mean_loss=loss,
            first=number,
            steps=steps,
            given_scale=scale,
            fixed_scale=fixed_scale,
        )

    def inside_autocast(self, format: Format) -> Self:
        """Return this step in the format whose autocast the loss or the model enters itself."""
        scale, least_scale = _scales(format, self.given_scale, self.fixed_scale)
        return replace(
            self, format=format, written_in=format, enters_autocast=True, scale=scale, least_scale=least_scale
        )

    def build(self, format: Format, as_run: bool) -> LoopModel:
        # Another copy, with the weights in the dtype of the format.
        model, optimizer = _copy(self.model, self.optimizer)
        first = next(self.model.parameters())
        if not as_run or format is not self.written_in:
            cast_training(model, optimizer, format.weights)

        # Modules that compute in fp32, and inputs that fit weights in 16 bits.
        keep_fp32(model, self.fp32_modules, self.device.type, format.half_weights)
        given_half = first.dtype.itemsize == 2 and not as_run and format.autocast is None
        if format.half_weights is not None or given_half:
            cast_inputs(model, format.weights)  # such as the model's own, which the batches fit
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return LoopModel(self, format, model, optimizer)

    def batches(self, first: int, count: int) -> list[list[Batch]]:
        return [self.steps[(first - self.first + index) % len(self.steps)] for index in range(count)]

    def count(self, microbatches: list[Batch]) -> int:
        return len(microbatches)

    def loss_divisor(self, count: int, format: Format) -> tuple[float, float]:
        return count, 1.0

    def with_fp32_weights(self) -> Self:
        return self.in_format(plain(self.format.number))


def _scales(format: Format, given: float | None, fixed: bool) -> tuple[float, float]:
    """Return the loss scale of a step, and that down to which its scaler backs off."""
    scaled = format.needs_loss_scale
    scale = given if given is not None else _FIRST_SCALE if scaled else 1.0
    return scale, LEAST_SCALE if scaled and not fixed else 0.0


class LoopModel:
    """A copy of a loop's model and of its optimizer, in a format."""

    masters = clip = None

    def __init__(self, step: LoopStep, format: Format, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.fp32_modules = model, optimizer, step.fp32_modules
        self._loss, self._fp32_ops, self._device = step.mean_loss, step.fp32_ops, step.device.type
        self._format, self._enters_autocast = format, step.enters_autocast
        self._weights = list(model.parameters())

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch, LoopBatch)
        before = [weight.grad is None for weight in self._weights]
        loss = self._loss(self.model, batch.whole())
        if before != [weight.grad is None for weight in self._weights]:
            raise UsageError("loss(model, batch) calls backward itself; let it only return the loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            tensor = isinstance(loss, Tensor)
            what = f"a tensor of shape {list(loss.shape)}" if tensor else f"a {type(loss).__name__}"
            raise UsageError(f"loss(model, batch) must return a scalar tensor, the mean loss, and returned {what}")
        return loss

    def autocast(self) -> AbstractContextManager[Any]:
        contexts = ExitStack()
        contexts.callback(torch.clear_autocast_cache)  # inside of the caller's autocast it would keep old weights
        half = self._format.autocast
        enabled = half is not None and not self._enters_autocast
        contexts.enter_context(torch.autocast(self._device, dtype=half, enabled=enabled))
        if self._fp32_ops:
            contexts.enter_context(OperatorPolicy(self._device, self._fp32_ops, self._format.half_weights))
        return contexts

    def stand_before(self, step: Step) -> None:
        if not step.moments:
            _begin_anew(self.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * step.lr_factor

    def end_step(self, scale: float, correction: float, meter: UpdateMeter | None) -> None:
        if scale != 1:
            gradients = [weight.grad for weight in self._weights if weight.grad is not None]
            torch._foreach_mul_(gradients, 1 / scale)
        if meter is not None:
            meter.before()
        self.optimizer.step()
        if meter is not None:
            meter.after(1, torch.tensor(True))


def _begin_anew(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that a new one has."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
    for state in optimizer.state.values():  # torch 2.11 makes Adagrad's where it is built, and in no step
        state["step"].zero_()
        state["sum"].fill_(optimizer.defaults["initial_accumulator_value"])


def _copy(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copy both, with the hooks of parameters and with results that modules keep, which torch would leave out."""
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo = {id(tensor): tensor.detach().clone() for tensor in kept if tensor.grad_fn is not None}
    copied: tuple[nn.Module, torch.optim.Optimizer | None] = copy.deepcopy((model, optimizer), memo)
    for name in vars(optimizer).keys() - vars(copied[1]).keys() - {"step"} if optimizer is not None else ():
        setattr(copied[1], name, copy.deepcopy(getattr(optimizer, name), memo))  # which a schedule replaces, and torch

    # The hooks of parameters.
    for mine, its in zip(model.parameters(), copied[0].parameters(), strict=True):
        for hook in (mine._backward_hooks or {}).values():
            its.register_hook(hook)
        for hook in (mine._post_accumulate_grad_hooks or {}).values() if optimizer is not None else ():
            its.register_post_accumulate_grad_hook(hook)  # without an optimizer it may be one that steps in there

    # What a module of Lightning asks of its trainer, which copies leave out.
    if hasattr(model, "automatic_optimization"):
        instead: dict[str, Any] = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)
        if not model.automatic_optimization:
            instead |= dict.fromkeys(("optimizers", "manual_backward"), _refuse)
        vars(copied[0]).update(instead, _trainer=getattr(model, "_trainer", None))
    return copied


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise UsageError(
        "training_step steps its optimizers itself (automatic_optimization=False); give a loss that returns the loss"
    )
