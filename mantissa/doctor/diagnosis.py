"""The examination of one step: the format sweep first, then what a finite step can still hide."""

from __future__ import annotations

import functools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from mantissa.display import size
from mantissa.doctor.cause import find_exception, find_origin, name_overflows
from mantissa.doctor.compiled import compiled_trials
from mantissa.doctor.cures import (
    SPELLED,
    Islands,
    find_islands,
    in_update,
    line_of_error,
    locate,
    measure_cost,
    trains_with,
)
from mantissa.doctor.dtypes import OperatorManifest, manifest, state_updates
from mantissa.doctor.fp16_range import Range, fp16_range, usual
from mantissa.doctor.gradients import gradients
from mantissa.doctor.module_errors import ModuleErrors, keep_harmful, local_errors, wrong_gradients
from mantissa.doctor.sweep import (
    BREAKS,
    FP32,
    FP64,
    LEFT_OUT,
    OK,
    RAISES,
    TF32,
    FormatTrial,
    format_sweep,
    overflow_of_sum,
)
from mantissa.doctor.training import RATES, REPLAYS, Divergence, divergence, steps_to_train
from mantissa.errors import FormatError, UsageError, is_out_of_memory
from mantissa.finding import (
    BACKWARD,
    CRASH,
    DIVERGENCE,
    DOMAIN,
    ERROR,
    EXAMINATION,
    EXCEPTION,
    FORWARD,
    INPUT,
    LOST,
    NOT_FINITE,
    OVERFLOW,
    RATE,
    UNDERFLOW,
    UPDATE,
    Examined,
    Finding,
)
from mantissa.formats import FORMATS
from mantissa.step import Batch, Replay, Step
from mantissa.tensors import finite
from mantissa.trace import is_raised_here, line_of_exception
from mantissa.updates import Counts, judge

HEALTHY, FOUND, NOT_REPRODUCED, CRASHED = "HEALTHY", "FOUND", "NOT REPRODUCED", "CRASHED"
EXIT_CODES = {HEALTHY: 0, CRASHED: 3, FOUND: 7, NOT_REPRODUCED: 8}
SWEEP = "formats"
"""The name of the format sweep among the checks."""
Result = TypeVar("Result")
Found = TypeVar("Found", bound=Examined)


@dataclass
class TakenStep:
    """A step that was taken as the run takes it, and what it started from."""

    step: Step
    began: str
    """Where the replay started: a checkpoint's name, or ``the beginning``."""
    loss: float = math.nan
    grad_norm: float = math.nan
    skipped: bool = False
    seconds: float = 0.0
    """Duration of the step."""
    memory_bytes: int = 0
    """Memory that a step takes at its peak, with all that training holds."""
    updates: dict[str, Counts] = field(default_factory=dict)
    """What rounding did to each parameter's update; empty where it was skipped, or cannot be measured."""
    folder: Path | None = None
    """Of the run; None: a check-up before a run."""
    failed: bool = False
    """Whether the run itself ended at this step, because it was not finite."""
    before: list[float] = field(default_factory=list)
    """The losses of the steps that were replayed before this one."""
    retrained: Callable[[float], list[float]] | None = None
    """Takes those steps and this one with learning rates multiplied by a factor, and returns the losses."""
    finished: bool = False
    """Whether the run took all its steps, and this is one more."""
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        """The name of the format."""
        return self.step.format.name

    @property
    def finite(self) -> bool:
        """Whether the step was taken."""
        return not self.skipped and math.isfinite(self.loss)


class Budget:
    """Seconds and memory that may be spent; what does not fit is left out, and named.

    Args:
        seconds: for all parts.
        free_bytes: returns how much memory is left.
        say: hears the name of every part before it is run.
    """

    def __init__(self, seconds: float, free_bytes: Callable[[], int], say: Callable[[str], None] = lambda name: None):
        self.seconds = seconds
        self.left_out: list[str] = []
        self.crashes: dict[str, str] = {}
        """By part that crashed: the traceback."""
        self.spent: dict[str, float] = {}
        self._free_bytes = free_bytes
        self._say = say
        self._began = time.monotonic()

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.seconds - (time.monotonic() - self._began)

    def run(
        self,
        name: str,
        part: Callable[[], Result],
        memory_bytes: float = 0,
        seconds: float = 0,
        always: bool = False,
    ) -> Result | None:
        """Run a part if there is time and memory for it, or ``always``; return its result, else None.

        A part that this model cannot do is left out; one that fails for any other reason is a crash, and kept.

        Args:
            name: of the part.
            part: to run.
            memory_bytes: that it needs.
            seconds: that it takes at least.
            always: whether it is run whatever is left; it raises where memory runs out.
        """
        if not always and (why := self._lacks(memory_bytes, seconds)):
            self.left_out.append(f"{name} ({why})")
            return None
        self._say(name)
        began = time.monotonic()
        try:
            return part()
        except Exception as error:
            if always and is_out_of_memory(error):
                raise
            if is_out_of_memory(error):
                self.left_out.append(f"{name} (out of memory)")
            elif _is_the_models(error):
                reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                self.left_out.append(f"{name} ({reason})")
            else:
                self.crashes[name] = traceback.format_exc()
            return None
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - began

    def _lacks(self, memory_bytes: float, seconds: float) -> str:
        """Return why there is no time or no memory for a part; an empty string: there is."""
        if memory_bytes > (free := self._free_bytes()):
            return f"it needs about {size(memory_bytes)}, {size(free)} are free"
        left = self.left()
        if left <= 0:
            return f"no time left of budget_s={self.seconds:g}"
        if seconds > left:
            return f"it takes about {seconds:.0f} s; set budget_s={self.seconds + seconds:.0f}"
        return ""


def _is_the_models(error: Exception) -> bool:
    """Return whether a model cannot be computed so: torch or the model's own code raises it, not this library's."""
    if isinstance(error, FormatError | UsageError):
        return True
    return isinstance(error, RuntimeError) and (line_of_exception(error) is not None or not is_raised_here(error))


@dataclass
class Diagnosis:
    """What was found in one step."""

    replay: TakenStep
    budget: Budget
    verdict: str = HEALTHY
    sweep: list[FormatTrial] = field(default_factory=list)
    own: FormatTrial | None = None
    """Of the sweep: what the run does."""
    findings: list[Finding] = field(default_factory=list)
    manifest: OperatorManifest | None = None
    range: Range | None = None
    modules: ModuleErrors | None = None
    islands: Islands | None = None
    divergence: Divergence | None = None
    notes: list[str] = field(default_factory=list)
    reference: torch.dtype | None = None
    """What modules are compared with; None: fp32 for 16 bits, fp64 for fp32 and tf32."""

    @property
    def runs(self) -> bool:
        """Whether the run's own format raises nothing."""
        return self.own is None or self.own.status != RAISES

    @property
    def sound(self) -> bool:
        """Whether the step is finite, and nothing is found so far."""
        return self.finite and not self.findings

    @property
    def finite_in_fp32(self) -> bool:
        """Whether the step is finite in fp32, as far as it is known."""
        fp32 = self.trial(FP32)
        return self.finite if fp32 is None else fp32.status == OK

    @property
    def finite(self) -> bool:
        """Whether the step is finite in the run's own format, at a loss scale that its scaler would find."""
        return self.own.status == OK if self.own is not None else self.replay.finite

    def trial(self, name: str) -> FormatTrial | None:
        """Return that of a format."""
        return next((trial for trial in self.sweep if trial.name == name), None)

    def add(self, found: Found) -> Found:
        """Add what a check found to what is known, and return it."""
        self.findings += found.findings
        self.notes += found.notes
        return found

    @property
    def exit_code(self) -> int:
        """Of scripts/doctor.py."""
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
    """Time that it takes at least."""
    free: bool = False
    """Whether it costs nothing, so that it is made without time left, too."""
    part: str = ""
    """Name of the part where a check has several; empty: that of the check."""


def diagnose(
    replay: TakenStep,
    checks: Sequence[str] | None = None,
    budget_s: float = 60,
    reference: torch.dtype | None = None,
    say: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Examine a step.

    Args:
        replay: the step.
        checks: of ``CHECKS``; None: all of them.
        budget_s: seconds; fp32 and the run's own format are always tried.
        reference: what the modules are compared with; None: fp32 for 16 bits, fp64 for fp32 and tf32.
        say: hears what is examined next.
    """
    budget = Budget(budget_s, replay.step.free_bytes, say)
    result = Diagnosis(replay, budget, notes=list(replay.notes), reference=reference)
    checks = CHECKS if checks is None else checks
    if SWEEP in checks or not replay.finite:
        _sweep(result)
    for check in _CHECKS:
        if check.name in checks and check.applies(result):
            memory_bytes, seconds = check.memories * replay.memory_bytes, check.seconds(result)
            part = functools.partial(check.run, result)
            budget.run(check.part or check.name, part, memory_bytes, seconds, always=check.free)
    _judge(result)
    return result


def _judge(result: Diagnosis) -> None:
    """Set the verdict, and make a finding of each check that crashed."""
    replay, own = result.replay, result.own
    if result.findings:
        result.verdict = FOUND
    elif result.budget.crashes:
        result.verdict = CRASHED
    elif replay.failed and replay.finite:
        result.verdict = NOT_REPRODUCED
        deterministic = replay.step.remedies.deterministic
        result.notes.append(f"the run failed at this step, but its replay is finite; train with {deterministic}")
    elif not replay.finite and own is not None and own.scale == own.scales[0]:
        result.verdict = NOT_REPRODUCED
        result.notes.append("the step is not finite as the run takes it, and finite in every format that was examined")
    for part, trace in result.budget.crashes.items():
        what = trace.strip().rpartition("\n")[2]
        detail = f"{what}; this is a fault of the examination, and says nothing of the step"
        result.findings.append(Finding(CRASH, EXAMINATION, "", replay.precision, detail=detail, tensor=f"check {part}"))


def _manifest(result: Diagnosis) -> None:
    passes = result.replay.step.as_run()
    passes.microbatches = passes.step.first_samples()
    found = manifest(passes)
    known = {finding.line for finding in result.findings}  # what breaks is found already, with the cast that does it
    found.findings = [finding for finding in found.findings if not finding.line or finding.line not in known]
    result.manifest = result.add(found)


def _gradients(result: Diagnosis) -> None:
    result.add(gradients(result.replay.step))


def _range(result: Diagnosis) -> None:
    """Find the loss scales that fit, and try the one that is proposed."""
    step = result.replay.step
    scales = fp16_range(step)
    for finding in scales.findings:
        build = functools.partial(_at_scale, step, scales)
        if finding.cure and not result.budget.run("cures", functools.partial(trains_with, step, build)):
            finding.cure = []
    if result.findings:  # what is found there has a cause, which is found already
        scales.findings = []
    result.range = result.add(scales)


def _at_scale(step: Step, scales: Range) -> Replay:
    passes = step.as_run()
    assert scales.highest is not None
    passes.scale = 2.0 ** usual(scales.highest, scales.lowest or 0)
    return passes


def _module_errors(result: Diagnosis) -> None:
    """Find modules whose error harms the gradients of the step, and the place of one that is in no module."""
    step, budget = result.replay.step, result.budget
    found = local_errors(step, result.reference)
    if found.findings:
        found.findings = name_overflows(step.as_run(), found.findings)
        harmful = keep_harmful(step, found)
        harmless = [f"{each.kind} in {each.place} ({each.detail})" for each in found.findings if each not in harmful]
        found.notes += [f"{each}: the gradients of the step are right in spite of it" for each in harmless]
        found.findings = harmful
    for finding in found.findings:
        finding.line = finding.line or str(line_of_error(step, finding.module) or "")
    result.modules = result.add(found)
    for finding in (each for each in result.findings if not each.module):  # which no island can cure
        if wrong := budget.run("whole gradients", lambda: wrong_gradients(step), 2 * result.replay.memory_bytes):
            budget.run("place", functools.partial(locate, step, finding, wrong.fixed_by, budget.left))


def _wrong_gradients(result: Diagnosis) -> None:
    """Find gradients of the whole step that are wrong though no module is, and the place."""
    step, budget = result.replay.step, result.budget
    wrong = wrong_gradients(step)
    if wrong is not None and (finding := wrong.finding) is not None:
        result.findings.append(finding)
        budget.run("place", lambda: locate(step, finding, wrong.fixed_by, budget.left))


def _state(result: Diagnosis) -> None:
    result.add(state_updates(result.replay.step))


def _sweep(result: Diagnosis) -> None:
    """Try every format, and find the cause at the first that breaks; if none does, try the ranks' sum and compilers."""
    replay, budget = result.replay, result.budget
    step = replay.step
    result.sweep = format_sweep(step)
    own = result.own = result.sweep[-1]
    if replay.finite and not step.compiles:  # it was taken already, as the run takes it
        own.status, own.scale, own.loss = OK, own.scales[0], replay.loss
    broken: FormatTrial | None = None
    for trial in result.sweep:
        passes = None if trial.status else _tried(result, trial)
        if passes is None:
            continue
        if trial.status == RAISES and trial.name.partition("+")[0] not in (own.name, step.format.number.name):
            trial.status, trial.why = LEFT_OUT, f"cannot run this model ({trial.why})"  # it has hard-coded dtypes
        elif trial.status in (BREAKS, RAISES) and trial.name != FP64 and broken is None:
            broken = trial
            finding = find_origin(passes, trial.name) if trial.status == BREAKS else find_exception(passes, trial.name)
            result.findings.append(finding or _unlocated(trial))
            fp32 = result.trial(FP32)
            if trial.status == RAISES and fp32 is not None and trial.why in fp32.why:
                result.findings[-1].format = FP32
                result.notes.append("fp32 raises it, too, so precision is not the cause")
        elif trial is own and replay.failed and trial.scale != trial.scales[0]:
            result.findings += _too_large_a_scale(passes, trial)
        del passes
    if own.status == OK:
        step.scale = own.scale
        if broken is not None and broken is not own:
            finding = result.findings.pop(0)
            where = f"{finding.kind} in {finding.place}"
            result.notes.append(f"{broken.name} breaks ({where}), but this run in {step.format.name} is finite")
            broken = None
    if broken is None and 1 < step.ranks <= len(step.microbatches):
        result.findings += budget.run("sum of ranks", lambda: overflow_of_sum(step.as_run(), step.ranks)) or []
    if broken is None and step.compiles:
        trials, findings = budget.run("compiled formats", lambda: compiled_trials(step, budget.left)) or ([], [])
        result.sweep += trials
        result.findings += findings
    if broken is not None and broken.name == FP32:
        fp64 = result.trial(FP64)
        narrow = fp64 is not None and fp64.status == OK
        if result.findings[0].dtype in ("float16", "bfloat16"):
            result.notes.append("the code casts to 16 bits where the format is fp32")
        elif result.findings[0].kind not in (INPUT, EXCEPTION):
            cause = "they are beyond fp32's range" if narrow else "it is the data, the learning rate or the model"
            result.notes.append(f"the step is not finite in fp32, so 16 bits are not the cause: {cause}")
            if replay.before and replay.retrained is not None:
                budget.run("learning rate", lambda: _lower_rate(result))


def _lower_rate(result: Diagnosis) -> None:
    """Say that the learning rate is the cause, where a lower one is finite over the replayed steps and this one."""
    replay = result.replay
    assert replay.retrained is not None
    for factor in RATES:
        losses = replay.retrained(factor)
        if all(map(math.isfinite, losses)):
            first = replay.step.number - len(replay.before)
            detail = (
                f"from step {first} to {replay.step.number} the loss goes {replay.before[0]:.4g} … "
                f"{replay.before[-1]:.4g}, not finite; with {factor:g} times the learning rate {losses[0]:.4g} … "
                f"{losses[-1]:.4g}; what breaks is {result.findings[0].kind} in {result.findings[0].place}"
            )
            result.findings = [Finding(RATE, UPDATE, "", FP32, detail=detail, cure=[replay.step.remedies.rate(factor)])]
            return


def _tried(result: Diagnosis, trial: FormatTrial) -> Replay | None:
    """Take the step in a format, and return the passes that did; None: it is left out, and the trial says why."""
    memory_bytes = result.replay.memory_bytes * (1 + (trial.name == FP64))
    needed = trial.name == FP32 or trial is result.own
    passes = result.budget.run(trial.name, trial.take, memory_bytes, always=needed)
    if passes is None and not trial.status:
        trial.status, trial.why = LEFT_OUT, "left out"
    return passes


def _unlocated(trial: FormatTrial) -> Finding:
    """Return the finding of a step that no operator makes infinite."""
    harmed = trial.nonfinite
    gradient = next((name for name in harmed if name != "loss"), "")
    direction, module = (FORWARD, "") if "loss" in harmed else (BACKWARD, gradient.rpartition(".")[0])
    if trial.status == RAISES:
        return Finding(EXCEPTION, FORWARD, "", trial.name, detail=trial.why)
    shown = ", ".join(harmed[:3]) + (", …" if len(harmed) > 3 else "")
    return Finding(NOT_FINITE, direction, module, trial.name, detail=f"{shown}: no torch operator made it so")


def _too_large_a_scale(passes: Replay, trial: FormatTrial) -> list[Finding]:
    """Return what overflows at the loss scale at which a run ended, and the scale at which nothing does."""
    passes.scale = trial.scales[0]
    finding = find_origin(passes, trial.name)
    if finding is None:
        return []
    finding.cure = [f"{passes.step.remedies.scale(trial.scale)}, at which this step is finite"]
    return [finding]


def _updates(result: Diagnosis) -> None:
    """Judge what rounding does to the updates, and try weights in fp32."""
    step = result.replay.step
    found = judge(result.replay.updates, step.format)
    if found.findings:
        other = step.with_fp32_weights
        if result.budget.run("fp32 weights", lambda: trains_with(step, lambda: step.replay(other, as_run=True))):
            for finding in found.findings:
                finding.cure = [step.remedies.format(other)]
    result.add(found)


def _lost(result: Diagnosis) -> list[Finding]:
    """Return the findings of updates that are lost."""
    return [finding for finding in result.findings if finding.kind == LOST and finding.direction == UPDATE]


def _trains(result: Diagnosis) -> bool:
    """Return whether a training may say more: nothing is found but lost updates, whose harm it shows."""
    return result.finite and len(_lost(result)) == len(result.findings)


def _seconds_of_divergence(result: Diagnosis) -> float:
    """Return how long the trainings take, about."""
    taken, spent = result.replay, result.budget.spent
    half = taken.step.format.half is not None
    # Those in fp32, the exact one, and one of weights that stand still. In fp32 the exact one, in fp64, counts twice.
    references = spent.get(FP32, taken.seconds) * (REPLAYS + 2) if half else taken.seconds * 3
    return steps_to_train(taken.step) * (taken.seconds + references)


def _divergence(result: Diagnosis) -> None:
    """Train some steps in the run's format and in fp32, and find the place where that is worse."""
    step, budget, lost = result.replay.step, result.budget, _lost(result)
    batches = step.following(steps_to_train(step))
    found = result.divergence = result.add(divergence(step, batches))
    if (count := found.broken) is not None:
        later = budget.run("the step that breaks", lambda: _broken_later(step, batches, count, FP32))
        result.findings += [later] if later is not None else []
    if not found.findings or found.findings[0].kind != DIVERGENCE:
        return
    finding = found.findings[0]
    if lost and finding.cure:  # fp32 weights cure both, so that this is what comes of the other
        result.findings.remove(finding)
        return
    for other in lost:
        other.cure = []
    later = None
    if found.at and not math.isfinite(found.away[found.at]):
        later = budget.run("the step that breaks", lambda: _broken_later(step, batches, found.at))
    if later is not None and later.direction == UPDATE:
        finding.tensor, finding.detail = later.tensor, f"{finding.detail}; {later.detail}"
    elif later is not None:
        result.findings[-1] = later
    elif not finding.cure:

        def fixes(passes: Replay) -> bool:
            return found.fixes(passes.train(batches))

        if not budget.run("update", lambda: in_update(step, finding, fixes)):
            budget.run("place", lambda: locate(step, finding, fixes, budget.left))


def _broken_later(step: Step, batches: list[list[Batch]], count: int, format: str = "") -> Finding | None:
    """Return the fault of a step that is not finite after ``count`` steps, in the run's own format or another."""
    passes = step.replay(format) if format else step.as_run()
    passes.train(batches[:count])
    later = step.after(passes, count)
    broken = later.replay(format) if format else later.as_run()
    broken.run_with_backoff()
    finding = find_origin(broken, format or step.format.name)
    if finding is not None:
        finding.detail += f"; in step {step.number + count}, after {count} finite ones"
        before = (step.stored | step.buffers).get(finding.tensor)
        if finding.kind == INPUT and before is not None and finite(before):  # a step made it so, and will again
            finding.direction, finding.line, finding.cure = UPDATE, "", []
    return finding


def _curable(result: Diagnosis) -> Finding | None:
    """Return the first finding of 16 bits, if it is one that fp32 may cure, and nothing has yet."""
    curable = (OVERFLOW, UNDERFLOW, DOMAIN, ERROR, EXCEPTION)
    of_half = (each for each in result.findings if each.kind in curable and each.format not in (FP32, FP64, TF32))
    first = next(of_half, None)
    if first is None or result.replay.step.format.half is None or first.direction not in (FORWARD, BACKWARD):
        return None
    return None if first.cure else first


def _cure(result: Diagnosis) -> None:
    """Search for what cures the finding, and measure what it costs."""
    step, budget, finding = result.replay.step, result.budget, _curable(result)
    assert finding is not None
    tries: dict[str, Callable[[], Replay]] = {}
    scales = result.range
    if finding.direction == BACKWARD and finding.kind == OVERFLOW and scales is not None and scales.highest is not None:
        scale = step.remedies.scale(2.0 ** usual(scales.highest, scales.lowest or 0))
        tries[scale] = functools.partial(_at_scale, step, scales)

    def healthy(fp32_modules: list[str]) -> bool:
        return result.modules is None or not local_errors(step, fp32_modules=fp32_modules).findings

    if any(budget.run("cures", functools.partial(trains_with, step, build)) for build in tries.values()):
        finding.cure += list(tries)
        return
    islands = budget.run("search for islands", lambda: find_islands(step, finding, healthy, budget.left))
    if islands is not None and islands.cured:
        result.islands = islands
        if finding.kind != EXCEPTION:  # without them there is no step to compare with
            budget.run("cost of the islands", lambda: measure_cost(step, islands))
        finding.cure.append(islands.text(step.remedies))
    name = SPELLED.get(finding.op.removeprefix("aten."), finding.op.removeprefix("aten."))
    if name and finding.kind != UNDERFLOW and not name.endswith(("_", "to_copy")):
        tries[step.remedies.operators([name])] = lambda: step.as_run(fp32_ops=[*step.fp32_ops, name])
    bf16 = result.trial("bf16")
    fewer_bits = finding.kind == ERROR and step.format.needs_loss_scale
    if bf16 is not None and bf16.status == OK and step.format is not FORMATS["bf16"] and not fewer_bits:
        tries[step.remedies.format("bf16")] = lambda: step.replay("bf16", as_run=True)
    for cure, build in tries.items():
        if budget.run("cures", functools.partial(trains_with, step, build)):
            finding.cure.append(cure)


_CHECKS = (
    Check("manifest", lambda result: result.runs, _manifest),
    Check("gradients", lambda result: result.finite, _gradients),
    Check("range", lambda result: result.runs and result.finite_in_fp32, _range),
    Check("modules", lambda result: result.sound, _module_errors, memories=2),
    Check("modules", lambda result: result.sound, _wrong_gradients, memories=2, part="whole gradients"),
    Check("updates", lambda result: bool(result.replay.updates), _updates, free=True),
    Check("state", lambda result: result.finite, _state),
    Check("divergence", _trains, _divergence, seconds=_seconds_of_divergence),
    Check("islands", lambda result: _curable(result) is not None, _cure),
)
CHECKS = (SWEEP, *dict.fromkeys(check.name for check in _CHECKS))
