"""The examination of one step: the format sweep first, then what a finite step can still hide."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from mantissa.doctor.budget import Budget
from mantissa.doctor.cause import find_exception, find_origin, name_overflows
from mantissa.doctor.compiled import compiled_trial
from mantissa.doctor.cures import (
    NO_CAST,
    Islands,
    find_islands,
    in_half,
    in_update,
    line_of_error,
    locate,
    measure_cost,
    spelled,
    trains_with,
)
from mantissa.doctor.data import rounded_data
from mantissa.doctor.dtypes import explicit_casts, manifest, state_updates
from mantissa.doctor.fp16_range import Range, fp16_range
from mantissa.doctor.gradients import gradients
from mantissa.doctor.module_errors import harmful_errors, local_errors, wrong_gradients
from mantissa.doctor.sweep import (
    BREAKS,
    DIFFERENT,
    FP32,
    FP64,
    LEFT_OUT,
    OK,
    RAISES,
    TF32,
    FormatTrial,
    format_sweep,
)
from mantissa.doctor.training import REPLAYS, divergence, steps_to_train
from mantissa.errors import FormatError
from mantissa.finding import (
    BACKWARD,
    CRASH,
    DIVERGENCE,
    DOMAIN,
    DTYPE,
    ERROR,
    EXAMINATION,
    EXCEPTION,
    FORWARD,
    INPUT,
    LOST,
    NOT_FINITE,
    OVERFLOW,
    SCALE,
    UNDERFLOW,
    UPDATE,
    Examined,
    Finding,
)
from mantissa.formats import BF16, Format, plain
from mantissa.formats import FP32 as FP32_NUMBERS
from mantissa.step.step import Batch, Replay, Step
from mantissa.step.updates import UpdateMeter, is_elementwise, judge
from mantissa.tensors import finite

HEALTHY, FOUND, NOT_REPRODUCED = "HEALTHY", "FOUND", "NOT REPRODUCED"
CRASHED, INCOMPLETE = "CRASHED", "INCOMPLETE"
EXIT_CODES = {HEALTHY: 0, CRASHED: 3, INCOMPLETE: 3, FOUND: 7, NOT_REPRODUCED: 8}
SWEEP = "formats"
"""Name of the format sweep among the checks."""
Found = TypeVar("Found", bound=Examined)


@dataclass
class TakenStep:
    """A step that was taken as the run takes it, and what it started from."""

    step: Step
    began: str
    """Name of the checkpoint where the replay started, or ``the beginning``."""
    loss: float = math.nan
    grad_norm: float = math.nan
    skipped: bool = False
    seconds: float = 0.0
    """Duration of the step."""
    memory_bytes: int = 0
    """Peak of its memory, with the weights and the optimizer's state."""
    own_autocast: torch.dtype | None = None
    """See ``Replay``."""
    folder: Path | None = None
    """Folder of the run; None: a check-up before a run."""
    failed: bool = False
    """Whether the run itself ended at this step, because it was not finite."""
    finished: bool = False
    """Whether the run took all its steps, and this is one more."""
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        """Name of the format."""
        return self.step.format.name

    @property
    def finite(self) -> bool:
        """Whether the step was taken."""
        return not self.skipped and math.isfinite(self.loss)


@dataclass
class Diagnosis:
    """What was found in one step."""

    taken: TakenStep
    budget: Budget
    verdict: str = HEALTHY
    sweep: list[FormatTrial] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    manifest: Examined | None = None
    range: Range | None = None
    modules: Examined | None = None
    islands: Islands | None = None
    notes: list[str] = field(default_factory=list)
    not_asked: list[str] = field(default_factory=list)
    """Checks that were not to be made."""

    @property
    def step(self) -> Step:
        """The step."""
        return self.taken.step

    @property
    def own(self) -> FormatTrial | None:
        """Trial of what the run does, the last of the sweep."""
        return next((trial for trial in reversed(self.sweep) if trial.build), None)

    @property
    def runs(self) -> bool:
        """Whether the run's own format raises nothing."""
        return self.own is None or self.own.status != RAISES

    @property
    def finite(self) -> bool:
        """Whether the step is finite in the run's own format, at a loss scale that its scaler would find."""
        return self.own.status == OK if self.own is not None else self.taken.finite

    @property
    def sound(self) -> bool:
        """Whether the step is finite, and nothing is found so far but formats that were not asked for."""
        return self.finite and all(finding.kind == DTYPE for finding in self.findings)

    @property
    def loses_updates(self) -> bool:
        """Whether the step is finite, and updates of it that are too small are lost."""
        return self.finite and self.step.trains and self.step.format.only_half

    def is_ok(self, format: str) -> bool:
        """Return whether the sweep has a format, and the step is finite in it."""
        return any(trial.name == format and trial.status == OK for trial in self.sweep)

    def add(self, found: Found) -> Found:
        """Add what a check found to what is known, and return it."""
        self.findings += found.findings
        self.notes += found.notes
        return found

    def works(self, build: Callable[[], Replay]) -> bool:
        """Return whether a cure, the step in another replay, is finite and trains on."""
        return bool(self.budget.run("cures", lambda: trains_with(self.step, build)))

    def locate(self, finding: Finding, fixes: Callable[[Replay], bool]) -> None:
        """Name the place in a finding, and what cures it, where others replays do not have the fault."""
        self.budget.run("place", lambda: locate(self.step, finding, fixes, partial(self.budget.goes_on, "place")))

    @property
    def exit_code(self) -> int:
        """Exit code of a command."""
        return EXIT_CODES[self.verdict]


@dataclass(frozen=True)
class Check:
    """A check of a step: when it is made, what it does, and what it costs."""

    name: str
    """Name of the check among ``checks``."""
    applies: Callable[[Diagnosis], bool]
    """Whether it has something to say of a step, after the checks before it."""
    run: Callable[[Diagnosis], object]
    """Makes it, and adds what it finds to the diagnosis."""
    memories: float = 0
    """Memory that it needs, in those of a step."""
    seconds: Callable[[Diagnosis], float] = lambda result: 0
    """Time that it takes."""
    part: str = ""
    """Name of the part where a check has several; empty: that of the check."""


def diagnose(
    taken: TakenStep,
    checks: Sequence[str] | None = None,
    time_budget_s: float = 60,
    say: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Examine a step.

    Args:
        taken: the step.
        checks: of ``CHECKS``; None: all of them.
        time_budget_s: seconds; fp32 and the run's own format are always tried.
        say: hears what is examined next.
    """
    budget = Budget(time_budget_s, taken.step, say)
    result = Diagnosis(taken, budget, notes=list(taken.notes))
    checks = CHECKS if checks is None else checks
    result.not_asked = [name for name in CHECKS if name not in checks]
    if SWEEP in checks or not taken.finite:
        _sweep(result)
    for check in _CHECKS:
        if check.name in checks and check.applies(result):
            costs = check.memories * taken.memory_bytes, check.seconds(result)
            budget.run(check.part or check.name, partial(check.run, result), *costs)
    _judge(result)
    return result


def _judge(result: Diagnosis) -> None:
    """Set the verdict, and make a finding of each check that crashed."""
    taken, own = result.taken, result.own
    if result.findings:
        result.verdict = FOUND
    elif result.budget.crashes:
        result.verdict = CRASHED
    elif taken.failed and taken.finite:
        result.verdict = NOT_REPRODUCED
        deterministic = taken.step.remedies.deterministic
        result.notes.append(f"the run failed at this step, but its replay is finite; train with {deterministic}")
    elif not taken.finite and own is not None and own.scale == own.scales[0]:
        result.verdict = NOT_REPRODUCED
        result.notes.append("the step is not finite as the run takes it, and finite in every format that was examined")
    elif result.budget.left_out:
        result.verdict = INCOMPLETE
    for part, trace in result.budget.crashes.items():
        what = trace.strip().rpartition("\n")[2]
        detail = f"{what}; this is a fault of the examination, and says nothing of the step"
        result.findings.append(Finding(CRASH, EXAMINATION, "", taken.precision, detail=detail, tensor=f"check {part}"))


def _sweep(result: Diagnosis) -> None:
    """Try every format, and find the cause at the first that breaks; if none does, try it compiled."""
    taken, step, budget = result.taken, result.step, result.budget
    result.sweep = format_sweep(step)
    own = result.sweep[-1]
    if taken.finite and not step.compiles:  # it was taken already, as the run takes it
        own.status, own.scale, own.loss = OK, own.scales[0], taken.loss
    broken: FormatTrial | None = None
    for trial in result.sweep:
        if not trial.status and _breaks_first(result, trial, broken is None):
            broken = trial
    if own.status == OK:
        result.taken = replace(result.taken, step=step.at_scale(own.scale))
        if broken is not None and broken is not own:
            finding = result.findings.pop(0)
            where = f"{finding.kind} in {finding.place}"
            result.notes.append(f"{broken.name} breaks ({where}), but this run in {step.format.name} is finite")
            broken = None
    if broken is not None:
        if broken.name == FP32:
            _about_fp32(result)
        return
    if step.compiles and (compiled := budget.run("compiled step", lambda: compiled_trial(step))):
        trial, findings = compiled
        result.sweep.append(trial)
        result.findings += findings


def _breaks_first(result: Diagnosis, trial: FormatTrial, may_be_first: bool) -> bool:
    """Take the step in a format, and return whether it is the first that breaks, whose cause is then a finding."""
    step, own, memory_bytes = result.step, result.sweep[-1], result.taken.memory_bytes * (1 + (trial.name == FP64))
    passes = result.budget.run(trial.name, trial.take, memory_bytes, always=trial is own or trial.name == FP32)
    if passes is None:
        if not trial.status:
            trial.status, trial.why = LEFT_OUT, "left out"
        return False
    if trial.status == RAISES and trial.name.partition("+")[0] not in (own.name, step.format.number.name):
        trial.status, trial.why = LEFT_OUT, f"cannot run this model ({trial.why})"  # it has hard-coded dtypes
    elif trial.status in (BREAKS, RAISES) and trial.name != FP64 and may_be_first:
        find = find_origin if trial.status == BREAKS else find_exception
        finding = result.budget.run("cause", partial(find, passes, trial.name), always=True)
        result.findings.append(finding or _unlocated(trial))
        wider = FP64 if trial.name == FP32 else FP32
        if finding is not None and finding.kind == DOMAIN and result.is_ok(wider):
            finding.detail += f"; {wider} does not round what it is given, and is finite"
        fp32 = next(other for other in result.sweep if other.name == FP32)
        if trial.status == RAISES and trial.why in fp32.why:
            result.findings[-1].format = FP32
            result.notes.append("fp32 raises it, too, so precision is not the cause")
        return True
    elif trial is own and trial.status == OK and result.taken.failed and trial.scale != trial.scales[0]:
        passes.scale = trial.scales[0]  # at which the run ended
        finding = result.budget.run("cause", partial(find_origin, passes, trial.name), always=True)
        if finding is not None:
            finding.cure = [f"{step.remedies.scale(trial.scale)}, at which this step is finite"]
            result.findings.append(finding)
    return False


def _unlocated(trial: FormatTrial) -> Finding:
    """Return the finding of a step that no operator makes infinite."""
    if trial.status == RAISES:
        return Finding(EXCEPTION, FORWARD, "", trial.name, detail=trial.why)
    bad = trial.nonfinite
    gradient = next((name for name in bad if name != "loss"), "")
    direction, module = (FORWARD, "") if "loss" in bad else (BACKWARD, gradient.rpartition(".")[0])
    shown = ", ".join(bad[:3]) + (", …" if len(bad) > 3 else "")
    return Finding(NOT_FINITE, direction, module, trial.name, detail=f"{shown}: no torch operator made it so")


def _about_fp32(result: Diagnosis) -> None:
    """Say what it means that the step breaks in fp32."""
    first = result.findings[0]
    if first.dtype in ("float16", "bfloat16"):
        result.notes.append("the code casts to 16 bits where the format is fp32")
    elif first.kind not in (INPUT, EXCEPTION):
        cause = "it is the data, the learning rate or the model"
        if result.is_ok(FP64):
            cause = "numbers are beyond fp32's range, or lost in its rounding"
        result.notes.append(f"the step is not finite in fp32, so 16 bits are not the cause: {cause}")


def _manifest(result: Diagnosis) -> None:
    passes = result.step.as_run()
    passes.microbatches = result.step.first_samples()
    found = manifest(passes)
    known = {finding.line for finding in result.findings}  # what breaks is found already, with the cast that does it
    found.findings = [finding for finding in found.findings if not finding.line or finding.line not in known]
    stored = [finding for finding in found.findings if not finding.op]  # weights in fewer bits
    own, name = result.own, result.step.format.name
    for finding in stored if result.is_ok(name) else ():
        finding.cure = [result.step.remedies.format(result.step.format)]
    if own is not None and own.name == "fp16+scaler" and any(finding.dtype == "float16" for finding in stored):
        own.status, own.why = RAISES, "torch's GradScaler takes no gradients in float16"
        stored[0].detail += f"; {own.why}"
    result.manifest = result.add(found)


def _range(result: Diagnosis) -> None:
    """Find the loss scales that fit, and try the one that is proposed."""
    found = fp16_range(result.step)
    if result.findings:  # what is found there has a cause, which is found already
        found.findings = []
    result.range = result.add(found)
    own = result.own
    if own is not None and not found.holds(own.scale):  # at which the step is finite, and gradients are lost
        for finding in result.findings:
            finding.cure = [cure for cure in finding.cure if not cure.startswith(result.step.remedies.scale(own.scale))]
    scale = found.proposed
    lost = [finding for finding in found.findings if finding.kind == UNDERFLOW]
    if lost and scale is not None and _works_at(result, scale):
        for finding in lost:
            finding.cure = [result.step.remedies.scale(scale)]


def _works_at(result: Diagnosis, scale: float) -> bool:
    """Return whether the step is finite at a loss scale, without a scaler that lowers it, and trains on."""
    step = result.step.at_scale(scale)
    return not step.as_run().run().nonfinite and result.works(step.as_run)


_LOST_DATA = 0.5
"""Rounding away this share of what varies in the data is a fault, whatever the gradients say."""


def _data(result: Diagnosis) -> None:
    """Find data that the format cannot tell apart, and the module that should have it in fp32."""
    finding = rounded_data(result.step, _LOST_DATA)
    if finding is None:  # a column alone may be noise
        lost = rounded_data(result.step, _LOST_DATA, columns=True)
        result.notes += [lost.detail] if lost else []
        return
    result.findings.append(finding)
    other = result.step.in_fp32([finding.module])
    if finding.module and rounded_data(other, _LOST_DATA) is None and result.works(other.as_run):
        finding.cure = [result.step.remedies.modules([finding.module])]


def _module_errors(result: Diagnosis) -> None:
    """Find modules whose error harms the gradients of the step, and the place of one that is in no module."""
    step = result.step
    found = harmful_errors(step)
    found.findings = name_overflows(step.as_run(), found.findings) if found.findings else []
    for finding in found.findings:
        finding.line = finding.line or str(line_of_error(step, finding.module) or "")
    result.modules = result.add(found)
    if not found.rows:
        result.budget.left_out += found.notes or ["modules (no module computes)"]
    for finding in (each for each in found.findings if not each.module):  # which no island can cure
        memory_bytes = 2 * result.taken.memory_bytes
        if wrong := result.budget.run("whole gradients", lambda: wrong_gradients(step), memory_bytes):
            result.locate(finding, wrong.fixed_by)


def _wrong_gradients(result: Diagnosis) -> None:
    """Find gradients of the whole step that are wrong though no module is, and the place."""
    wrong = wrong_gradients(result.step)
    if wrong.finding is not None:
        result.findings.append(wrong.finding)
        result.locate(wrong.finding, wrong.fixed_by)


def _updates(result: Diagnosis) -> None:
    """Judge what rounding does to the updates, and try weights in fp32."""
    step, passes = result.step, result.step.as_run()
    name = type(passes.optimizer).__name__
    if not is_elementwise(name):
        raise FormatError(f"{name} treats elements together")
    try:
        meter = UpdateMeter(passes.model, passes.optimizer, passes.format.half, passes.masters, passes.built.clip)
        passes.built.stand_before(step)
        passes.update(passes.run().correction, meter)
    except Exception as error:  # an optimizer that cannot be copied, or does not treat each element alone
        raise FormatError(f"{name}: {error}") from error
    found = judge(meter.results(), step.format)
    for group in passes.optimizer.param_groups:
        decay = float(group["lr"] * group.get("weight_decay", 0.0))
        rounds = group.get("decoupled_weight_decay") and not group.get("fused")  # fused kernels compute in fp32
        if rounds and 0 < decay < step.format.number.unit_roundoff / 2:
            lost = f"lr x weight_decay = {decay:.2g} of a weight is less than half of its spacing in"
            result.notes.append(f"weight decay changes nothing: {lost} {step.format.number.name}; keep weights in fp32")
            break
    other = step.with_fp32_weights()
    if found.findings and result.works(other.as_run):
        for finding in found.findings:
            finding.cure = [step.remedies.format(other.format)]
    result.add(found)


def _lost(result: Diagnosis) -> list[Finding]:
    """Return the findings of updates that are lost."""
    return [finding for finding in result.findings if finding.kind == LOST and finding.direction == UPDATE]


def _seconds_of_divergence(result: Diagnosis) -> float:
    """Return how long the trainings take, about."""
    taken, spent = result.taken, result.budget.spent
    half = taken.step.format.half is not None
    # Those in fp32, the exact one, and one of weights that stand still. In fp32 the exact one, in fp64, counts twice.
    references = spent.get(FP32, taken.seconds) * (REPLAYS + 2) if half else taken.seconds * 3
    return steps_to_train(taken.step) * (taken.seconds + references)


def _divergence(result: Diagnosis) -> None:
    """Train some steps in the run's format and in fp32, and find the place where that is worse."""
    step, budget, lost = result.step, result.budget, _lost(result)
    batches = step.following(steps_to_train(step))

    def broken_after(count: int, format: Format | None = None) -> Finding | None:
        return budget.run("the step that breaks", lambda: _broken_later(step, batches, count, format))

    found = result.add(divergence(step, batches))
    if found.broken is not None and (later := broken_after(found.broken, plain(FP32_NUMBERS))):
        result.findings.append(later)
    if not found.findings or found.findings[0].kind != DIVERGENCE:
        return
    finding = found.findings[0]
    if lost and finding.cure:  # fp32 weights cure both, so that this is what comes of the other
        result.findings.remove(finding)
        return
    for other in lost:
        other.cure = []
    later = broken_after(found.at) if found.at and not found.is_finite else None
    if later is not None and later.direction == UPDATE:
        finding.tensor, finding.detail = later.tensor, f"{finding.detail}; {later.detail}"
    elif later is not None:
        result.findings[-1] = later
    elif not finding.cure:

        def fixes(passes: Replay) -> bool:
            return found.fixes(passes.train(batches))

        if not budget.run("update", lambda: in_update(step, finding, fixes)):
            result.locate(finding, fixes)


def _broken_later(step: Step, batches: list[list[Batch]], count: int, format: Format | None) -> Finding | None:
    """Return the fault of a step that is not finite after ``count`` steps; without a format in the run's own."""
    passes = step.replay(format) if format else step.as_run()
    passes.train(batches[:count])
    later = step.after(passes, count)
    broken = later.replay(format) if format else later.as_run()
    broken.run_with_backoff()
    finding = find_origin(broken, (format or step.format).name)
    if finding is not None:
        finding.detail += f"; in step {step.number + count}, after {count} finite ones"
        before = (step.stored | step.buffers).get(finding.tensor)
        if finding.kind == INPUT and before is not None and finite(before):  # a step made it so, and will again
            finding.direction, finding.line, finding.cure = UPDATE, "", []
    return finding


def _curable(result: Diagnosis) -> Finding | None:
    """Return the first finding of 16 bits, if it is one that fp32 may cure, and nothing has yet."""
    kinds = (OVERFLOW, UNDERFLOW, SCALE, DOMAIN, ERROR, EXCEPTION)
    of_half = (each for each in result.findings if each.kind in kinds and each.format not in (FP32, FP64, TF32))
    first = next(of_half, None)
    if first is None or result.step.format.half is None or first.direction not in (FORWARD, BACKWARD):
        return None
    return None if first.cure else first


def _cure(result: Diagnosis) -> None:
    """Search for what cures the finding, and measure what it costs."""
    step, budget, finding, scales = result.step, result.budget, _curable(result), result.range
    assert finding is not None
    of_scale = finding.direction == BACKWARD and finding.kind == OVERFLOW
    scale = scales.proposed if of_scale and scales is not None else None
    if scale is not None and _works_at(result, scale):
        finding.cure.append(step.remedies.scale(scale))
        return

    rows = result.modules.rows if result.modules is not None else []
    harmless = {row.module for row in rows if row.ratio > 1} - {each.module for each in result.findings}

    def faulty(other: Step) -> list[str]:
        errors = local_errors(other).findings if rows else []
        lost = (
            fp16_range(other).findings if finding.kind in (UNDERFLOW, SCALE) and finding.direction == BACKWARD else []
        )
        return [each.module for each in [*errors, *lost] if each.module not in harmless]

    goes_on = partial(budget.goes_on, "search for islands")
    islands = budget.run("search for islands", lambda: find_islands(step, finding, faulty, goes_on))
    if islands is not None:
        result.islands = islands
        if finding.kind != EXCEPTION:  # without them there is no step to compare with
            islands.cost = budget.run("cost of the islands", lambda: measure_cost(step, islands)) or ""
        finding.cure.append(islands.text(step.remedies))
    else:
        _drop_cast(result, finding, faulty)
    names = [spelled(finding.op)] if finding.kind != UNDERFLOW and not finding.op.endswith(("_", "to_copy")) else []
    if finding.kind == DOMAIN:  # what made its input, the last first
        names += [name for name, module in reversed(in_half(step)) if module == finding.module]
    if not finding.cure:  # torch may call several operators for one of the line, such as einsum
        names += [name for name in re.findall(r"\w+(?=\()", finding.line) if hasattr(torch, name)]
    for name in filter(None, names):
        if result.works(step.in_fp32(operators=[name]).as_run):
            finding.cure.append(step.remedies.operators([name]))
            break
    fewer_bits = finding.kind == ERROR and step.format.needs_loss_scale
    losses = {trial.name: trial.loss for trial in result.sweep if trial.status == OK}
    agrees = math.isclose(losses.get("bf16", math.nan), losses.get(FP32, math.nan), rel_tol=DIFFERENT)
    other = step.in_format(plain(BF16))
    if agrees and step.format is not other.format and not fewer_bits and result.works(other.as_run):
        finding.cure.append(step.remedies.format(other.format))


def _drop_cast(result: Diagnosis, finding: Finding, faulty: Callable[[Step], list[str]]) -> None:
    """Cure a finding that no module cures by leaving out the cast of a line, if one does."""
    for cast in explicit_casts(result.step.as_run()):
        other = result.step.without_casts(cast.line)
        if cast.module == finding.module and result.works(other.as_run) and not faulty(other):
            finding.line, finding.cure = cast.line, [NO_CAST]
            return


_CHECKS = (
    Check("manifest", lambda result: result.runs, _manifest),
    Check("gradients", lambda result: result.finite, lambda result: result.add(gradients(result.step))),
    Check("range", lambda result: result.runs and (result.is_ok(FP32) if result.sweep else result.finite), _range),
    Check("data", lambda result: result.sound and result.step.format.half is not None, _data),
    Check("modules", lambda result: result.sound, _module_errors, memories=2),
    Check("modules", lambda result: result.sound, _wrong_gradients, memories=2, part="whole gradients"),
    Check("updates", lambda result: result.loses_updates, _updates),
    Check("state", lambda result: result.finite, lambda result: result.add(state_updates(result.step))),
    Check(
        "divergence",
        lambda result: result.finite and result.findings == _lost(result),  # whose harm a training shows
        _divergence,
        seconds=_seconds_of_divergence,
    ),
    Check("islands", lambda result: _curable(result) is not None, _cure),
)
CHECKS = (SWEEP, *dict.fromkeys(check.name for check in _CHECKS))
