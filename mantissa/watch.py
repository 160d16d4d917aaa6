"""``mantissa.Watch``: what precision does to a training loop of one's own, while it runs."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mantissa.display import columns, listed
from mantissa.doctor.diagnosis import SWEEP
from mantissa.errors import FormatError, NotFiniteError, UsageError, check_type
from mantissa.examination import PRECISIONS, Report, examine
from mantissa.formats import FORMATS, TF32, computing_in
from mantissa.loop import Loss
from mantissa.meters import Measured, Meters, are_finite
from mantissa.setup import FirstStep, Listener, Setup, policies, read_setup
from mantissa.tensors import changed_by, finite, local, note_random_state, numbers_in, tensors

SKIPS = 10
"""Steps that a loss scaler skips one after another before that is a failure."""
_NEAR = 1.0
"""Bits below the largest number of a dtype that are worth a warning."""


Kept = tuple[Tensor, Tensor, int]
"""A weight or a buffer, this rank's part of it as it was, and how often it had been changed at the start."""


@dataclass
class _Step:
    """A step: what it takes in, for its replay, and its outcome, which the host may not know yet."""

    batches: list[Any] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors of the batches, each with the number of changes when it was kept."""
    generators: Callable[[], dict[str, Tensor]] | None = None
    """Returns the state of all random generators before the step; None: it has not begun."""
    losses: list[Tensor] = field(default_factory=list)
    """Losses that the model returned."""
    sound: Tensor | None = None
    """Whether the gradients are finite; None: they were not looked at."""
    skipped: Tensor | None = None
    """Whether a fused optimizer skips it; None: there is none."""
    updated: bool = False
    """Whether the optimizer has stepped."""
    number: int = field(init=False)
    flags: Tensor = field(init=False)
    """On the host: whether the gradients are finite, whether the losses are, and whether the step was skipped."""
    event: Any = None
    """Event after which the device is done with it; None: it is."""
    read: Callable[[], Measured] | None = None
    """Returns the measurement; None: the step was not measured."""

    def add(self, batch: Any) -> None:
        """Keep a microbatch."""
        self.batches.append(batch)
        self.versions += [(each, each._version) for each in tensors(batch) if not each.is_inference()]

    @property
    def overwritten(self) -> bool:
        """Whether a tensor of a batch was changed in place since."""
        return any(tensor._version != version for tensor, version in self.versions)


class Watch:
    """Says what a training computes in, meters it, and explains the first step that is not finite.

    It changes no bit of the training, and reads nothing back from an accelerator before that is done with it.
    Create it after the optimizer, and call ``step`` after each optimizer step::

        watch = mantissa.Watch(model, optimizer)
        for inputs, targets in loader:
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)

    Args:
        model: as the loop calls it; also what DDP, FSDP2, accelerate or torch.compile made of it.
        optimizer: of its parameters.
        scaler: the ``torch.amp.GradScaler`` of the loop.
        every: optimizer steps from one that is metered to the next.
        precision: the name of the format that is meant, such as ``bf16``; None: not stated.
        loss: called as ``loss(model, batch)`` where a step is replayed, with what ``keep`` was given. None: the model
            returns its loss, alone, as ``.loss``, or as the first scalar of what it returns.
        folder: where the page of a failure is written.
        on_failure: ``raise`` a ``NotFiniteError``, or ``warn``, and watch no longer.
        keep_weights: whether a second copy of the weights is kept, to replay a step from the weights before it. None:
            on accelerators, where a failure is known some steps later.
        build: returns the model as before FSDP2 sharded it, for the replay.
        say: hears what is set up, the warnings and the report of a failure.

    Raises:
        UsageError: an argument cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any = None,
        every: int = 50,
        *,
        precision: str | None = None,
        loss: Loss | None = None,
        folder: str | Path = "mantissa-report",
        on_failure: str = "raise",
        keep_weights: bool | None = None,
        build: Callable[[], nn.Module] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        trains = isinstance(model, nn.Module) and next(model.parameters(), None) is not None
        check_type("model", model, trains, "a module with parameters")
        check_type("optimizer", optimizer, hasattr(optimizer, "param_groups"), "an optimizer")
        check_type("scaler", scaler, scaler is None or hasattr(scaler, "is_enabled"), "the loop's GradScaler")
        if every < 1:
            raise UsageError(f"every={every} must be 1 or more, such as 50")
        if precision is not None and precision not in FORMATS:
            raise UsageError(f"precision={precision!r} is unknown; use one of {', '.join(FORMATS)}")
        if on_failure not in ("raise", "warn"):
            raise UsageError(f"on_failure={on_failure!r} is unknown; use 'raise' or 'warn'")
        self.model = unwrapped(model)
        self._scaler: Any = scaler if scaler is not None else getattr(optimizer, "scaler", None)  # accelerate's has one
        self._gradient_state = getattr(optimizer, "gradient_state", None)
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._every, self._precision, self._loss = every, precision, loss
        self._folder, self._on_failure, self._build, self._say = Path(folder), on_failure, build, say
        modules = [model, *model.modules()]
        self.compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
        self._device = next(self.model.parameters()).device
        self._parameters = [each for each in changed_by(self.optimizer) if each.requires_grad]
        self._sharded = any(hasattr(each, "to_local") for each in self.model.parameters())
        self._ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._later = self._device.type != "cpu" if keep_weights is None else keep_weights
        with torch.no_grad():
            self._bad = torch.zeros((), dtype=torch.bool, device=self._device)
            self._weights: list[Kept] = [(each, local(each).clone(), 0) for each in self._parameters if self._later]
            self._buffers: list[Kept] = [(each, local(each).clone(), each._version) for each in self.model.buffers()]
        self.number = 0
        """Number of the last optimizer step."""
        self.skipped = 0
        self.setup: Setup | None = None
        self.history: list[Measured] = []
        """Measurements of all metered steps."""
        self._in_a_row = 0
        self._returns_loss = False
        self._parts = False
        """Whether the losses of passes are parts of the step's, divided by the targets of all, as transformers'."""
        self._waiting: deque[_Step] = deque()
        self._warned: set[str] = set()
        self._now = _Step()
        self._first = FirstStep(self.model, self.optimizer, self._scaler, not self.compiled)
        self.meters = Meters(self.model, self.optimizer, not self.compiled)
        if every == 1:
            self.meters.begin()
        self._watching = True
        """Whether no step has failed yet, and the loop has not ended."""
        self._hooks = ExitStack()
        self._hooks.callback(self.optimizer.register_step_pre_hook(self._stepping).remove)
        self._hooks.callback(self.optimizer.register_step_post_hook(self._stepped).remove)
        if model._compiled_call_impl is None:
            before = model.register_forward_pre_hook(Listener(self._forward), prepend=True, with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(model.register_forward_hook(Listener(self._returned)).remove)
        else:
            self._listen_to_compiled(model)

    def _listen_to_compiled(self, model: nn.Module) -> None:
        """Listen to a model that ``model.compile()`` compiled with its hooks."""
        compiled: Any = model._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            self._forward(model, args, kwargs)
            output = compiled(*args, **kwargs)
            self._returned(model, args, output)
            return output

        model._compiled_call_impl = call
        self._hooks.callback(setattr, model, "_compiled_call_impl", compiled)

    def keep(self, batch: Any) -> Any:
        """Keep a microbatch for ``loss``, before its forward pass, and return it."""
        self._begin()
        self._now.add(batch)
        return batch

    def _begin(self) -> None:
        if self._now.generators is None:
            self._now.generators = note_random_state(self._device)
            self._save(self._buffers)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._begin()
            self._parts = "num_items_in_batch" in kwargs
            if torch.is_autocast_enabled(self._device.type) and self.number == 0:
                self._first.autocast.setdefault("", torch.get_autocast_dtype(self._device.type))
            if self._loss is None:
                self._now.add((args, kwargs))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        loss = loss_in(output) if torch.is_grad_enabled() else None
        if loss is not None:
            self._returns_loss = True
            self._now.losses.append(loss.detach())

    @torch.no_grad()
    def _save(self, tensors: list[Kept]) -> None:
        """Copy what a step starts from, unless an earlier step was bad: the host need not know that yet."""
        for tensor, kept, _ in tensors:
            if self._later:
                torch.where(self._bad, kept, local(tensor.detach()), out=kept)
            else:
                kept.copy_(local(tensor.detach()))

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any((*args[1:], kwargs.get("closure"))):  # else gradients are computed inside of the step
            self.before_update()

    @torch.no_grad()
    def before_update(self) -> None:
        """Look at the gradients. The optimizer calls it, but where its ``step`` is given a closure."""
        now = self._now
        if now.sound is not None:
            return
        if self.setup is None:
            self._first.before_update()
        self._save(self._weights)
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        now.sound = are_finite(gradients, self._device, exact=not self._later)
        scaled = self._scaling
        if scaled:  # ranks may skip apart, and it is no failure
            now.skipped = getattr(self.optimizer, "found_inf", None)
        else:
            known = self._finite(now.losses)
            now.sound = self._agreed(now.sound & known)
            self._bad |= ~now.sound
            if not self._later and not now.sound:
                self.number = now.number = self.number + 1
                self._fail("a gradient is not finite" if known else "the loss is not finite", now)
                return
        if (self.number + 1) % self._every == 0 and gradients:
            left = getattr(self.optimizer, "grad_scale", None)  # what a fused optimizer divides by
            scale = self._scaler._scale if scaled and left is None else None
            self.meters.before(self.half, scale, None if left is None else left.reciprocal())

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = self._now
        now.updated = True
        if (self.number + 1) % self._every == 0 and self.meters.ready and now.sound is not None:
            self.meters.after(self.number + 1, now.sound if now.skipped is None else now.skipped == 0)

    @property
    def _scaling(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())

    @property
    def effective(self) -> str:
        """The name of the format that the forward pass was seen to compute in."""
        seen = {each for each in self._first.autocast.values() if each}
        seen |= {policy.param_dtype for policy, _ in policies(self.model) if policy.param_dtype}
        stored = {each.dtype for each in self._parameters}
        half, held = ([each for each in (torch.bfloat16, torch.float16) if each in them] for them in (seen, stored))
        if half:
            return computing_in(half[0], torch.float32)
        if self._precision in PRECISIONS and (self.compiled or FORMATS[self._precision].number is TF32):
            return self._precision
        return computing_in(None, held[0] if held else torch.float32)

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit dtype of ``effective``; None: it has 32 bits."""
        return FORMATS[self.effective].half

    def _finite(self, losses: list[Tensor]) -> Tensor:
        if not self._later:
            return torch.tensor(all(map(finite, losses)))
        return torch.stack([each.to(self._device).isfinite().all() for each in losses] or [~self._bad]).all()

    def _agreed(self, sound: Tensor) -> Tensor:
        """Return whether it is so on all ranks, so that all stop at the same step."""
        if not self._ranks:
            return sound
        found = sound.float()
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return found > 0

    @torch.no_grad()
    def step(self, loss: Tensor | float | None = None) -> None:
        """Say that an optimizer step was taken, or skipped by its scaler.

        Args:
            loss: of the step, a scalar; None: what the model returned.

        Raises:
            NotFiniteError: the step, or on an accelerator one shortly before, was not finite.
            UsageError: ``loss`` has no batches.
        """
        now = self._now
        syncs = getattr(self._gradient_state, "sync_gradients", True)
        if not self._watching or not syncs or not (now.updated or self._scaling):
            return  # it failed before, or gradients are still added up
        if self._loss is not None and not now.batches:
            raise UsageError("Watch(loss=…) is given no batches; call watch.keep(batch) before each forward pass")
        self.number = now.number = self.number + 1
        if now.sound is None:
            self._save(self._weights)
            now.sound = self._bad.logical_not()
        losses = now.losses if loss is None else [torch.as_tensor(loss).detach()]
        sound = self._agreed(self._finite(losses))
        self._bad |= ~sound
        skipped = torch.full((), float(not now.updated), device=self._device)
        if now.updated and now.skipped is not None:
            skipped = now.skipped.float().reshape(())
        now.flags = torch.stack([now.sound.float(), sound.float(), skipped]).to("cpu", non_blocking=True)
        if self.number % self._every == 0 and now.updated:
            whole = [torch.stack(losses).sum()] if self._parts and losses else losses
            now.read = self.meters.end(self.number, whole, self.skipped)
        if self.setup is None and now.updated:
            self._state_setup()
        if (self.number + 1) % self._every == 0:
            self.meters.begin()
        now.event = self._mark()
        self._waiting.append(now)
        self._now = _Step()
        while self._waiting and (self._waiting[0].event is None or self._waiting[0].event.query()):
            self._learn(self._waiting.popleft())

    def _mark(self) -> Any:
        """Return an event after which the device is done with this step; None: it is."""
        event = None if self._device.type == "cpu" else torch.Event(self._device)
        if event is not None:
            event.record()
        return event

    def _state_setup(self) -> None:
        self._first.close()
        self._buffers = [each for each in self._buffers if each[0]._version != each[2]]
        self.setup = read_setup(self._first, self._precision)
        if not self._ranks or dist.get_rank() == 0:
            self._say(str(self.setup))

    def _learn(self, step: _Step) -> None:
        """Take in the outcome of a step."""
        gradients, loss, skipped = step.flags.tolist()
        self.skipped += bool(skipped)
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if step.read is not None:
            self.history.append(step.read())
            self._warn(self.history[-1])
        reasons = {
            "the loss is not finite": not loss,
            "a gradient is not finite": not gradients and not self._scaling,
            f"the loss scaler skipped {SKIPS} steps in a row": self._in_a_row >= SKIPS,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            self._fail(reason, step)

    def _warn(self, now: Measured) -> None:
        """Say what is harmful in a measurement, and was not said yet."""
        lost = {name: counts for name, counts in now.lost.items() if counts.loses_updates and name not in self._warned}
        near = [name for name, bits in now.overflow.items() if bits < _NEAR and name not in self._warned]
        if self._scaling:  # a scaler raises its scale until gradients overflow
            near = [name for name in near if not name.endswith(".grad")]
        self._warned |= {*lost, *near}
        for name, counts in lost.items():
            share = f"{counts.lost_share:.0%} of the updates of parameter group {name}"
            self._say(f"step {now.step}: {share} are lost, too small for the weights' dtype: keep fp32 weights.")
        if near:
            cure = "compute there in fp32, or in bf16 in the place of fp16"
            self._say(
                f"step {now.step}: {listed(near, 'tensor')} within a factor of 2 of their dtype's largest: {cure}."
            )

    def __str__(self) -> str:
        """Return the first and the last measurement beside each other."""
        if not self.history:
            return f"{self.number} steps, {self.skipped} skipped, none measured (every={self._every})"
        rows = [["", *(f"step {each.step}" for each in (self.history[0], self.history[-1]))]]
        for text, values in (
            ("loss", lambda each: {"": each.loss}),
            ("lost updates, group ", lambda each: {name: counts.lost_share for name, counts in each.lost.items()}),
            ("weight norm, group ", lambda each: each.weights),
            ("bits to overflow, ", lambda each: each.overflow),
            ("bits to underflow, ", lambda each: each.underflow),
        ):
            first, last = values(self.history[0]), values(self.history[-1])
            names = sorted(last, key=last.__getitem__)[:3] if "bits" in text else list(last)
            rows += [[f"{text}{name}", f"{first.get(name, math.nan):.4g}", f"{last[name]:.4g}"] for name in names]
        return f"{self.number} steps, {self.skipped} skipped\n{columns(rows)}"

    def close(self) -> None:
        """Wait for the steps that the device has not finished, look at them, and watch no longer."""
        while self._waiting:
            step = self._waiting.popleft()
            if step.event is not None:
                step.event.synchronize()
            self._learn(step)
        if self._watching and not self.number:
            self._say("Watch saw no step of its optimizer: give it the one that the loop steps; call watch.step after.")
        self._remove()

    def _remove(self) -> None:
        self._first.close()
        self.meters.close()
        self._hooks.close()
        self._waiting.clear()
        self._watching = False

    def _fail(self, reason: str, step: _Step) -> None:
        """Replay a step, say what is found, and raise or warn."""
        self._remove()
        rank = f"rank{dist.get_rank()}" if self._ranks else ""
        began = f"step {step.number}: {reason}" + (f" ({rank}, which replays its own batches)" if rank else "")
        try:
            report = self._replay(step)
        except Exception as error:  # of any kind: what is in a model decides
            ended = f"{began}; the step cannot be replayed: {error}"
        else:
            page = report.write(self._folder / rank, "mantissa.Watch(…)")
            notes = {
                "the run is compiled, and its replay is eager": self.compiled,
                "the loss is not known: give Watch(loss=…)": self._loss is None and not self._returns_loss,
                "a batch was changed in place after it was kept, and the replay has what it holds now": (
                    step.overwritten
                ),
                "the replay has the weights of after the update": step.updated and not self._later,
            }
            said = [f"note: {note}" for note, holds in notes.items() if holds]
            self._say("\n".join([began, str(report), *said, f"written to {page}"]))
            found = ["its replay is finite"]
            if report.findings and not report.diagnosis.finite:
                found = report.findings[0].parts
            ended = "; ".join([began, *found, f"see {page}"])
        if self._on_failure == "raise":
            raise NotFiniteError(ended)
        warnings.warn(ended, stacklevel=2)

    def _replay(self, step: _Step) -> Report:
        if self._device.type != "cpu" and not self._later:
            raise FormatError("the weights before it are gone; keep them with Watch(keep_weights=True)")
        if not step.batches:
            raise FormatError("no forward pass of the model was seen; give Watch the model that the loop calls")
        with self._before_the_step():
            model = self._gathered() if self._sharded else self.model
            known = set(map(id, model.parameters()))
            whole = not self._later and all(id(each) in known for each in self._parameters)
            return examine(
                model,
                self._loss or call,
                [tree_map_only(Tensor, Tensor.detach, batch) for batch in step.batches],
                self.effective,
                self.optimizer if whole else None,
                accumulate=len(step.batches),
                number=step.number,
                generators=step.generators() if step.generators else None,
                failed=True,
                checks=(SWEEP, "manifest", "range", "islands"),
            )

    def _gathered(self) -> nn.Module:
        """Return the model that FSDP2 sharded, whole, on every rank."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        if self._build is None:
            raise FormatError("FSDP2 shards its weights; give Watch(build=…), which returns the model before that")
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        model = self._build().to(self._device).train(self.model.training)
        model.load_state_dict(state)
        return model

    @contextmanager
    def _before_the_step(self) -> Iterator[None]:
        """Give the model the weights and buffers from before the step, and its own forward, for a while."""
        kept = self._weights + self._buffers
        patched = vars(self.model).pop("forward", None) if hasattr(self.model, "_original_forward") else None
        _swap(kept)
        try:
            yield
        finally:
            _swap(kept)
            if patched is not None:
                self.model.forward = patched


@torch.no_grad()
def _swap(tensors: list[Kept]) -> None:
    for one, other, _ in tensors:
        kept = local(one).clone()
        local(one).copy_(other)
        other.copy_(kept)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of what DDP and torch.compile made of it."""
    inner: Any = model
    while isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    return inner


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in what a model returns: ``.loss``, or the first scalar; None: there is none."""
    own = getattr(output, "loss", None)
    scalars = [each for each in numbers_in(output) if each.ndim == 0]
    return own if isinstance(own, Tensor) else next(iter(scalars), None)


def call(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with ``(args, kwargs)``; return its loss, or a stand-in where it returns none."""
    args, kwargs = batch
    output = model(*args, **kwargs)
    loss = loss_in(output)
    return loss if loss is not None else torch.stack([each.float().mean() for each in numbers_in(output)]).mean()
