"""Any model, loss function and batches as a step that can be replayed."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from mantissa.errors import FormatError, UsageError
from mantissa.formats import FORMATS
from mantissa.generators import random_state, set_random_state
from mantissa.islands import cast, keep_fp32
from mantissa.ledger import MemoryLedger
from mantissa.operators import OperatorPolicy
from mantissa.step import Batch, Replay, Step, map_tensors
from mantissa.tensors import finite, in_dtype

Loss = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch to the mean loss, a scalar."""
LEAST_SCALE = 2.0**-10
"""Below it a skipped step is not tried again."""
_STATE = (int, float, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_QUICK = 0.5
"""Seconds up to which a step is examined with all its samples, and not with two of them."""


class LoopBatch(dict[str, Tensor]):
    """The tensors of one batch by name, and how the batch is made of them again."""

    def __init__(self, batch: Any) -> None:
        nested = dict(batch) if isinstance(batch, Mapping) else batch  # also what torch does not know as a dict
        leaves, self._structure = tree_flatten_with_path(nested)
        self._leaves = [(keystr(path), leaf) for path, leaf in leaves]
        super().__init__({name: leaf for name, leaf in self._leaves if isinstance(leaf, Tensor)})

    def whole(self) -> Any:
        """Return the batch as it was given, with the tensors of now; a loss may ask for gradients of its own."""
        own = {name: each.detach().requires_grad_(each.requires_grad) for name, each in self.items()}
        return tree_unflatten([own.get(name, leaf) for name, leaf in self._leaves], self._structure)


@dataclass(kw_only=True)
class LoopStep(Step):
    """A step of a loop that somebody else wrote.

    The model and the optimizer are copies, and are copied again for every format.
    """

    sums_loss = False
    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer | None
    steps: list[list[Batch]]
    """The microbatches of each step, the one that is examined first."""
    first: int
    """The number of that step."""
    generators: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    """That the step takes."""
    changes_batches: bool = True
    """Whether the loss changes tensors of a batch in place; it is so until it is known."""
    originals: frozenset[int] = frozenset()
    """The ids of the parameters of the model that was copied."""

    @classmethod
    def of(
        cls,
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
    ) -> LoopStep:
        """Copy what a step starts from; the arguments are those of ``mantissa.examine``.

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
                "give the model before it is wrapped or sharded"
            ) from error
        weights = {name: in_dtype(each.detach(), torch.float32).clone() for name, each in copied.named_parameters()}
        if format.half_weights is not None:
            _cast(copied, own, format.half_weights)
        flat: list[Batch] = [LoopBatch(batch) for batch in batches]
        steps = [flat[first : first + accumulate] for first in range(0, len(flat), accumulate)]
        scales = scale if scale is not None else 65536.0 if format.needs_loss_scale else 1.0
        parameters = dict(copied.named_parameters())
        changed = {id(each) for group in (own.param_groups if own else ()) for each in group["params"]}
        return cls(
            number=number,
            format=format,
            fp32_modules=[],
            fp32_ops=[],
            compiles=original is not model or getattr(model, "_compiled_call_impl", None) is not None,
            device=device,
            microbatches=steps[0],
            weights=weights,
            stored={name: each.detach().clone() for name, each in parameters.items()},
            buffers={name: each.detach().clone() for name, each in copied.named_buffers()},
            scale=scales,
            least_scale=LEAST_SCALE if format.needs_loss_scale and not fixed_scale else 0.0,
            moments={name: own.state[each] for name, each in parameters.items() if own and each in own.state},
            different=len(steps) if own is None else None,  # the weights stay
            optimized=frozenset(name for name, each in parameters.items() if id(each) in changed),
            eps=max((group.get("eps") or 0.0 for group in own.param_groups), default=0.0) if own else 0.0,
            model=copied,
            loss=loss,
            optimizer=own,
            steps=steps,
            first=number,
            generators=generators,
            originals=frozenset(map(id, original.parameters())),
        )

    def replay(
        self,
        format: str,
        *,
        as_run: bool = False,
        fp32_modules: list[str] | None = None,
        fp32_ops: list[str] | None = None,
        recompute: bool = True,
    ) -> LoopReplay:
        return LoopReplay(self, format, as_run, fp32_modules or [], fp32_ops or [])

    def restore_generators(self) -> None:
        set_random_state(self.generators, self.device)

    def following(self, count: int) -> list[list[Batch]]:
        done = self.number - self.first
        return [self.steps[(done + index) % len(self.steps)] for index in range(count)]

    def share(self, microbatches: list[Batch]) -> float:
        return len(microbatches) / len(self.microbatches)

    def first_samples(self) -> list[Batch]:
        first = self.microbatches[0]
        if self.seconds <= _QUICK or len({tensor.shape[:1] for tensor in first.values()}) != 1:
            return [first]  # tensors whose rows are not the samples cannot be cut
        return [map_tensors(first, lambda tensor: tensor[:2])]

    def available(self, format: str) -> bool:
        number = FORMATS[format].number
        if not number.only_nvidia:
            return True
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= number.capability

    def free_bytes(self) -> int:
        if self.device.type == "cpu":
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return torch.accelerator.get_memory_info(self.device)[0]

    @property
    def with_fp32_weights(self) -> str:
        return self.format.number.name


class LoopReplay(Replay):
    """The passes of a copy of the model."""

    step: LoopStep
    changed = False
    """Whether the loss has changed a batch that it was given."""

    def __init__(self, step: LoopStep, format: str, as_run: bool, fp32_modules: list[str], fp32_ops: list[str]) -> None:
        model, self.optimizer = _copy(step.model, step.optimizer)
        if not as_run or format != step.format.name:
            _cast(model, self.optimizer, FORMATS[format].weights)
        self._fp32_ops = fp32_ops
        for name in fp32_modules:
            parent = name.rpartition(".")[0]
            if isinstance(model.get_submodule(parent), nn.MultiheadAttention) and parent not in fp32_modules:
                raise FormatError(f"{name} is never called: torch's attention uses its weights directly")
        half = FORMATS[format].half_weights
        keep_fp32(model, fp32_modules, step.device.type, half)
        if half is not None:
            model.register_forward_pre_hook(
                lambda _, args, kwargs: (cast(args, half), cast(kwargs, half)), with_kwargs=True
            )
        self.scale = step.scale if as_run else 1.0
        self._state = _states(model)
        super().__init__(step, format, model, None, fp32_modules, as_run)

    def start(self) -> None:
        super().start()
        _restore(self._state)

    def widen(self, dtype: torch.dtype) -> None:
        super().widen(dtype)
        _cast(self.model, self.optimizer, dtype)

    def gradients(self, microbatches: list[Batch]) -> tuple[Tensor, float]:
        total: Tensor | None = None
        for batch in microbatches:
            loss = self.loss(batch) * self.loss_factor / len(self.microbatches)
            if loss.requires_grad:
                self._backward(loss * self.scale)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total.float() if total.itemsize < 4 else total, 1.0

    def _backward(self, loss: Tensor) -> None:
        """Give the model its gradients, and leave those of other leaves as they are, such as a discriminator's."""
        own = set(map(id, self.model.parameters()))
        others = [leaf for leaf in _leaves(loss) if id(leaf) not in own]
        if any(id(leaf) in self.step.originals for leaf in others):
            raise UsageError(
                "a gradient goes to the model that was given, and not to its copy: let the loss use the model that it "
                "is called with, and no forward keep a method of the model from before it was replaced"
            )
        kept = [other.grad for other in others]
        for other in others:
            other.grad = None
        try:
            loss.backward()
        finally:
            for other, gradient in zip(others, kept, strict=True):
                other.grad = gradient

    def loss(self, batch: Batch) -> Tensor:
        given = map_tensors(batch, torch.clone) if self.step.changes_batches else batch
        assert isinstance(given, LoopBatch)
        with self.autocast():
            loss = self.step.loss(self.model, given.whole())
        self.changed |= self.step.changes_batches and any(tensor._version for tensor in given.values())
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(f"loss(model, batch) must return a scalar tensor, the mean loss, and returned {what}")
        return loss

    def autocast(self) -> AbstractContextManager[Any]:
        dtype, device = self.format.autocast, self.step.device.type
        contexts = ExitStack()
        contexts.callback(torch.clear_autocast_cache)  # inside of the caller's autocast it would keep old weights
        contexts.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
        if self._fp32_ops:
            policy = OperatorPolicy(device, dict.fromkeys(self._fp32_ops, torch.float32), self.format.half_weights)
            contexts.enter_context(policy)
        return contexts

    def blocks(self) -> list[nn.Module]:
        lists = [list(each) for each in self.model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
        return max(lists, key=len, default=[])

    def compiled(self) -> list[nn.Module]:
        return [self.model]

    def train(self, steps: Iterable[list[Batch]], lr: float = 1.0, fresh: bool = False) -> list[float]:
        if self.optimizer is None:  # the weights stay as they are
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.start()
        if fresh:
            self.optimizer.state.clear()
        losses = []
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * lr
        for microbatches in steps:
            losses.append(self._train_step(microbatches))
        return losses

    def _train_step(self, microbatches: list[Batch]) -> float:
        assert self.optimizer is not None
        self.microbatches = microbatches
        generators, states = random_state(self.step.device), _states(self.model)
        while True:
            self.optimizer.zero_grad()
            with self.around():
                loss, _ = self.gradients([map_tensors(batch, self.widened) for batch in microbatches])
            gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            sound = all(map(finite, gradients))
            if sound or not self.format.needs_loss_scale or self.scale <= LEAST_SCALE or not self.step.least_scale:
                break
            self.scale /= 2  # as a dynamic scaler would, with the same dropout
            set_random_state(generators, self.step.device)
            _restore(states)
        if self.scale != 1:
            torch._foreach_mul_(gradients, 1 / self.scale)
        if sound or not self.format.needs_loss_scale:
            with self.updates or self.around():
                self.optimizer.step()
        return loss.item() if sound or not self.format.needs_loss_scale else math.nan  # it would be skipped for ever

    def peak_bytes(self) -> int:
        optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0)
        with MemoryLedger(self.model, optimizer) as recording:
            self.run()
        return recording.report().peak_bytes


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


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors in which a backward pass leaves gradients."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


def _copy(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copy both, with the hooks of parameters and with results that modules keep, which torch would leave out."""
    kept = [each for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor)]
    memo = {id(each): each.detach().clone() for each in kept if each.grad_fn is not None}
    copied: tuple[nn.Module, torch.optim.Optimizer | None] = copy.deepcopy((model, optimizer), memo)
    for name in vars(optimizer).keys() - vars(copied[1]).keys() - {"step"} if optimizer is not None else ():
        setattr(copied[1], name, copy.deepcopy(getattr(optimizer, name), memo))  # which a schedule replaces, and torch
    for mine, its in zip(model.parameters(), copied[0].parameters(), strict=True):
        for hook in (mine._backward_hooks or {}).values():
            its.register_hook(hook)
        for hook in (mine._post_accumulate_grad_hooks or {}).values() if optimizer is not None else ():
            its.register_post_accumulate_grad_hook(hook)  # without an optimizer it may be one that steps in there
    return copied


def _cast(model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype) -> None:
    """Cast weights, buffers and the optimizer's state, as ``model.to(dtype)`` before training does."""
    model._apply(lambda tensor: in_dtype(tensor, dtype))
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for key, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.is_floating_point()
                and key != "step"
            ):
                state[key] = value.to(dtype)
