"""``mantissa.Watch``: what precision does to a training loop of one's own, while it runs."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.utils._pytree import tree_map_only

from mantissa.display import columns, counted, listed
from mantissa.doctor.diagnosis import SWEEP
from mantissa.doctor.examine import PRECISIONS, Report, examine
from mantissa.errors import FormatError, NotFiniteError, UsageError, check_type, described
from mantissa.formats import FORMATS, TF32, computing_in, format_name
from mantissa.step.loop import Loss
from mantissa.tensors import NotedState, changed_by, finite, local, numbers_in, tensors
from mantissa.watch.meters import Measured, Meters, are_finite
from mantissa.watch.setup import FirstStep, Listener, Setup, observing, policies, read_setup, refuses_to_unscale

SKIPS = 10
"""Steps that a loss scaler skips one after another before that is a failure."""
_NEAR = 1.0
"""Bits below the largest number of a dtype that are worth a warning."""
_FAR = 40.0
"""Bits to overflow or underflow from which on they say nothing; fp16 has 40 in all."""


Kept = tuple[Tensor, Tensor, int]
"""A weight or a buffer, this rank's part of it as it was, and how often it had been changed at the start."""


class _Pass:
    """A forward pass: what it takes in, for its replay, and the loss that the model returned."""

    def __init__(self, number: int, batch: Any, generators: NotedState) -> None:
        if any(each.requires_grad for each in tensors(batch)):  # else it would keep the graph of another model
            batch = tree_map_only(Tensor, Tensor.detach, batch)
        self.number, self.batch, self.generators = number, batch, generators
        self.loss: Tensor | None = None


@dataclass
class _Step:
    """A step: what it takes in, for its replay, and its outcome, which the host may not know yet."""

    began: tuple[int, int] | None = None
    """How often it was updated, and a weight was changed, when its passes began; None: they did not begin."""
    passes: list[_Pass] = field(default_factory=list)
    """Those that count: whose backward pass ran, or that were given to ``keep``."""
    sound: Any = None
    """Whether the gradients are finite; None: they were not looked at."""
    skipped: Tensor | None = None
    """Whether a fused optimizer skips it; None: there is none."""
    updates: int = 0
    """How often the optimizer has stepped."""
    number: int = field(init=False)
    flags: Any = field(init=False)
    """On the host: whether gradients are finite, whether losses are, whether the step was skipped, the loss scale."""
    event: Any = None
    """Event after which the device is done with it; None: it is."""
    read: Callable[[], Measured] | None = None
    """Returns the measurement; None: the step was not measured."""

    @property
    def losses(self) -> list[Tensor]:
        """Losses that the model returned."""
        return [each.loss for each in self.passes if each.loss is not None]


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
        precision: the format that is meant, such as ``bf16``, ``torch.bfloat16`` or ``bf16-mixed``; None: not stated.
        loss: called as ``loss(model, batch)`` where a step is replayed, with what ``keep`` was given. None: the model
            returns its loss, alone, by the name ``loss``, or as the first scalar of what it returns.
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
        precision: str | torch.dtype | None = None,
        loss: Loss | None = None,
        folder: str | Path = "mantissa-report",
        on_failure: str = "raise",
        keep_weights: bool | None = None,
        build: Callable[[], nn.Module] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        trains = isinstance(model, nn.Module) and next(model.parameters(), None) is not None
        check_type("model", model, trains, "a module with parameters")
        check_type("optimizer", optimizer, isinstance(inner, torch.optim.Optimizer), "an optimizer of torch")
        check_type("scaler", scaler, scaler is None or hasattr(scaler, "is_enabled"), "the loop's GradScaler")
        if every < 1:
            raise UsageError(f"every={every} must be 1 or more, such as 50")
        self._precision = None if precision is None else format_name(precision)
        if self._precision is not None and self._precision not in FORMATS:
            raise UsageError(f"precision={precision!r} is unknown; use one of {', '.join(FORMATS)}")
        if on_failure not in ("raise", "warn"):
            raise UsageError(f"on_failure={on_failure!r} is unknown; use 'raise' or 'warn'")
        self.model = unwrapped(model)
        self._scaler: Any = scaler if scaler is not None else getattr(optimizer, "scaler", None)  # accelerate's has one
        self._gradient_state = getattr(optimizer, "gradient_state", None)
        self.optimizer: torch.optim.Optimizer = inner
        self._every, self._loss = every, loss
        self._folder, self._on_failure, self._build, self._say = Path(folder), on_failure, build, say
        modules = [model, *model.modules()]
        self.compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
        self._device = next(self.model.parameters()).device
        self._on_cpu = self._device.type == "cpu"
        self._sharded = any(hasattr(each, "to_local") for each in self.model.parameters())
        self._ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._later = not self._on_cpu if keep_weights is None else keep_weights
        trained = [each for each in changed_by(self.optimizer) if each.requires_grad]
        self._probe = next(iter(trained), next(self.model.parameters()))
        """A weight that every step changes."""
        self._changes: int | None = None
        """How often that had been changed when ``step`` was called last."""
        with torch.no_grad():
            self._bad = torch.zeros((), dtype=torch.bool, device=self._device)
            self._weights: list[Kept] = [(each, local(each).clone(), 0) for each in trained if self._later]
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
        self._passes = 0
        self._entered: _Pass | None = None
        """The forward pass that has not returned yet."""
        self._stepping_now = self._looked = False
        """Whether the optimizer is in its step, and whether its gradients were looked at before it."""
        self._scales: Any = getattr(self._scaler, "_per_optimizer_states", None)
        """What the scaler kept of its optimizers when ``step`` was called last; each of its updates begins anew."""
        self._counted: Any = None
        """What of that was counted as a step."""
        self._others: Any = None
        """State of numpy's and Python's generators where a step leaves them alone; None: it may draw from them."""
        self._first = FirstStep(self.model, self.optimizer, self._scaler, not self.compiled, self._not_measured)
        self.meters = Meters(self.model, self.optimizer, not self.compiled, self._not_measured)
        if every == 1:
            self.meters.begin()
        self._watching = True
        """Whether no step has failed yet, and the loop has not ended."""
        if self._scaling and (refused := refuses_to_unscale(self.optimizer)):
            self._say(refused)
        self._hooks = ExitStack()
        self._hooks.callback(self.optimizer.register_step_pre_hook(Listener(self._stepping)).remove)
        self._hooks.callback(self.optimizer.register_step_post_hook(Listener(self._stepped)).remove)
        forward, returned = Listener(self._forward), Listener(self._returned)
        if model._compiled_call_impl is None:
            before = model.register_forward_pre_hook(forward, prepend=True, with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(model.register_forward_hook(returned).remove)
        else:
            self._listen_to_compiled(model, forward, returned)

    def _listen_to_compiled(self, model: nn.Module, forward: Listener, returned: Listener) -> None:
        """Listen to a model that ``model.compile()`` compiled with its hooks."""
        compiled: Any = model._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            forward(model, args, kwargs)
            output = compiled(*args, **kwargs)
            returned(model, args, output)
            return output

        model._compiled_call_impl = call
        self._hooks.callback(setattr, model, "_compiled_call_impl", compiled)

    def keep(self, batch: Any) -> Any:
        """Keep a microbatch for ``loss``, before its forward pass, and return it."""
        self._keep(batch)
        return batch

    @observing
    def _keep(self, batch: Any) -> None:
        kept = self._pass(batch)
        self._now.passes.append(kept)

    def _pass(self, batch: Any) -> _Pass:
        now, start = self._now, (self._now.updates, self._version)
        if now.began != start:  # the passes before it are those of an update that was not said to be a step
            now.began, now.passes = start, []
            if self._buffers:
                self._save(self._buffers)
            if self._metered:
                self._others = None
        self._passes += 1
        return _Pass(self._passes, batch, NotedState(self._device, self._others))

    @property
    def _version(self) -> int:
        return 0 if self._sharded else self._probe._version

    @property
    def _metered(self) -> bool:
        return self.setup is None or (self.number + 1) % self._every == 0

    @observing
    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._parts = "num_items_in_batch" in kwargs
            if self.number == 0 and torch.is_autocast_enabled(self._device.type):
                self._first.autocast.setdefault("", torch.get_autocast_dtype(self._device.type))
            if self._loss is None:
                self._entered = self._pass((args, kwargs))

    @observing
    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        entered, self._entered = self._entered, None
        if entered is None or not torch.is_grad_enabled():
            return
        loss = loss_in(output)
        if loss is not None:
            self._returns_loss, entered.loss = True, loss.detach()
        held = [entered]

        def count(gradients: Any) -> None:
            while held:  # the graph may outlive the step
                self._now.passes.append(held.pop())

        nodes = {each.grad_fn for each in ([loss] if loss is not None else numbers_in(output))} - {None}
        for node in nodes:
            node.register_prehook(count)  # type: ignore[union-attr]
        if not nodes:  # who knows what is in the output
            count(None)

    @torch.no_grad()
    def _save(self, tensors: list[Kept]) -> None:
        """Copy what a step starts from, unless an earlier step was bad: the host need not know that yet."""
        if not self._later:
            torch._foreach_copy_([kept for _, kept, _ in tensors], [local(tensor) for tensor, _, _ in tensors])
        for tensor, kept, _ in tensors if self._later else ():
            torch.where(self._bad, kept, local(tensor.detach()), out=kept)

    def _save_weights(self) -> None:
        if self._later:
            known = {id(each) for each, _, _ in self._weights}
            self._save(self._weights)
            added = [each for each in changed_by(self.optimizer) if each.grad is not None and id(each) not in known]
            self._weights += [(each, local(each).detach().clone(), 0) for each in added]

    @observing
    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping_now, self._looked = True, False
        if all(each is None for each in (*args[1:], kwargs.get("closure"))):  # else it computes gradients in its step
            self.before_update()

    @observing
    @torch.no_grad()
    def before_update(self) -> None:
        """Look at the gradients. The optimizer calls it, but where its ``step`` is given a closure."""
        now, self._looked = self._now, True
        if self.setup is None:
            self._first.before_update()
        if self._metered and now.passes:
            self._others = now.passes[0].generators.unchanged()
        self._save_weights()
        gradients = [gradient for each in changed_by(self.optimizer) if (gradient := each.grad) is not None]
        now.skipped = getattr(self.optimizer, "found_inf", None)
        self._judge(are_finite(gradients, self._device, not self._later))
        if self._watching and (self.number + 1) % self._every == 0 and gradients:
            left = getattr(self.optimizer, "grad_scale", None)  # what a fused optimizer divides by
            scale = self._scaler._scale if self._scaling and left is None else None
            self.meters.before(self.half, scale, None if left is None else left.reciprocal())

    def _judge(self, sound: Tensor | bool) -> None:
        """Take in whether an update is sound; a scaler skips it where it is not."""
        now = self._now
        if self._scaling or now.skipped is not None:  # ranks may skip apart
            now.sound = sound
            return
        now.sound = self._agreed(sound)
        if self._later:
            self._bad |= torch.logical_not(now.sound)
        elif not now.sound:
            self.number = now.number = self.number + 1
            self._fail("a gradient is not finite" if self._finite(now.losses) else "the loss is not finite", now)

    @observing
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = self._now
        if not self._stepping_now:  # it was the step of a base class, in that of the optimizer
            return
        self._stepping_now = False
        now.updates += 1
        if not self._looked:  # its gradients, and so its weights, are those of the closure
            now.skipped = None
            self._judge(are_finite([each.detach() for each in changed_by(optimizer)], self._device, not self._later))
            self._save_weights()
        elif (self.number + 1) % self._every == 0 and self.meters.ready:
            self.meters.after(self.number + 1, now.sound if now.skipped is None else now.skipped == 0)

    @property
    def _scaling(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())

    @property
    def effective(self) -> str:
        """The name of the format that the forward pass was seen to compute in."""
        seen = {each for each in self._first.autocast.values() if each}
        seen |= {policy.param_dtype for policy, _ in policies(self.model) if policy.param_dtype}
        stored = {each.dtype for each in changed_by(self.optimizer) if each.requires_grad}
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

    def _finite(self, losses: list[Tensor]) -> Any:
        if not self._later:
            return all(map(finite, losses))
        return torch.stack([each.to(self._device).isfinite().all() for each in losses] or [~self._bad]).all()

    def _agreed(self, sound: Tensor | bool) -> Tensor | bool:
        """Return whether it is so on all ranks, of which each has a part, so that all stop at the same step."""
        if not self._ranks or not self._sharded:  # then gradients are summed, or ranks have nothing in common
            return sound
        found = torch.as_tensor(sound, dtype=torch.float32, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return found > 0

    @observing
    @torch.no_grad()
    def step(self, loss: Tensor | float | None = None) -> None:
        """Say that an optimizer step was taken, or skipped by its scaler.

        Args:
            loss: of the step, a scalar; None: what the model returned.

        Raises:
            NotFiniteError: an update, or on an accelerator one shortly before, was not finite.
            UsageError: ``loss`` has no batches in the first step.
        """
        now, self._entered = self._now, None
        tried, changes, self._changes = self._scaler_tried(), self._changes, self._version
        syncs = getattr(self._gradient_state, "sync_gradients", True)
        if not self._watching or not syncs or not (now.updates or tried):
            if self._watching and changes not in (None, self._version):
                self._once("The optimizer did not step, and weights have changed: give a new optimizer a new Watch.")
            return  # it failed before, or gradients are still added up
        if self._loss is not None and not now.passes and not self.number:
            raise UsageError("Watch(loss=…) is given no batches; call watch.keep(batch) before each forward pass")
        self.number = now.number = self.number + 1
        if not isinstance(loss, (Tensor, Number)):
            loss = loss_in(loss)  # given what the model returns
        losses = now.losses if loss is None else [loss.detach() if isinstance(loss, Tensor) else torch.as_tensor(loss)]
        skipped = not now.updates if now.skipped is None else now.skipped
        scale = getattr(self._scaler, "_scale", None) if self._scaling else None
        flags = [now.sound is None or now.sound, self._finite(losses), skipped, 1.0 if scale is None else scale]
        now.flags = self._on_host(flags) if self._later else list(map(float, flags))
        whole = [torch.stack(losses).sum()] if self._parts and losses else losses
        if self.number % self._every == 0:
            read = self.meters.end(self.number, whole, self.skipped)
            now.read = read if now.updates else None
        if self.setup is None and now.updates:
            self._first.updates = now.updates
            self._state_setup()
        if (self.number + 1) % self._every == 0:
            self.meters.begin()
        now.event = self._mark()
        self._waiting.append(now)
        self._now = _Step()
        while self._waiting and (self._waiting[0].event is None or self._waiting[0].event.query()):
            self._learn(self._waiting.popleft())

    def _scaler_tried(self) -> bool:
        """Return whether the scaler was asked for a step since the last call, which it may have skipped."""
        before, self._scales = self._scales, getattr(self._scaler, "_per_optimizer_states", None)
        for scales in (before, self._scales) if self._scaling else ():  # it may be updated after this call
            stage = scales.get(id(self.optimizer), {}).get("stage")
            if stage is OptState.STEPPED and scales is not self._counted:
                self._counted = scales
                return True
        return False

    def _on_host(self, flags: list[Any]) -> Tensor:
        scalars = [
            torch.full((), each, device=self._device) if not isinstance(each, Tensor) else each.reshape(())
            for each in flags
        ]
        return torch.stack([each.float() for each in scalars]).to("cpu", non_blocking=True)

    def _mark(self) -> Any:
        """Return an event after which the device is done with this step; None: it is."""
        return None if self._on_cpu else torch.accelerator.current_stream(self._device).record_event()

    def _state_setup(self) -> None:
        self._first.close()
        self._buffers = [each for each in self._buffers if each[0]._version != each[2]]
        self.setup = read_setup(self._first, self._precision)
        if not self._ranks or dist.get_rank() == 0:
            self._say(str(self.setup))

    def _learn(self, step: _Step) -> None:
        """Take in the outcome of a step."""
        gradients, loss, skipped, scale = step.flags if isinstance(step.flags, list) else step.flags.tolist()
        self.skipped += bool(skipped)
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if step.read is not None:
            self.history.append(step.read())
            self._warn(self.history[-1])
        if not gradients and not skipped:
            self._fail("a gradient is not finite" if loss else "the loss is not finite", step)
        elif self._in_a_row >= SKIPS and (scale <= 1 or not loss):  # else it comes down from a high scale
            self._fail(f"the loss scaler skipped {self._in_a_row} steps in a row", step)
        elif not loss:
            self._once("The loss is not finite, but the update is: the training goes on.")

    def _once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(f"step {self.number}: {text}")

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
            return f"{counted(self.number, 'step')}, {self.skipped} skipped, none measured (every={self._every})"
        rows = [["", *(f"step {each.step}" for each in (self.history[0], self.history[-1]))]]
        for text, values in (
            ("loss", lambda each: {"": each.loss}),
            ("lost updates, group ", lambda each: {name: counts.lost_share for name, counts in each.lost.items()}),
            ("weight norm, group ", lambda each: each.weights),
            ("bits to overflow, ", lambda each: each.overflow),
            ("bits to underflow, ", lambda each: each.underflow),
        ):
            first, last = values(self.history[0]), values(self.history[-1])
            near = [name for name in sorted(last, key=last.__getitem__)[:3] if last[name] < _FAR]
            names = near if "bits" in text else list(last)
            rows += [[f"{text}{name}", f"{first.get(name, math.nan):.4g}", f"{last[name]:.4g}"] for name in names]
        return f"{counted(self.number, 'step')}, {self.skipped} skipped\n{columns(rows)}"

    def metrics(self) -> dict[str, float]:
        """Return the last measurement for any logger, as numbers by name; empty before the first."""
        if not self.history:
            return {}
        last = self.history[-1]
        found = {"loss": last.loss, "skipped_steps": last.skipped}
        found |= {f"lost_updates/{group}": counts.lost_share for group, counts in last.lost.items()}
        found |= {f"weight_norm/{group}": norm for group, norm in last.weights.items()}
        found |= {
            f"least_bits_to_{name}": min(getattr(last, name).values(), default=math.nan)
            for name in ("overflow", "underflow")
        }
        return {f"precision/{name}": value for name, value in found.items()}

    @observing
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

    def _missed(self, error: Exception) -> None:
        """Say why the training, which goes on, can be watched no longer."""
        self._remove()
        self._say(f"Watch cannot follow this loop after step {self.number}, and ends: {described(error)}")

    def _not_measured(self, error: Exception) -> None:
        self._once(f"Not all can be measured: {described(error)}")

    def _remove(self) -> None:
        self._first.close()
        self.meters.close()
        self._hooks.close()
        self._waiting.clear()
        self._now = _Step()
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
                "the replay has the weights of after the update": step.updates > 0 and not self._later,
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
        if not self._on_cpu and not self._later:
            raise FormatError("the weights before it are gone; keep them with Watch(keep_weights=True)")
        passes = sorted(step.passes, key=lambda each: each.number)
        if not passes:
            raise FormatError("no forward pass of the model was seen; give Watch the model that the loop calls")
        with self._before_the_step():
            model = self._gathered() if self._sharded else self.model
            known = set(map(id, model.parameters()))
            whole = not self._later and all(id(each) in known for each in changed_by(self.optimizer))
            return examine(
                model,
                self._loss or call,
                [each.batch for each in passes],
                self.effective,
                self.optimizer if whole else None,
                accumulate=len(passes),
                number=step.number,
                generators=passes[0].generators(),
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
    """Return the loss in what a model returns: its ``loss``, or the first scalar; None: there is none."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    scalars = [each for each in numbers_in(output) if each.ndim == 0]
    return own if isinstance(own, Tensor) else next(iter(scalars), None)


def call(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with ``(args, kwargs)``; return its loss, or a stand-in where it returns none."""
    args, kwargs = batch
    output = model(*args, **kwargs)
    loss = loss_in(output)
    return loss if loss is not None else torch.stack([each.float().mean() for each in numbers_in(output)]).mean()
