"""``mantissa.examine``: what precision does to one training step of any PyTorch model."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.doctor.budget import Say
from mantissa.doctor.checks import CHECKS
from mantissa.doctor.course import MOST_STEPS
from mantissa.doctor.diagnosis import Diagnosis, TakenStep, diagnose
from mantissa.doctor.finding import Finding
from mantissa.doctor.report import lines, opening, write_report
from mantissa.errors import FormatError, UsageError, check_number, check_type, described, names_in
from mantissa.formats import FORMATS, computing_in
from mantissa.names import format_name
from mantissa.step.ledger import MemoryLedger
from mantissa.step.loop import LoopStep, Loss
from mantissa.step.replay import Replay, ReplayResult
from mantissa.step.step import Step
from mantissa.tensors import (
    changed_by,
    check_model,
    finite,
    in_dtype,
    innermost,
    random_state,
    set_random_state,
    synchronise,
    values,
)

PRECISIONS = tuple(
    name for name, row in FORMATS.items() if not (row.number.scaled or row.accumulates_in_fp32 or row.wide)
)  # what a loop needs torch alone for
_REPEATED = 0.05
"""Relative difference between the gradients of two equal steps that no order of sums explains."""


@dataclass
class Report:
    """What was found in a step; ``print(report)`` shows it."""

    diagnosis: Diagnosis

    @property
    def verdict(self) -> str:
        """``HEALTHY``, ``FOUND``, ``INCOMPLETE`` (no fault, but a check was left out), ``CRASHED`` (a check did), or
        ``NOT REPRODUCED``: the step was not finite, and its replay is.
        """
        return self.diagnosis.verdict

    @property
    def findings(self) -> list[Finding]:
        """The faults, each with its place, its line of code and its cures; empty where there is none."""
        return self.diagnosis.findings

    def __str__(self) -> str:
        return "\n".join([opening(self.diagnosis.taken), *lines(self.diagnosis)])

    def write(self, folder: str | Path, command: str = "mantissa.examine(…)") -> Path:
        """Write the page and its text, ``verdict.json`` and tables as CSV into a folder; return the page's path."""
        device = self.diagnosis.step.device
        on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
        record = {
            "command": command,
            "hardware": {"name": name, "device": device.type, "threads": torch.get_num_threads()},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "git": {},
        }
        return write_report(self.diagnosis, Path(folder), "model", record)


def examine(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    precision: str | torch.dtype = "bf16",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scale: float | None = None,
    fixed_scale: bool = False,
    accumulate: int = 1,
    number: int = 1,
    generators: dict[str, Tensor] | None = None,
    failed: bool = False,
    checks: Sequence[str] = CHECKS,
    time_budget_s: float = 60,
    say: Say = lambda part: None,
) -> Report:
    """Take a training step in every format, and say what is not finite, what is wrong, where, and what cures it.

    The model, the optimizer, the batches and the random generators stay as they are: everything happens to copies.

    Args:
        model: as it trains now (in ``train()`` or ``eval()``), with its weights. What ``torch.compile`` made of it is
            examined eagerly first.
        loss: called as ``loss(model, batch)``; returns the mean loss, a scalar. Where it enters autocast itself, that
            says the precision.
        batches: the first one is the step that is examined (the first ``accumulate``), the rest are the steps
            after it. Tensors on the model's device, in nested dicts, tuples and lists.
        precision: what training uses. ``bf16`` and ``fp16``: torch.autocast; ``bf16_pure`` and ``fp16_pure``: weights,
            gradients and optimizer state in 16 bits; ``fp32``; ``tf32``. Also a dtype or a name of Lightning's.
        optimizer: over the model's parameters, with its state. None: updates are not examined, and the weights stay.
        scale: the loss scale of this step. None: 65536 with fp16, as ``torch.amp.GradScaler`` begins, else 1.
        fixed_scale: whether no scaler lowers it where gradients overflow; without a scaler it is 1 and fixed.
        accumulate: batches in one step.
        number: of the step, for the report.
        generators: from ``mantissa.tensors.random_state``, as they were before the step. None: as they are now.
        failed: whether the step was not finite when it was taken, at ``scale`` if that is given.
        checks: some of ``mantissa.doctor.checks.CHECKS``.
        time_budget_s: seconds for the checks; what does not fit is named in the report.
        say: hears the name of every part before it begins.

    Raises:
        UsageError: an argument cannot work.
        FormatError: the model cannot be copied.
    """
    # Everything that cannot work is refused before anything is copied.
    precision, checks = _usable(model, loss, batches, precision, optimizer, scale, accumulate, checks, time_budget_s)
    device = next(model.parameters()).device
    before = random_state(device)  # to make a batch may draw, too
    try:
        # A copy of all that the step starts from.
        flat, format = _pulled(batches, accumulate), FORMATS[precision]
        inner = None if optimizer is None else innermost(optimizer)
        step = LoopStep.copied(
            model, loss, flat, format, inner, scale, fixed_scale, accumulate, number, generators or before
        )
        with torch.enable_grad():
            say("step")
            # What failed at a known loss scale is taken there: its scaler would go on to a lower one.
            backs_off = not failed or scale is None
            taken = take(step, backs_off=backs_off)
            if not taken.seconds:
                with suppress(RuntimeError, FormatError, MemoryError):  # which the format sweep says
                    _check_loss(step)

            # Where the code enters autocast itself, that says the precision.
            if taken.own_autocast and step.format.half_weights is None:
                name = computing_in(taken.own_autocast, torch.float32)
                taken = take(step.inside_autocast(FORMATS[name]), backs_off=backs_off)
                entered = "the loss or the model enters autocast itself"
                note = f"{entered}: precision={name!r} is examined, with no autocast around it"
                taken = replace(taken, notes=[*taken.notes, note])
            return Report(diagnose(replace(taken, failed=failed), checks, time_budget_s, say=say))
    finally:
        set_random_state(before, device)


def _usable(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    precision: str | torch.dtype,
    optimizer: torch.optim.Optimizer | None,
    scale: float | None,
    accumulate: int,
    checks: Sequence[str],
    time_budget_s: float,
) -> tuple[str, tuple[str, ...]]:
    """Refuse, by a ``UsageError``, arguments that cannot work; return the format's name, and the checks to make."""
    a_batch = isinstance(batches, Mapping | Tensor)
    of_batches = "an iterable of batches, such as a DataLoader or [batch]"
    check_model(model)
    check_type("loss", loss, callable(loss), "a function, called as loss(model, batch)")
    check_type("batches", batches, isinstance(batches, Iterable) and not a_batch, of_batches)
    check_type("precision", precision, isinstance(precision, str | torch.dtype), f"one of {', '.join(PRECISIONS)}")
    check_type("optimizer", optimizer, optimizer is None or hasattr(optimizer, "param_groups"), "an optimizer")
    if (name := format_name(precision)) not in PRECISIONS:
        raise UsageError(f"precision={name!r} is unknown; use one of {', '.join(PRECISIONS)}")
    if FORMATS[name].autocast and all(weight.dtype == torch.float64 for weight in model.parameters()):
        raise UsageError("the model is float64, which no autocast lowers; call model.float(), and give it such batches")
    check_number("accumulate", accumulate, 1)
    check_number("time_budget_s", time_budget_s, 60.0)
    check_number("scale", 1.0 if scale is None else scale, 65536.0)
    checks = names_in("checks", checks)
    if unknown := [check for check in checks if check not in CHECKS]:
        raise UsageError(f"checks={unknown} are unknown; use some of {', '.join(CHECKS)}")
    if optimizer is None:
        return name, tuple(check for check in checks if check not in ("updates", "state"))
    known = {id(parameter) for parameter in model.parameters()}
    if not any(id(weight) in known for weight in changed_by(optimizer)):
        raise UsageError("the optimizer has no parameter of this model; make it after the model is moved or cast")
    return name, tuple(checks)


def _pulled(batches: Iterable[Any], accumulate: int) -> list[Any]:
    """Return the batches of the step and of those after it, as far as they are needed.

    Raises:
        UsageError: there are too few, or they are the tensors of one batch.
    """
    taken = list(islice(batches, accumulate * MOST_STEPS))
    kinds = {(batch.dtype, batch.ndim) for batch in taken if isinstance(batch, Tensor)}
    if len(kinds) > 1:  # such as inputs and labels
        raise UsageError("batches has tensors of several dtypes or dimensions, so it is one batch; give [batch]")
    if len(taken) < accumulate:
        raise UsageError(f"accumulate={accumulate}, and batches has {len(taken)}; give at least one step's batches")
    return taken


def _check_loss(step: Step) -> None:
    """Refuse a loss that raises in fp32 as well what no operator of torch raises for the dtypes of its tensors."""
    try:
        Replay.as_run(step.in_format(FORMATS["fp32"])).forward()
    except (TypeError, AttributeError, LookupError, NameError, ValueError) as error:
        raise UsageError(f"loss is called as loss(model, batch), and raises {described(error)}") from error


def take(step: Step, began: str = "its beginning", backs_off: bool = True) -> TakenStep:
    """Take a step as its loop does, eagerly, and say how it ended.

    Args:
        step: of any loop.
        began: where its replay started.
        backs_off: whether it is taken at the loss scale that its scaler would find; False: at that of the step.

    Raises:
        UsageError: the step cannot be replayed, or trains nothing.
    """
    replay = Replay.as_run(step)
    result: ReplayResult | None = None
    ledger = MemoryLedger(replay.model, replay.optimizer)
    for mode in (ledger, nullcontext()):  # in no mode, where an operator does not run in one
        try:
            with mode:
                result = replay.run_with_backoff() if backs_off else replay.run()
            break
        except UsageError:
            raise
        except Exception:  # the format sweep says what it is
            pass
    peak = ledger.report().peak_bytes
    if result is None:
        return TakenStep(step, began, memory_bytes=peak, own_autocast=replay.own_autocast)

    nonfinite = bool(result.nonfinite)  # asked before other passes, which may change buffers

    # What one step shows of the loss: whether it changes a batch, and takes one of fewer samples.
    step = replace(step, changes_batches=replay.changed)
    replay = replay.of(step)
    if step.first_samples()[0] is not step.microbatches[0]:
        try:
            replay.forward()
        except Exception:  # of any kind: that of the loss
            step = replace(step, cuts=False)

    if not result.gradients:
        raise UsageError(
            "the loss gives no parameter a gradient: let it use the model that it is called with, detach nothing, and "
            "leave requires_grad of some parameters on"
        )
    first_loss = result.loss.item()
    before = [] if nonfinite else [gradient.clone() for gradient in result.gradients.values()]

    # Once more: for its time (what is done for the first time takes longer), and because it must repeat.
    synchronise(step.device)
    clock = time.monotonic()
    result = replay.run()
    synchronise(step.device)
    seconds = time.monotonic() - clock
    loss, gradients = result.loss.item(), list(result.gradients.values())
    if _size([one - other for one, other in zip(before, gradients, strict=False)]) > _REPEATED * _size(before):
        raise UsageError(
            f"the same step gives other gradients when it is taken again (loss {first_loss:.6g}, then {loss:.6g}): "
            "let the loss draw from global generators, or from generators that are attributes of modules, and keep "
            "nothing from call to call"
        )
    skipped = not all(map(finite, gradients))
    return TakenStep(
        step if skipped else step.at_scale(replay.scale),  # to which its scaler backs off
        began,
        loss=loss,
        grad_norm=_size(gradients) * result.correction / replay.scale if gradients else math.nan,
        skipped=skipped,
        spoils_buffers=any(name in result.buffers for name in result.nonfinite),
        seconds=seconds,
        memory_bytes=peak,
        own_autocast=replay.own_autocast,
    )


def _size(gradients: Iterable[Tensor]) -> float:
    """Return the norm of all; 0: there are none."""
    norms = [torch.linalg.vector_norm(in_dtype(values(gradient), torch.float32)) for gradient in gradients]
    return torch.stack(norms).norm().item() if norms else 0.0
