"""The format sweep: the same step in one format after another, from fp64 to that of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from mantissa.display import dtype_name, shortened
from mantissa.doctor.budget import Budget
from mantissa.doctor.cause import find_exception, find_origin
from mantissa.doctor.cures import cast_cures
from mantissa.doctor.dtypes import stored_in_half
from mantissa.doctor.finding import DOMAIN, EXCEPTION, INPUT, NOT_FINITE, Examined, Finding
from mantissa.errors import FormatError, described, is_out_of_memory
from mantissa.formats import BF16, FP32, TF32, Format, plain
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, FORWARD, HALF

OK, BREAKS, RAISES, DIFFERS, LEFT_OUT = "ok", "BREAKS", "RAISES", "DIFFERS", "left out"
DIFFERENT = 0.01
"""Share of the loss from which on those of two formats differ: they are shown then, and one is no cure of the other."""


@dataclass(frozen=True)
class FormatTrial:
    """One format of the sweep, and whether the step is finite in it."""

    name: str
    format: Format | None = None
    """The format; None: fp64, to which all is widened, or the compiled step."""
    scales: tuple[float, ...] = (1.0,)
    """Loss scales to try in this order, until one is finite."""
    scaler: bool = False
    """Whether the step is tried without a scaler, too, in a trial of its own."""
    status: str = ""
    nonfinite: tuple[str, ...] = ()
    scale: float = 1.0
    """The last one tried."""
    why: str = ""
    """Reason why it was left out, or the error that it raised."""
    error: str = ""
    """The whole of that error; no exception, whose traceback would hold the model and its activations."""
    loss: float = math.nan

    @property
    def breaks(self) -> bool:
        """Whether the step is not finite in the format, or raises."""
        return self.status in (BREAKS, RAISES)

    @property
    def backed_off(self) -> bool:
        """Whether the step is finite, at a lower loss scale than the first."""
        return self.status == OK and self.scale != self.scales[0]

    def replay(self, step: Step, scale: float) -> Replay:
        """Return a replay of a step in the format: a plain one on fp32 weights, any other as the run takes it."""
        if self.format is None:
            return Replay.reference(step, torch.float64)
        replay = (
            Replay.in_format(step, self.format) if self.format is plain(self.format.number) else Replay.as_run(step)
        )
        replay.scale = scale
        return replay

    def take(self, step: Step) -> FormatTrial:
        """Take a step in the format, and return how it ended."""
        try:
            replay = self.replay(step, self.scales[0])
            result = replay.run_with_backoff(self.scales)
        except Exception as error:  # of many kinds: the model and the format decide
            if is_out_of_memory(error):
                raise
            status = LEFT_OUT if isinstance(error, FormatError) else RAISES
            return replace(self, status=status, why=described(error), error=f"{type(error).__name__}: {error}")
        status, bad = BREAKS if result.nonfinite else OK, tuple(result.nonfinite)
        return replace(self, status=status, nonfinite=bad, scale=replay.scale, loss=result.loss.item())

    def text(self, with_loss: bool = False) -> str:
        """Return the format with its status, such as ``fp16+scaler 65536 ok at 8192``, and maybe its loss."""
        if self.status == LEFT_OUT:
            return f"{self.name} {self.why}"
        name = f"{self.name} {self.scales[0]:.10g}" if self.scaler else self.name
        lower = f" at {self.scale:.10g}" if self.backed_off else ""
        loss = f" (loss {self.loss:.4g})" if with_loss and self.status == OK and math.isfinite(self.loss) else ""
        return f"{name} {self.status}{lower}{loss}"


@dataclass(frozen=True)
class Sweep:
    """The step in one format after another, the last one as the run takes it."""

    trials: tuple[FormatTrial, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    half: bool = False
    """Whether a format below fp32 is the first that breaks, which fp32 in some places may cure."""

    @property
    def as_run(self) -> FormatTrial | None:
        """What the run does, which a plain format does on fp32 weights; None: there was no sweep."""
        return self.trials[-1] if self.trials else None

    def of(self, format: Format) -> FormatTrial | None:
        """Return the trial of a format; with several loss scales that without a scaler."""
        return next((trial for trial in self.trials if trial.format is format), None)


def format_sweep(step: Step, budget: Budget, loss: float | None, failed: bool) -> Sweep:
    """Try every format, and find the cause at the first that breaks.

    Args:
        step: the step.
        budget: of the examination; fp32 and the run's format are always tried.
        loss: of the step, if it was taken as the run takes it, and is finite; None: it is taken here.
        failed: whether the run itself ended at this step.
    """
    # One format after another, the run's last; but for fp64, which takes longest.
    fp64, *others, as_run = _formats(step)
    trials = [_taken(step, trial, budget, trial.format is plain(FP32)) for trial in others]
    if loss is not None:
        as_run = replace(as_run, status=OK, scale=as_run.scales[0], loss=loss)
    else:
        as_run = _taken(step, as_run, budget, always=True)
    trials.insert(0, _in_fp64(step, fp64, budget, Sweep((*trials, as_run)).of(plain(FP32))))

    # The cause is sought where the step breaks first. Where fp64 breaks, so does fp32, with a dtype that runs have.
    sweep = Sweep((*trials, as_run))
    broken = next((trial for trial in sweep.trials if trial.format and trial.breaks), None)
    notes: tuple[str, ...] = ()
    if broken is not None:
        faulty = _at_fault(sweep, step, broken, budget)
        if as_run.status != OK:
            return faulty
        notes = tuple(
            f"{broken.name} breaks ({finding.kind} in {finding.place}), but this run in {step.format.name} is finite"
            for finding in faulty.findings
        )

    # A step that is finite may have needed a lower scale than its run had, or may have no scaler in torch.
    if failed and as_run.backed_off:
        return replace(sweep, notes=notes, findings=_at_first_scale(step, as_run, budget), half=True)
    if as_run.scaler and (stored := _unscalable(step)):
        refused = replace(as_run, status=RAISES, why=_NO_HALF)
        return Sweep((*trials, refused), stored, notes)
    return replace(sweep, notes=notes)


def _formats(step: Step) -> list[FormatTrial]:
    """Return the formats up to the run's, on fp32 weights; then, where it is another, what the run does.

    That has its stored weights, its fp32 modules and operators.
    """
    # Formats with more bits.
    as_run, scales = step.format, tuple(step.scales)
    fp32, tf32, bf16, basic = plain(FP32), plain(TF32), plain(BF16), plain(as_run.number)
    formats = [FormatTrial("fp64"), FormatTrial(fp32.name, fp32)]
    if as_run is not fp32 and as_run.wide is None and step.available(tf32):
        formats.append(FormatTrial(tf32.name, tf32))
    if as_run.wide is not None:
        formats.append(FormatTrial(as_run.name, as_run))
    if as_run.half is None:
        return formats

    # Those with 16 bits, without a scaler and with one.
    if basic is not bf16 and step.available(bf16):
        formats.append(FormatTrial(bf16.name, bf16))
    formats.append(FormatTrial(basic.name, basic))
    if scales != (1.0,):
        formats.append(FormatTrial(f"{basic.name}+scaler", basic, scales, scaler=True))
    if as_run is not basic:
        formats.append(FormatTrial(as_run.name, as_run, scales))
    return formats


def _in_fp64(step: Step, trial: FormatTrial, budget: Budget, fp32: FormatTrial | None) -> FormatTrial:
    """Return the trial in fp64 as it ended: of a part of the step, where it has no time for all that fp32 can."""
    seconds, few = budget.fp64_seconds, step.with_microbatches(step.first_samples())
    share = few.multiplications / max(1, step.multiplications)  # 0: batches that hold no tensor
    if seconds <= budget.left() or not 0 < share < 1 or fp32 is None or fp32.breaks:
        return _taken(step, trial, budget, always=False, seconds=seconds)
    part = _taken(few, replace(trial, name=f"{trial.name} of a part"), budget, always=False, seconds=seconds * share)
    return replace(part, loss=math.nan)  # of other samples


def _taken(step: Step, trial: FormatTrial, budget: Budget, always: bool, seconds: float = 0) -> FormatTrial:
    """Return a format's trial as it ended, or as it was left out; ``seconds``: that it takes, if that is known."""

    def take() -> FormatTrial:
        budget.expect(seconds, steps_in_memory=0 if always else 1 if trial.format else 2)
        return trial.take(step)

    taken = budget.run(trial.name, take, always)
    if taken is None:
        return replace(trial, status=LEFT_OUT, why="left out")
    if taken.status == RAISES and (trial.format is None or trial.format.number is not step.format.number):
        return replace(taken, status=LEFT_OUT, why=f"cannot run this model ({taken.why})")  # it has hard-coded dtypes
    return taken


def _at_fault(sweep: Sweep, step: Step, broken: FormatTrial, budget: Budget) -> Sweep:
    """Return a sweep with the fault of the first format that breaks, and what that says of precision."""
    # An error that fp32 raises, too, is no matter of the format.
    fp32, notes = sweep.of(plain(FP32)), []
    assert fp32 is not None
    name, half = broken.name, broken is not fp32
    if broken.error and broken.error == fp32.error:
        name, half = fp32.name, False

    # Which operator, at which line.
    def cause() -> Finding | None:
        replay = broken.replay(step, broken.scale)
        return find_exception(replay, name) if broken.status == RAISES else find_origin(replay, name)

    finding = budget.run("cause", cause, always=True) or _unlocated(step, broken, name)
    in_half = any(dtype_name(dtype) in finding.dtype for dtype in HALF)  # of an exception, all dtypes that meet
    if in_half and not half:  # a cast of the code's; else islands come first
        finding = replace(finding, candidates=(*finding.candidates, *cast_cures(step)))

    # What wider formats say of it.
    if finding.kind == EXCEPTION and not half and not in_half:
        notes.append("fp32 raises it, too, so precision is not the cause")
    wider = sweep.trials[0] if broken is fp32 else fp32
    if finding.kind == DOMAIN and wider.status == OK:
        notes.append(f"{wider.name} does not round what it is given, and is finite")
    if broken is fp32 and finding.dtype in map(dtype_name, HALF):
        notes.append("the code casts to 16 bits where the format is fp32")
    elif broken is fp32 and finding.kind not in (INPUT, EXCEPTION):
        why = "it is the data, the learning rate or the model"
        if wider.status == OK:
            why = "numbers are beyond fp32's range, or lost in its rounding"
        notes.append(f"the step is not finite in fp32, so 16 bits are not the cause: {why}")
    return replace(sweep, findings=(finding,), notes=tuple(notes), half=half)


def _unlocated(step: Step, trial: FormatTrial, name: str) -> Finding:
    """Return the finding of a step that no operator makes infinite."""
    if trial.status == RAISES:
        return Finding(EXCEPTION, FORWARD, "", name, detail=trial.why)
    bad = trial.nonfinite
    place = next((output for output in bad if output != "loss"), "")
    direction = BACKWARD if "loss" not in bad and any(output not in step.buffers for output in bad) else FORWARD
    module = "" if "loss" in bad else place.rpartition(".")[0]
    return Finding(NOT_FINITE, direction, module, name, detail=f"{shortened(bad, 3)}: no torch operator made it so")


def _at_first_scale(step: Step, as_run: FormatTrial, budget: Budget) -> tuple[Finding, ...]:
    """Return the fault at the loss scale at which a run ended, where a lower one is finite."""
    replay = as_run.replay(step, as_run.scales[0])
    finding = budget.run("cause", partial(find_origin, replay, as_run.name), always=True)
    if finding is None and (bad := replay.run().nonfinite):
        finding = _unlocated(step, replace(as_run, status=BREAKS, nonfinite=tuple(bad)), as_run.name)
    return (finding,) if finding is not None else ()


def at_its_scale(step: Step) -> Examined:
    """Return the fault of a step that is not finite at its own loss scale."""
    if not Replay.as_run(step).run().nonfinite:
        return Examined()
    return Examined(findings=(Finding(NOT_FINITE, BACKWARD, "", step.format.name),))


_NO_HALF = "torch's GradScaler takes no gradients in float16"


def _unscalable(step: Step) -> tuple[Finding, ...]:
    """Return the weights of a step whose gradients no scaler takes."""
    in_half = any(weight.dtype == torch.float16 for weight in step.stored.values())
    stored = stored_in_half(step) if in_half else []
    return tuple(replace(finding, detail=f"{finding.detail}; {_NO_HALF}") for finding in stored)
