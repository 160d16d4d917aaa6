"""Replay two recorded runs in lock step, and find the first results that part.

``parting`` is called with the first step at which the logs differ; ``first_weights`` says what there is to say before
step 1, where no log does. Both trainers are built from their records in this process, which computes for one at a time,
with that one's number formats, kernels, threads and generators.

In each step the batches are compared first, then the losses and gradients, of both runs before either changes its
weights, then what the update made of the weights and the optimizer's state. So all that a step starts from is equal
until one parts, and that one can be taken again under a trace, see ``operators``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evidence.diff.operators import Difference, Take, difference, first_place, same
from evidence.doctor.replay import differences
from mantissa.display import counted
from mantissa.display import loss as shown
from mantissa.formats import FP32
from mantissa.step.flags import flags_of
from mantissa.step.trace import BACKWARD, FORWARD, LOSS
from mantissa.tensors import random_state, set_random_state
from trainer.checkpoint import store
from trainer.checkpoint.reader import CheckpointReader
from trainer.config.compose import compose
from trainer.data.contract import Batch
from trainer.errors import UserError, is_out_of_memory
from trainer.files import METRICS_FILE, PRECISION_FILE, read_json_lines, read_object
from trainer.hardware import best_type, detect, threads
from trainer.optim.update import Update
from trainer.precision import kernels
from trainer.run.step_metrics import mean
from trainer.run_folder import RunFolder
from trainer.trainer import Trainer

DATA, WEIGHTS, UPDATE = "data", "weights", "update"
"""Stages of a step beside ``forward`` and ``backward``."""


@dataclass(frozen=True)
class Parting:
    """The first results of two replays that differ."""

    step: int
    """Number of the step, from 1: the one that parts, or the last one that was replayed where none does."""
    stage: str = ""
    """``data``, ``weights`` (what the step starts from), ``forward``, ``backward`` or ``update``; empty: none parts."""
    name: str = ""
    """Module of an operator, empty: the model itself; else the name of a tensor."""
    op: str = ""
    """Operator, such as ``aten.addmm``; empty: it is none."""
    difference: Difference | None = None
    """Size of the difference; None: it is not one of numbers."""
    why: str = ""
    """What else is known of it."""
    notes: tuple[str, ...] = ()
    """What was replayed and how, a line each."""

    def lines(self) -> list[str]:
        """Return what is printed."""
        if not self.stage:
            return [f"no result parts up to step {self.step}", *self.notes]
        place = ", ".join(filter(None, [self.name or "the model itself", self.op]))
        text = f"step {self.step}, {self.stage}: {place}"
        text += f": {self.difference}" if self.difference is not None else ""
        return [text + (f"; {self.why}" if self.why else ""), *self.notes]


def parting(a: RunFolder, b: RunFolder, step: int) -> Parting | str:
    """Replay two runs from their last equal state up to a step, and name what parts first.

    Nothing is written, and the process computes afterwards as it did before.

    Args:
        a: the first run.
        b: the second run.
        step: number of the first step at which their logs differ, from 1.

    Returns:
        What parts first; or a sentence that says why the runs cannot be replayed here.
    """
    return _of_both(a, b, partial(_parting, step=step))


def first_weights(a: RunFolder, b: RunFolder) -> Parting | str:
    """Compare the weights and buffers that two runs begin with, built anew from their records.

    Returns:
        A ``Parting`` at step 1 whose ``stage`` is ``weights``, or empty where all are equal bit for bit; or a sentence
        that says why they cannot be built here.
    """
    return _of_both(a, b, lambda one, other: _apart(1, WEIGHTS, one.start(), other.start()) or Parting(1))


def _of_both(a: RunFolder, b: RunFolder, work: Callable[[_Side, _Side], Parting]) -> Parting | str:
    """Build both runs and do ``work`` with them; return its result, or why that is not possible."""
    with _as_before(), ExitStack() as stack:
        try:
            sides = [_Side(name, folder) for name, folder in (("a", a), ("b", b))]
            for side in sides:
                stack.callback(side.trainer.close)
            return work(*sides)
        except UserError as error:
            return str(error)
        except Exception as error:
            if is_out_of_memory(error):
                return "both together do not fit into the memory of this machine"
            # Their code may raise anything today. What was compared before is reported all the same.
            return f"{type(error).__name__}: {error}".partition("\n")[0]


@contextmanager
def _as_before() -> Iterator[None]:
    """Leave this process with the number formats, kernels, determinism and generators that it had."""
    device = torch.device(best_type())
    generators, benchmark = random_state(device), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    attention = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with flags_of(FP32), kernels.restored():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(attention)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        set_random_state(generators, device)


# --- one run ---


class _Update(Update):
    """An update that lets others see the loss."""

    see_loss: Callable[[Tensor], Any] | None = None
    """Is called with each microbatch's share of the loss."""

    def backward(self, loss: Tensor, exchanged: bool = False) -> None:
        if self.see_loss is not None:
            self.see_loss(loss)
        super().backward(loss, exchanged)


class _Replayed(Trainer):
    update_class = _Update


class _Side:
    """A run, as it is replayed.

    Args:
        name: ``a`` or ``b``.
        folder: of the run.

    Raises:
        UserError: it cannot be replayed here.
    """

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.name, self.folder = name, folder
        recorded, self.summary = folder.options(), folder.summary()
        self.notes: list[str] = []
        """In what the replay differs from the run, a line each."""
        # A run of several processes has dropout of each, and sums gradients in another order.
        processes = self.summary.get("processes", 1 if recorded.get("parallel") == "single" else 0)
        if processes != 1:
            of = f"{processes} processes" if processes else "several processes, or of one that did not end"
            raise UserError(f"{folder.path} is of {of}, and a replay has one")
        ran_on = str(read_object(folder.path / PRECISION_FILE).get("effective", {}).get("device") or recorded["device"])
        kind = ran_on.partition(":")[0]
        config = compose([f"device={kind}", "parallel=single", "compile=off"], recorded)
        if recorded.get("compile.mode") != "off":
            self.notes.append(f"{name} was compiled, and is replayed without torch.compile")
        hardware = self.summary.get("hardware", {})
        if hardware.get("name", (here := detect(config.device)).name) != here.name:
            self.notes.append(f"{name} was trained on {hardware['name']}, and is replayed on {here.name}")
        self.notes += [f"{name}: {line}" for line in differences(self.summary)]
        self._threads = config.threads or hardware.get("threads")
        with threads(self._threads):
            self.trainer = _Replayed.from_config(config)
        self.device = self.trainer.device
        self.generators = random_state(self.device)
        self.microbatches: list[Batch] = []
        """Batch of the present step."""
        self.losses: dict[int, float] = {}
        """Loss of each replayed step."""
        self._begun: tuple[dict[str, Tensor], list[Tensor]] = {}, []
        """Generators and buffers with which the present step began."""
        self.correction = 1.0
        """Factor of the gradients of the present step, see ``Gradients``."""

    @property
    def update(self) -> _Update:
        """The update of its trainer."""
        update = self.trainer.update
        assert isinstance(update, _Update)
        return update

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute as this run did: with its number formats, kernels, threads and generators."""
        outside = random_state(self.device)
        self.set_up()
        set_random_state(self.generators, self.device)
        try:
            with threads(self._threads):
                yield
        finally:
            self.generators = random_state(self.device)
            set_random_state(outside, self.device)

    def set_up(self) -> None:
        """Set this process up as the trainer did."""
        trainer = self.trainer
        trainer.config.set_up()
        trainer.precision.apply()
        trainer.config.use_kernels(trainer.hardware, trainer.convolves)

    def start(self) -> dict[str, Tensor]:
        """Return the weights, and all buffers."""
        model = self.trainer.model
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def state(self) -> dict[str, Tensor]:
        """Return the weights and the buffers, and what the optimizer and the average keep."""
        saved = self.trainer.state_dict()
        state: dict[str, Tensor] = saved["model"] | saved["optimizer"]
        return state

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        with self.computing():
            self.trainer.restore(CheckpointReader(path))

    def begin(self, batches: Iterator[list[Batch]]) -> None:
        """Take the next batch, and note what its step begins with."""
        with self.computing():
            self.microbatches = next(batches)
        self._begun = self.generators, [buffer.clone() for buffer in self.trainer.model.buffers()]

    def add_gradients(self) -> tuple[Tensor, float]:
        """Take the forward and backward passes of the present step; return its loss, and its learning rate."""
        with self.computing():
            lr = self.trainer.begin()
            loss, self.correction, _ = self.trainer.gradients(self.microbatches)
        self.losses[self.trainer.step + 1] = loss.item()
        return loss, lr

    def finish(self) -> None:
        """Update the weights."""
        with self.computing():
            self.trainer.finish(self.correction)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients before the update, with the loss scale and ``correction``, by weight."""
        named = (self.trainer.masters or self.trainer.model).named_parameters()
        return {name: weight.grad for name, weight in named if weight.grad is not None}

    def factor(self) -> float:
        """Return what turns these gradients into the true ones."""
        factor = self.trainer.loss_scale.inverse(self.correction)
        return 1.0 if factor is None else factor.item()

    def again(self, take: Take) -> None:
        """Take the forward and backward passes of the present step again, under a trace, and change nothing."""
        generators, buffers = self._begun
        trainer, update = self.trainer, self.update
        self.generators = generators
        update.see_loss = partial(take.value, FORWARD, LOSS, "the loss")
        try:
            with self.computing(), torch.no_grad():
                for buffer, before in zip(trainer.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
                self._clear()
                with torch.enable_grad(), take:
                    trainer.gradients(self.microbatches)
                for name, gradient in self.gradients().items():
                    take.value(BACKWARD, name, "its gradient", gradient)
        finally:
            update.see_loss = None
            self._clear()

    def _clear(self) -> None:
        for parameter in [*self.update.parameters, *self.trainer.model.parameters()]:
            parameter.grad = None

    def compared_with_log(self) -> str:
        """Return how the replayed losses compare with the last line of the log of whose steps all were replayed.

        Empty: none was.
        """
        if not self.losses:
            return ""
        found, before = "", 0
        for line in read_json_lines(self.folder.path / METRICS_FILE):
            if "loss" not in line or line["step"] <= before:
                continue
            steps, before, logged = range(before + 1, line["step"] + 1), line["step"], line["loss"]
            if all(step in self.losses for step in steps):
                replayed = mean([self.losses[step] for step in steps])
                equal = replayed == logged or (logged is None and not math.isfinite(replayed))
                text = "as logged" if equal else f"{shown(replayed)} (logged {shown(logged)})"
                found = f"{self.name}'s loss at step {before}: {text}"
        return found or f"{self.name}'s log has no loss of these steps alone"


# --- both runs ---


def _parting(a: _Side, b: _Side, step: int) -> Parting:
    began = _go_to_last_common(a, b, step)
    first = a.trainer.step + 1
    found = _apart(first, WEIGHTS, a.start(), b.start())
    if found is None:
        with closing(a.trainer.batches()) as of_a, closing(b.trainer.batches()) as of_b:
            taken = (_step(a, b, of_a, of_b) for _ in range(first, step + 1))
            found = next(filter(None, taken), Parting(step))
        replayed = f"replayed {counted(found.step - first + 1, 'step')} of each run from {began}"
        a.notes.insert(0, "; ".join(filter(None, [replayed, a.compared_with_log(), b.compared_with_log()])))
    return replace(found, notes=tuple(dict.fromkeys([*a.notes, *b.notes])))


def _go_to_last_common(a: _Side, b: _Side, step: int) -> str:
    """Restore the last checkpoint before a step that both runs have and that is equal, and return its name."""
    numbers = set(store.steps(a.folder.checkpoints)) & set(store.steps(b.folder.checkpoints))
    for number in sorted(numbers, reverse=True):
        if number >= step:
            continue
        try:
            paths = [store.find_verified(side.folder.checkpoints, number) for side in (a, b)]
        except UserError:  # it is damaged
            continue
        tensors = [CheckpointReader(path).tensors() for path in paths]
        saved = [{name: each[name] for name in each if not name.startswith("rng/")} for each in tensors]
        if _apart(number, WEIGHTS, *saved) is None:
            for side, path in zip((a, b), paths, strict=True):
                side.restore(path)
            return paths[0].name
    return "the beginning"


def _step(a: _Side, b: _Side, from_a: Iterator[list[Batch]], from_b: Iterator[list[Batch]]) -> Parting | None:
    """Take the next step of both runs; return what parts in it."""
    number = a.trainer.step + 1
    a.begin(from_a)
    b.begin(from_b)
    if found := _data_apart(number, a.microbatches, b.microbatches):
        return found

    # Both have their gradients before either changes its weights.
    (loss_a, rate_a), (loss_b, rate_b) = a.add_gradients(), b.add_gradients()
    of_a, of_b = a.gradients(), b.gradients()
    if (factors := (a.factor(), b.factor()))[0] != factors[1]:
        of_a, of_b = (
            {name: gradient.double() * factor for name, gradient in gradients.items()}
            for gradients, factor in zip((of_a, of_b), factors, strict=True)
        )
    equal = of_a.keys() == of_b.keys() and all(same(gradient, of_b[name]) for name, gradient in of_a.items())
    if not (equal and same(loss_a, loss_b)):
        place = first_place((a.again, b.again), (a.trainer.model, b.trainer.model))
        if place is None:
            return Parting(number, BACKWARD, "the gradients", why="taken again, the step does not part")
        return Parting(number, *place)

    a.finish()
    b.finish()
    found = _apart(number, UPDATE, a.state(), b.state())
    if found is None:
        return None
    rates = "" if rate_a == rate_b else f"the learning rates are {rate_a:.6g} and {rate_b:.6g}"
    return replace(found, why="; ".join(filter(None, [found.why, "the gradients are equal", rates])))


def _data_apart(number: int, a: list[Batch], b: list[Batch]) -> Parting | None:
    """Return the first tensor of the batches that parts; None: none does."""
    if len(a) != len(b):
        many = f"it is split into {counted(len(a), 'microbatch')} against {len(b)}"
        return Parting(number, DATA, "the batch", why=many)
    for place, both in enumerate(zip(a, b, strict=True), 1):
        if found := _apart(number, DATA, *(dict(batch) for batch in both)):
            return replace(found, name=f"{found.name} of microbatch {place}" if len(a) > 1 else found.name)
    return None


def _apart(number: int, stage: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Parting | None:
    """Return the first of two runs' tensors by name that parts; None: none does."""
    for name, tensor in a.items():
        if name in b and not same(tensor, b[name]):
            return Parting(number, stage, name, difference=difference(tensor, b[name]))
    for alone, (of, others) in {"a": (a, b), "b": (b, a)}.items():
        if lacking := [name for name in of if name not in others]:
            return Parting(number, stage, lacking[0], why=f"{alone} alone has it")
    return None
