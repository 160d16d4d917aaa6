"""The memory of one optimizer step by category: a ledger of every tensor storage that is alive in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mantissa import display
from mantissa.tensors import changed_by, tensors

STEADY = ("weights", "buffers", "gradients", "optimizer")
"""What training holds at any batch size, in the dtype of the weights also under autocast."""
CATEGORIES = (*STEADY, "autocast_copies", "inputs", "activations", "temporary")
"""In order of precedence: a storage that fits two categories counts as the first."""
MIB = 2**20


@dataclass
class Ledger:
    """Bytes by category over one optimizer step; the categories are defined at ``MemoryLedger``."""

    peak_bytes: int
    """Most bytes that were alive at one moment."""
    peak_phase: str
    """Phase of that moment: ``forward``, ``backward`` or ``optimizer`` (everything after the last backward)."""
    at_peak: dict[str, int]
    """Bytes of each category at that moment; they add up to ``peak_bytes``."""
    highest: dict[str, int]
    """Most bytes that each category held at any moment; the moments differ, so these add up to more."""
    half_at_peak: dict[str, int]
    """Part of ``at_peak`` that is in floating-point dtypes of at most 16 bits."""
    largest: list[dict[str, Any]]
    """Largest tensors at that moment: ``name`` of the parameter, of the buffer or of the operator that made it, such as
    ``aten.addmm.default``, ``category``, ``shape``, ``dtype`` and ``bytes``."""

    def text(self) -> str:
        """Return the table, the largest tensors and the sentence as plain text."""
        rows = [("", "at the peak", "share", "highest")]
        for name, highest in self.highest.items():
            if highest:
                now = self.at_peak[name]
                rows.append((name, display.size(now), f"{self._share(now):.1%}", display.size(highest)))
        large = [
            (display.size(row["bytes"]), row["category"], f"{row['dtype']} {row['shape']}", row["name"])
            for row in self.largest
        ]
        peak = f"Peak {display.size(self.peak_bytes)}, reached in the {self.peak_phase} phase"
        tensors = f"Largest tensors at the peak:\n{display.columns(large)}"
        return "\n".join([peak, "", display.columns(rows), "", tensors, "", self.sentence(), ""])

    def sentence(self) -> str:
        """Return a sentence about what dominates the peak and what autocast can save there.

        The saving is an upper bound: activations and temporary tensors that are still in fp32 at the peak,
        halved. Inputs keep the dtype of the data, and copies of the weights exist only under autocast.
        """
        steady = sum(self.at_peak[name] for name in STEADY)
        working = self.at_peak["activations"] + self.at_peak["temporary"]
        half = self.half_at_peak["activations"] + self.half_at_peak["temporary"]
        could_save = (working - half) / 2
        held = " and ".join(", ".join(name for name in STEADY if self.at_peak[name]).rsplit(", ", 1))
        copies = f" and {display.size(c)} of copies of weights" if (c := self.highest["autocast_copies"]) else ""
        advice = "; try a larger micro_batch_size" if steady >= working else ""
        return (
            f"Of the peak of {display.size(self.peak_bytes)}, {self._share(steady):.0%} are {held}, whose dtypes "
            f"autocast does not change, and {self._share(working):.0%} activations and temporary tensors: "
            f"{display.size(half)} in 16 bits{copies}; autocast can save at most {display.size(could_save)} "
            f"({self._share(could_save):.1%}){advice}."
        )

    def _share(self, amount: float) -> float:
        return amount / self.peak_bytes if self.peak_bytes else 0.0


@dataclass(eq=False, slots=True)
class _Block:
    """One storage, from the moment it is first seen."""

    bytes: int
    category: str
    name: str
    shape: list[int]
    dtype: torch.dtype


class MemoryLedger(TorchDispatchMode):
    """Records every tensor storage on the model's device during one optimizer step.

    Use it around a whole step, from the first forward to the cleared gradients::

        with MemoryLedger(model, optimizer) as ledger:
            trainer.train_step(...)
        print(ledger.report().text())

    It needs no annotations: an operator runs in *backward* when autograd is running, in *forward* from
    the first call of any module of ``model`` until then, and the rest (batch preparation, unscaling,
    clipping, the optimizer, clearing gradients) counts as the *optimizer* phase.

    - ``weights``, ``buffers``: storages of the model's parameters and buffers, shared ones once.
    - ``gradients``: storages that were the ``.grad`` of a parameter, or of its fp32 master, from their allocation on
      (autograd hands the result of a backward operator to ``.grad`` without a copy). Sparse ones are not recognised.
    - ``optimizer``: storages in ``optimizer.state`` before or after the step, fp32 masters, averages (``held``).
    - ``autocast_copies``: made by a conversion of a parameter to another dtype, in forward or backward.
    - ``inputs``: existed before the recording and used in it, copied from another device, or passed to the
      first module of a microbatch.
    - ``activations``: anything else made in forward. ``temporary``: anything else made in the other phases.

    A storage is given its category once everything is known about it, so the breakdown of the peak is right
    even where a tensor became a gradient after the peak. Views are not counted; a storage counts until it is
    freed; sizes are exact bytes, without an allocator's rounding. Not seen: workspaces inside an operator,
    tensor subclasses with inner tensors (DTensor, quantised), devices other than that of the first parameter.
    Two things differ while a ledger, or any other dispatch mode, is active: a compiled model runs eagerly, so
    the ledger is that of the eager model; and where three or more branches meet in backward, autograd adds
    their gradients out of place instead of in place, so the peak can be one such tensor too high.

    Works under ``FakeTensorMode`` (entered first) on a model made in it: no data is read.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._held = list(held)
        self._model = model
        self._optimizer = optimizer
        self._device = next(model.parameters()).device
        self._phase = "optimizer"
        self._alive: dict[weakref.ref[torch.UntypedStorage], _Block] = {}
        self._before: list[_Block] = []
        self._events: list[tuple[int, _Block, str]] = []
        """Changes of size in order: bytes, block, phase. A freed storage is a negative number."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> MemoryLedger:
        """Start recording."""
        # What is there already.
        self._mark_model_and_optimizer()
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradients", name)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_hook(name)))
        # Hooks that say what a storage is, and when a forward pass begins.
        self._hooks.append(self._optimizer.register_step_pre_hook(self._mark_given_gradients))
        for module in self._model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter_module, with_kwargs=True))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording."""
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._mark_model_and_optimizer()
        self._alive.clear()  # also removes the callbacks of the weak references: nothing is recorded any more

    def report(self) -> Ledger:
        """Find the peak and what was alive then. Call it after the ``with`` block."""
        # What existed before the step comes first.
        events = [(block.bytes, block, "optimizer") for block in self._before] + self._events
        peak_index, highest = _highest(events)
        alive: dict[_Block, int] = {}
        for change, block, _ in events[: peak_index + 1]:
            alive[block] = alive.get(block, 0) + change
        # By category, now that the category of every storage is known.
        at_peak, half = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
        for block, size in alive.items():
            at_peak[block.category] += size
            if block.dtype.is_floating_point and block.dtype.itemsize <= 2:
                half[block.category] += size
        top = sorted(alive.items(), key=lambda item: -item[1])[:5]
        return Ledger(
            peak_bytes=sum(alive.values()),
            peak_phase=events[peak_index][2],
            at_peak=at_peak,
            highest=highest,
            half_at_peak=half,
            largest=[asdict(block) | {"dtype": display.dtype_name(block.dtype), "bytes": size} for block, size in top],
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and enter what it used and made."""
        # The only exact test for "in backward", also on the engine's threads on a GPU; torch's own trackers use it too.
        if torch._C._current_graph_task_id() != -1:
            self._phase = "backward"
        elif self._phase == "backward":
            self._phase = "optimizer"
        # A storage that is seen for the first time as an input existed before.
        inputs = tensors((args, kwargs))
        for tensor in inputs:
            # A number in an expression is a tensor without dimensions: ignored.
            if tensor.dim() and self._find(tensor) is None:
                category = "inputs" if self._phase == "forward" else "temporary"
                self._add(tensor, category, "existed before", before=True)
        # One that is seen as a result was made here, or has grown.
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            block = self._find(tensor)
            if block is None:
                copied = inputs[0] if func is torch.ops.aten._to_copy.default else None
                self._add(tensor, self._category_of_new(tensor, copied), str(func))
            elif self._counts(tensor) and (grown := tensor.untyped_storage().nbytes() - block.bytes):
                block.bytes += grown
                self._events.append((grown, block, self._phase))
        return result

    def _category_of_new(self, made: Tensor, copied: Tensor | None) -> str:
        if copied is not None and copied.device != made.device and self._phase != "backward":
            return "inputs"
        if copied is not None and copied.dtype != made.dtype and self._phase != "optimizer":
            source = self._find(copied)
            if source is not None and source.category == "weights":
                return "autocast_copies"
        return "activations" if self._phase == "forward" else "temporary"

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._phase != "forward":
            for tensor in tensors((args, kwargs)):
                self._mark(tensor, "inputs", "input of the model")
        self._phase = "forward"

    def _mark_model_and_optimizer(self) -> None:
        for name, parameter in self._model.named_parameters():
            self._mark(parameter, "weights", name)
        for name, buffer in self._model.named_buffers():
            self._mark(buffer, "buffers", name)
        for tensor in tensors([self._optimizer.state, self._held]):
            self._mark(tensor, "optimizer", "optimizer state")
        for tensor in changed_by(self._optimizer):
            self._mark(tensor, "optimizer", "master weights")  # except those that are the model's own

    def _gradient_hook(self, name: str) -> Any:
        def mark(parameter: Tensor) -> None:
            if parameter.grad is not None:  # else it went to the parameter's fp32 master
                self._mark(parameter.grad, "gradients", name)

        return mark

    def _mark_given_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for tensor in changed_by(optimizer):
            if tensor.grad is not None:
                self._mark(tensor.grad, "gradients", "gradient of master weights")

    def _mark(self, tensor: Tensor, category: str, name: str) -> None:
        block = self._find(tensor)
        if block is None:
            self._add(tensor, category, name, before=True)
        elif CATEGORIES.index(category) < CATEGORIES.index(block.category):
            block.category, block.name = category, name

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and tensor.layout == torch.strided

    def _find(self, tensor: Tensor) -> _Block | None:
        if not self._counts(tensor):
            return _ELSEWHERE
        return self._alive.get(weakref.ref(tensor.untyped_storage()))

    def _add(self, tensor: Tensor, category: str, name: str, before: bool = False) -> None:
        if not self._counts(tensor):
            return
        storage = tensor.untyped_storage()
        block = _Block(storage.nbytes(), category, name, list(tensor.shape), tensor.dtype)
        if before:
            self._before.append(block)
        else:
            self._events.append((block.bytes, block, self._phase))
        self._alive[weakref.ref(storage, self._freed)] = block

    def _freed(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        block = self._alive.pop(reference)
        self._events.append((-block.bytes, block, self._phase))


_ELSEWHERE = _Block(0, "inputs", "on another device", [], torch.uint8)


def _highest(events: list[tuple[int, _Block, str]]) -> tuple[int, dict[str, int]]:
    """Return the index of the event that reached the peak, and the highest sum of each category."""
    total = peak = peak_index = 0
    now, highest = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
    for index, (change, block, _) in enumerate(events):
        total += change
        now[block.category] += change
        highest[block.category] = max(highest[block.category], now[block.category])
        if total > peak:
            peak, peak_index = total, index
    return peak_index, highest
