"""Any model, loss function and batches as a step that can be replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from mantissa.errors import FormatError, UsageError
from mantissa.formats import FORMATS
from mantissa.step.islands import cast_inputs, keep_fp32
from mantissa.step.memory import available_bytes
from mantissa.step.operators import OperatorPolicy
from mantissa.step.step import LEAST_SCALE, Batch, Build, Built, Step, cast_training
from mantissa.step.updates import UpdateMeter
from mantissa.tensors import in_dtype, random_state

Loss = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch to the mean loss, a scalar."""


class LoopBatch(dict[str, Tensor]):
    """The tensors of one batch by name, and how the batch is made of them again."""

    def __init__(self, batch: Any) -> None:
        nested = dict(batch) if isinstance(batch, Mapping) else batch  # also what torch does not know as a dict
        leaves, self._structure = tree_flatten_with_path(nested)
        self._leaves = [(keystr(path), leaf) for path, leaf in leaves]
        super().__init__({name: leaf for name, leaf in self._leaves if isinstance(leaf, Tensor)})

    def whole(self) -> Any:
        """Return the batch as it was given, with the tensors of now; a loss may ask for gradients of its own."""
        own = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in self.items()}
        return tree_unflatten([own.get(name, leaf) for name, leaf in self._leaves], self._structure)


def step_of_loop(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    precision: str,
    optimizer: torch.optim.Optimizer | None = None,
    scale: float | None = None,
    fixed_scale: bool = False,
    accumulate: int = 1,
    number: int = 1,
    generators: dict[str, Tensor] | None = None,
    enters_autocast: bool = False,
) -> Step:
    """Copy what a step of a loop that somebody else wrote starts from; the arguments are those of ``mantissa.examine``.

    ``enters_autocast``: whether the loss does so itself, so that nothing is entered around it.

    Raises:
        FormatError: the model or the optimizer cannot be copied, and how to make it so.
    """
    format, original = FORMATS[precision], getattr(model, "_orig_mod", model)
    device = next(original.parameters()).device
    generators = generators or random_state(device)
    try:
        copied, own = _copy(original, optimizer)
    except Exception as error:  # of many kinds: what is in a model decides
        raise FormatError(
            f"the model or its optimizer cannot be copied, so the step cannot be replayed ({error}); "
            "give a model that copy.deepcopy can copy, such as the one before it is wrapped or sharded"
        ) from error
    parameters = dict(copied.named_parameters())
    weights = {name: in_dtype(weight.detach(), torch.float32).clone() for name, weight in parameters.items()}
    if format.half_weights is not None:
        cast_training(copied, own, format.half_weights)
    flat: list[Batch] = [LoopBatch(batch) for batch in batches]
    steps = [flat[first : first + accumulate] for first in range(0, len(flat), accumulate)]
    groups = own.param_groups if own is not None else []
    changed = {id(weight) for group in groups for weight in group["params"]}

    def following(first: int, count: int) -> list[list[Batch]]:
        return [steps[(first - number + index) % len(steps)] for index in range(count)]

    return Step(
        number=number,
        format=format,
        build=_builder(copied, own, loss, precision, enters_autocast),
        batches=following,
        device=device,
        microbatches=steps[0],
        weights=weights,
        stored={name: weight.detach().clone() for name, weight in parameters.items()},
        buffers={name: buffer.detach().clone() for name, buffer in copied.named_buffers()},
        generators=generators,
        scale=scale if scale is not None else 65536.0 if format.needs_loss_scale else 1.0,
        least_scale=LEAST_SCALE if format.needs_loss_scale and not fixed_scale else 0.0,
        with_fp32_weights=format.number.name,
        moments={name: own.state[weight] for name, weight in parameters.items() if own and weight in own.state},
        eps=max((group.get("eps") or 0.0 for group in groups), default=0.0),
        optimized=frozenset(name for name, weight in parameters.items() if id(weight) in changed),
        trains=own is not None,
        different=len(steps) if own is None else None,  # the weights stay
        compiles=original is not model or getattr(model, "_compiled_call_impl", None) is not None,
        changes_batches=True,  # until it is known
        originals=frozenset(map(id, original.parameters())),
        free_bytes=partial(available_bytes, device),
    )


def _builder(
    original: nn.Module, trains: torch.optim.Optimizer | None, loss: Loss, precision: str, enters_autocast: bool
) -> Build:
    """Return what copies a model with its optimizer once more, for a format."""

    def build(format: str, fp32_modules: list[str], fp32_ops: list[str], as_run: bool) -> Built:
        model, own = _copy(original, trains)
        row, first = FORMATS[format], next(original.parameters())
        half, device = row.half_weights, first.device
        if not as_run or format != precision:
            cast_training(model, own, row.weights)
        keep_fp32(model, fp32_modules, device.type, half)
        if half is not None or (first.dtype.itemsize == 2 and not as_run and row.autocast is None):
            cast_inputs(model, row.weights)  # such as the model's own, which the batches fit
        weights = list(model.parameters())
        optimizer = own if own is not None else torch.optim.SGD(weights, lr=0.0)  # the weights stay

        def loss_of(batch: Batch) -> Tensor:
            assert isinstance(batch, LoopBatch)
            before = [weight.grad is None for weight in weights]
            found = loss(model, batch.whole())
            if before != [weight.grad is None for weight in weights]:
                raise UsageError("loss(model, batch) calls backward itself; let it only return the loss")
            if not isinstance(found, Tensor) or found.numel() != 1:
                tensor = isinstance(found, Tensor)
                what = f"a tensor of shape {list(found.shape)}" if tensor else f"a {type(found).__name__}"
                raise UsageError(f"loss(model, batch) must return a scalar tensor, the mean loss, and returned {what}")
            return found

        def autocast() -> AbstractContextManager[Any]:
            contexts = ExitStack()
            enters = row.autocast is not None and not enters_autocast
            contexts.callback(torch.clear_autocast_cache)  # inside of the caller's autocast it would keep old weights
            contexts.enter_context(torch.autocast(device.type, dtype=row.autocast, enabled=enters))
            if fp32_ops:
                contexts.enter_context(OperatorPolicy(device.type, fp32_ops, half))
            return contexts

        def prepare(number: int, lr: float, fresh: bool) -> None:
            if fresh:
                optimizer.state.clear()
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * lr

        def update(scale: float, correction: float, meter: UpdateMeter | None) -> None:
            if scale != 1:
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                torch._foreach_mul_(gradients, 1 / scale)
            if meter is not None:
                meter.before()
            optimizer.step()
            if meter is not None:
                meter.after(1, torch.tensor(True))

        return Built(
            model=model,
            optimizer=optimizer,
            loss=loss_of,
            autocast=autocast,
            prepare=prepare,
            update=update,
            fp32_modules=fp32_modules,
        )

    return build


def _copy(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copy both, with the hooks of parameters and with results that modules keep, which torch would leave out."""
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo = {id(tensor): tensor.detach().clone() for tensor in kept if tensor.grad_fn is not None}
    copied: tuple[nn.Module, torch.optim.Optimizer | None] = copy.deepcopy((model, optimizer), memo)
    for name in vars(optimizer).keys() - vars(copied[1]).keys() - {"step"} if optimizer is not None else ():
        setattr(copied[1], name, copy.deepcopy(getattr(optimizer, name), memo))  # which a schedule replaces, and torch
    for mine, its in zip(model.parameters(), copied[0].parameters(), strict=True):
        for hook in (mine._backward_hooks or {}).values():
            its.register_hook(hook)
        for hook in (mine._post_accumulate_grad_hooks or {}).values() if optimizer is not None else ():
            its.register_post_accumulate_grad_hook(hook)  # without an optimizer it may be one that steps in there
    if hasattr(model, "automatic_optimization"):  # a module of Lightning, which copies leave the trainer out of
        instead: dict[str, Any] = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)
        if not model.automatic_optimization:
            instead |= dict.fromkeys(("optimizers", "manual_backward"), _refuse)
        vars(copied[0]).update(instead, _trainer=getattr(model, "_trainer", None))
    return copied


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise UsageError(
        "training_step steps its optimizers itself (automatic_optimization=False); give a loss that returns the loss"
    )
