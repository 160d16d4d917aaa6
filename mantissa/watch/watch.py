"""``mantissa.Watch``: what precision does to a training loop of one's own, while it runs."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from numbers import Number
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mantissa.display import counted, listed
from mantissa.doctor.checks import ISLANDS, MANIFEST, RANGE, SWEEP
from mantissa.doctor.examine import PRECISIONS, Report, examine
from mantissa.errors import FormatError, NotFiniteError, UsageError, check_number, check_type, described
from mantissa.formats import FORMATS, TF32, computing_in
from mantissa.names import format_name
from mantissa.step.loop import Loss
from mantissa.tensors import changed_by, check_model, finite, innermost, numbers_in
from mantissa.watch.first_step import FirstStep
from mantissa.watch.hooks import Listener, observing
from mantissa.watch.meters import Measured, Meters, are_finite, side_by_side
from mantissa.watch.passes import Pass, WatchedStep, call, loss_in, unwrapped, without_targets
from mantissa.watch.scale import LossScale
from mantissa.watch.setup import Setup, policies, read_setup, refuses_to_unscale
from mantissa.watch.snapshot import Snapshot

UNREACHED = 50
"""Steps in which a weight has no gradient, from the first on, before that is said."""
SKIPS = 10
"""Steps that a loss scaler skips, of the last ``2 x SKIPS - 1``, before that is a failure."""
_OUTSIDE = "its loss is computed outside of the model: return it there, or give Watch(loss=…) and watch.keep(batch)"

_LATE = "A pass began between the optimizer's step and watch.step: call watch.step right after the former."


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
        # Arguments that cannot work are refused before anything is hooked.
        inner = innermost(optimizer)
        check_model(model)
        hears = isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks")
        one = "one optimizer of torch (of several, give each a Watch of its own; of a wrapper, the one inside)"
        check_type("optimizer", optimizer, hears, one)
        self._precision = None if precision is None else format_name(precision)
        _check_options(scaler, every, self._precision, loss, Path(folder), on_failure)
        self._every, self._loss, self._say = every, loss, say
        self._folder, self._raises, self._build = Path(folder), on_failure == "raise", build

        # The loop, without the wrappers of libraries.
        self.model = unwrapped(model)
        self.optimizer: torch.optim.Optimizer = inner
        self._scale = LossScale(scaler if scaler is not None else getattr(optimizer, "scaler", None), inner)
        self._gradient_state = getattr(optimizer, "gradient_state", None)  # accelerate's, which counts microbatches
        modules = [model, *model.modules()]
        self.compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
        self._device = next(self.model.parameters()).device
        self._ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

        # What is known of it. On an accelerator the host learns of a step when the device is done with it.
        on_cpu = self._device.type == "cpu"
        self._start = Snapshot(self.model, inner, later=not on_cpu if keep_weights is None else keep_weights)
        self._now = WatchedStep()
        self._waiting: deque[WatchedStep] = deque()
        self.number = 0
        """Number of the last optimizer step."""
        self.skipped = 0
        """Number of steps that the loss scaler has skipped."""
        self._skips: deque[bool] = deque(maxlen=2 * SKIPS - 1)
        """Of the last steps, whether each was skipped: most of them are where ``SKIPS`` are."""
        self.setup: Setup | None = None
        self.history: list[Measured] = []
        """Measurements of all metered steps."""
        self._told: set[str] = set()
        self._unreached: list[nn.Parameter] | None = None
        """Weights of the optimizer that have had no gradient so far; None: no update was looked at."""
        self._watching = True
        """Whether no step has failed yet, and the loop has not ended."""
        self._closed = False
        self._changes: int | None = None
        """Number of changes of the weights when ``step`` was called last."""

        # Forward passes are numbered as they begin: their backward passes, which make them count, run the other way.
        self._numbers = count(1)
        self._entered: Pass | None = None
        """Forward pass that has not returned yet."""
        self._knows_loss = loss is not None
        """Whether a replay has the loss of the loop; False: it takes a stand-in."""

        # The first step is looked at closely, every so many steps one is measured.
        self._first = FirstStep(self.model, inner, self._scale, not self.compiled, self._not_measured)
        self.meters = Meters(self.model, inner, not self.compiled, self._not_measured)
        if every == 1:
            self.meters.begin()
        if self._scale.enabled and (refused := refuses_to_unscale(inner)):
            self._say(refused)

        # Hooks on the optimizer and on the model as the loop calls it; inside of it are those of the first step.
        self._hooks = ExitStack()
        self._hooks.callback(inner.register_step_pre_hook(Listener(self._stepping)).remove)
        self._hooks.callback(inner.register_step_post_hook(Listener(self._stepped)).remove)
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

    # A forward pass: what it takes in is kept, and counts once its backward pass runs.

    def keep(self, batch: Any) -> Any:
        """Keep a microbatch for ``loss``, before its forward pass, and return it."""
        self._keep(batch)
        return batch

    @observing
    def _keep(self, batch: Any) -> None:
        kept = self._pass(batch)
        self._now.passes.append(kept)

    def _pass(self, batch: Any) -> Pass:
        now, start = self._now, (self._now.updates, self._start.version)
        if now.began != start:  # the passes before it are those of an update that was not said to be a step
            now.began, now.passes = start, []
            self._start.begin(anew=self._metered)
        return Pass(next(self._numbers), batch, self._start.generators())

    @property
    def _metered(self) -> bool:
        return self.setup is None or (self.number + 1) % self._every == 0

    @observing
    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._scale.begin_pass()
            self._now.parts = "num_items_in_batch" in kwargs
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
            self._knows_loss, entered.loss = True, loss.detach()
        held = [entered]

        def count_pass(gradients: Any) -> None:
            while held:  # the graph may outlive the step
                self._now.passes.append(held.pop())

        nodes = {number.grad_fn for number in ([loss] if loss is not None else numbers_in(output))} - {None}
        for node in nodes:
            node.register_prehook(count_pass)  # type: ignore[union-attr]
        if not nodes:  # who knows what is in the output
            count_pass(None)

    # An update: gradients are looked at before it, so that a bad one can be stopped.

    @observing
    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._now.updating, self._now.looked = True, False
        if all(given is None for given in (*args[1:], kwargs.get("closure"))):  # a closure computes gradients later
            self.before_update()

    @observing
    @torch.no_grad()
    def before_update(self) -> None:
        """Look at the gradients. The optimizer calls it, but where its ``step`` is given a closure."""
        now = self._now
        now.looked = True
        if self.setup is None:
            self._first.before_update()
        if self._metered and now.passes:
            self._start.compare(now.passes[0].generators)
        self._start.take_weights()
        weights = changed_by(self.optimizer)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        unreached = weights if self._unreached is None else self._unreached
        self._unreached = [weight for weight in unreached if weight.grad is None]
        now.skipped = getattr(self.optimizer, "found_inf", None)
        self._judge(are_finite(gradients, self._device, not self._start.later))
        if self._watching and (self.number + 1) % self._every == 0 and gradients:
            left = getattr(self.optimizer, "grad_scale", None)  # what a fused optimizer divides by
            scale = self._scale.tensor if left is None else None
            self.meters.before(self.half, scale, None if left is None else left.reciprocal())

    def _judge(self, sound: Tensor | bool) -> None:
        """Take in whether an update is sound; a scaler skips it where it is not."""
        now = self._now
        if self._scale.enabled or now.skipped is not None:  # ranks may skip apart
            now.sound = sound
            return
        now.sound = self._agreed(sound)
        if self._start.later:
            self._start.judge(now.sound)
        elif not now.sound:
            self.number = now.number = self.number + 1
            self._fail("a gradient is not finite" if self._finite(now.losses) else "the loss is not finite", now)

    def _agreed(self, sound: Tensor | bool) -> Tensor | bool:
        """Return whether it is so on all ranks, of which each has a part, so that all stop at the same step."""
        if not self._ranks or not self._start.sharded:  # then gradients are summed, or ranks have nothing in common
            return sound
        least = torch.as_tensor(sound, dtype=torch.float32, device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return least > 0

    def _finite(self, losses: list[Tensor]) -> Any:
        if not self._start.later:
            return all(map(finite, losses))
        return torch.stack([loss.to(self._device).isfinite().all() for loss in losses] or [self._start.good]).all()

    @observing
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        now = self._now
        if not now.updating:  # it was the step of a base class, in that of the optimizer
            return
        now.updating = False
        now.updates += 1
        if not now.looked:  # its gradients, and so its weights, are those of the closure
            now.skipped = None
            weights = [weight.detach() for weight in changed_by(optimizer)]
            self._judge(are_finite(weights, self._device, not self._start.later))
            self._start.take_weights()
        elif (self.number + 1) % self._every == 0 and self.meters.ready:
            self.meters.after(self.number + 1, now.sound if now.skipped is None else now.skipped == 0)

    # A step: its outcome is put together on the device, and learnt of when that is done with it.

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
        # Whether it was a step: the optimizer has stepped, or its scaler has skipped it.
        now, self._entered = self._now, None
        tried, changes, self._changes = self._scale.stepped(), self._changes, self._start.version
        syncs = getattr(self._gradient_state, "sync_gradients", True)
        if not self._watching or not syncs or not (now.updates or tried):
            if self._closed:
                self._once("This Watch is closed: make a new one for a loop that goes on.")
            if self._watching and changes not in (None, self._start.version):
                self._once("The optimizer did not step, and weights have changed: give a new optimizer a new Watch.")
            return  # it failed before, or gradients are still added up
        if now.passes and now.updates and now.began == (now.updates, self._start.version):
            self._once(_LATE)
        if self._loss is not None and not now.passes and not self.number:
            raise UsageError("Watch(loss=…) is given no batches; call watch.keep(batch) before each forward pass")
        self.number = now.number = self.number + 1

        # Its outcome: a copy is on its way to the host, and nobody waits for it.
        if not isinstance(loss, (Tensor, Number)):
            loss = loss_in(loss)  # given what the model returns
        losses = now.losses if loss is None else [loss.detach() if isinstance(loss, Tensor) else torch.as_tensor(loss)]
        skipped = not now.updates if now.skipped is None else now.skipped
        scale = self._scale.tensor
        flags = [now.sound is None or now.sound, self._finite(losses), skipped, math.inf if scale is None else scale]
        now.flags = self._on_host(flags) if self._start.later else list(map(float, flags))

        # Its measurement; the hooks of the next one.
        whole = [torch.stack(losses).sum()] if now.parts and losses else losses
        if self.number % self._every == 0:
            read = self.meters.end(self.number, whole, self.skipped)
            now.read = read if now.updates else None
        if self.setup is None and now.updates:
            self._first.updates, self._first.losses = now.updates, {number.dtype for number in losses}
            self._state_setup()
        if self.number == UNREACHED:
            self._name_unreached()
        if (self.number + 1) % self._every == 0:
            self.meters.begin()

        # The steps that the device is done with. Without a copy a replay has the weights of now: then it is waited for.
        now.event = self._mark()
        if now.event is not None and not self._start.later:
            now.event.synchronize()
        self._waiting.append(now)
        self._now = WatchedStep()
        while self._waiting and (self._waiting[0].event is None or self._waiting[0].event.query()):
            self._learn(self._waiting.popleft())

    def _on_host(self, flags: list[Any]) -> Tensor:
        scalars = [
            flag.reshape(()) if isinstance(flag, Tensor) else torch.full((), flag, device=self._device)
            for flag in flags
        ]
        return torch.stack([scalar.float() for scalar in scalars]).to("cpu", non_blocking=True)

    def _mark(self) -> Any:
        """Return an event after which the device is done with this step; None: it is."""
        return None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device).record_event()

    def _state_setup(self) -> None:
        self._first.close()
        self._start.forget_constants()
        self.setup = read_setup(self._first, self._precision)
        if not self._ranks or dist.get_rank() == 0:
            self._say(str(self.setup))

    def _name_unreached(self) -> None:
        """Name the weights that the optimizer has, and that no gradient has reached."""
        unreached = [weight for weight in self._unreached or () if weight.requires_grad]
        names = [self._first.names[id(weight)] for weight in unreached if id(weight) in self._first.names]
        if names and len(unreached) < len(changed_by(self.optimizer)):  # else the setup says it of all
            cut = "look for .detach(), .data and no_grad between them and the loss"
            meant = "if it is meant, leave them out of the optimizer"
            self._once(f"No gradient has reached {listed(names)}, which the optimizer has: {cut}; {meant}.")

    def _learn(self, step: WatchedStep) -> None:
        """Take in the outcome of a step."""
        gradients, loss, skipped, scale = step.flags if isinstance(step.flags, list) else step.flags.tolist()
        self.skipped += bool(skipped)
        self._skips.append(bool(skipped))
        if step.read is not None:
            self.history.append(step.read())
            self._warn(self.history[-1])
        if not gradients and not skipped:
            self._fail("a gradient is not finite" if loss else "the loss is not finite", step)
        elif skipped and sum(self._skips) >= SKIPS and (scale <= 1 or not loss):  # else it comes down from a high one
            self._fail(f"the loss scaler skipped {sum(self._skips)} of the last {len(self._skips)} steps", step)
        elif not loss and skipped:
            self._once("The loss is not finite, and its scaler skips the step: the training goes on.", step.number)
        elif not loss:
            empty = next(filter(None, (without_targets(kept.batch) for kept in step.passes)), "")
            goes_on = "The loss is not finite, but the update is: the training goes on."
            self._once(" ".join(filter(None, [goes_on, empty])), step.number)

    # What is told.

    @property
    def effective(self) -> str:
        """The name of the format that the forward pass was seen to compute in."""
        seen = {dtype for dtype in self._first.autocast.values() if dtype}
        seen |= {policy.param_dtype for policy, _ in policies(self.model) if policy.param_dtype}
        stored = {weight.dtype for weight in changed_by(self.optimizer) if weight.requires_grad}
        half, held = ([half for half in (torch.bfloat16, torch.float16) if half in given] for given in (seen, stored))
        if half:
            return computing_in(half[0], torch.float32)
        if self._precision in PRECISIONS and (self.compiled or FORMATS[self._precision].number is TF32):
            return self._precision
        return computing_in(None, held[0] if held else torch.float32)

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit dtype of ``effective``; None: it has 32 bits."""
        return FORMATS[self.effective].half

    def _once(self, text: str, number: int | None = None) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(f"step {self.number if number is None else number}: {text}")

    def _warn(self, measured: Measured) -> None:
        """Say what is harmful in a measurement, and was not said yet."""
        for places, harm in measured.harms(self._scale.enabled, self._told).items():
            self._told.update(places)
            self._say(f"step {measured.step}: {harm}")

    def __str__(self) -> str:
        """Return the first and the last measurement beside each other."""
        began = f"{counted(self.number, 'step')}, {self.skipped} skipped"
        if not self.history:
            return f"{began}, none measured (every={self._every})"
        return f"{began}\n{side_by_side(self.history[0], self.history[-1])}"

    def metrics(self) -> dict[str, float]:
        """Return the last measurement for any logger, as numbers by name; empty before the first."""
        return self.history[-1].metrics() if self.history else {}

    # The end.

    @observing
    def close(self) -> None:
        """Wait for the steps that the device has not finished, look at them, and watch no longer."""
        while self._waiting:
            step = self._waiting.popleft()
            if step.event is not None:
                step.event.synchronize()
            self._learn(step)
        if self._watching and not self.number:
            saw = f"Watch saw {counted(self._now.updates, 'step')} of its optimizer, and no watch.step after one"
            self._say(
                f"{saw}: give it the optimizer, and the scaler, of the loop, and call watch.step after each step."
            )
        self._remove()
        self._closed = True

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
        self._now = WatchedStep()
        self._watching = False

    def _fail(self, reason: str, step: WatchedStep) -> None:
        """Replay a step, say what is found, and raise or warn."""
        self._remove()  # first of all: the replay is not watched
        rank = f"rank{dist.get_rank()}" if self._ranks else ""
        began = f"step {step.number}: {reason}" + (f" ({rank}, which replays its own batches)" if rank else "")
        try:
            report = self._replay(step)
            if report.diagnosis.finite and not self._knows_loss:  # what is finite is the stand-in
                raise FormatError(_OUTSIDE)
        except Exception as error:  # of any kind: what is in a model decides
            ended = f"{began}; the step cannot be replayed: {error}"
        else:
            try:
                page = f"see {report.write(self._folder / rank, 'mantissa.Watch(…)')}"
            except OSError as error:
                page = f"its page cannot be written ({described(error)})"
            differences = {
                "the run is compiled, and its replay is eager": self.compiled,
                _OUTSIDE: not self._knows_loss,
                "the replay has the weights of after the update": step.updates > 0 and not self._start.later,
            }
            notes = [f"note: {difference}" for difference, holds in differences.items() if holds]
            self._say("\n".join([began, str(report), *notes, page]))
            found = report.findings and not report.diagnosis.finite
            cause = report.findings[0].parts if found else ["its replay is finite"]
            ended = "; ".join([began, *cause, page])
        if self._raises:
            raise NotFiniteError(ended)
        warnings.warn(ended, stacklevel=2)

    def _replay(self, step: WatchedStep) -> Report:
        passes = sorted(step.passes, key=lambda kept: kept.number)
        if not passes:
            raise FormatError("no forward pass of the model was seen; give Watch the model that the loop calls")
        with self._start.given_back(self._build) as model:
            known = set(map(id, model.parameters()))
            # An optimizer's state fits its weights only where both are from before the update, and are the model's.
            whole = not self._start.later and all(id(weight) in known for weight in changed_by(self.optimizer))
            return examine(
                model,
                self._loss or call,
                [kept.batch for kept in passes],
                self.effective,
                self.optimizer if whole else None,
                accumulate=len(passes),
                number=step.number,
                generators=passes[0].generators(),
                failed=True,
                checks=(SWEEP, MANIFEST, RANGE, ISLANDS),
            )


def _check_options(
    scaler: Any, every: int, precision: str | None, loss: Loss | None, folder: Path, on_failure: str
) -> None:
    """Refuse, by a ``UsageError``, options of a Watch that cannot work."""
    check_type("scaler", scaler, scaler is None or hasattr(scaler, "is_enabled"), "the loop's GradScaler")
    check_number("every", every, 50)
    check_type("loss", loss, loss is None or callable(loss), "a function, called as loss(model, batch)")
    if precision is not None and precision not in FORMATS:
        raise UsageError(f"precision={precision!r} is unknown; use one of {', '.join(FORMATS)}")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"folder={str(folder)!r} is a file; give a folder for reports")
    if on_failure not in ("raise", "warn"):
        raise UsageError(f"on_failure={on_failure!r} is unknown; use 'raise' or 'warn'")
