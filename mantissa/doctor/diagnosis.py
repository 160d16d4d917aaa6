"""The examination of one step: the format sweep, the checks, the cures of what they find, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mantissa.display import dtype_name
from mantissa.doctor.budget import Budget, Say
from mantissa.doctor.checks import (
    BEGINS,
    CHECKS,
    COMPILED,
    COMPILES,
    EXACT,
    FINITE,
    HALF,
    HALF_WEIGHTS,
    ISLANDS,
    RANGE,
    RUNS,
    SWEEP,
    TABLE,
    Check,
)
from mantissa.doctor.course import Course
from mantissa.doctor.cures import Islands, Trial, line_of_error, places, search
from mantissa.doctor.finding import (
    CRASH,
    DOMAIN,
    DTYPE,
    ERROR,
    EXAMINATION,
    EXCEPTION,
    INPUT,
    NO_PROGRESS,
    OVERFLOW,
    SCALE,
    UNDERFLOW,
    UPDATE,
    Cure,
    Examined,
    Finding,
)
from mantissa.doctor.fp16_range import Range
from mantissa.doctor.sweep import DIFFERENT, OK, RAISES, FormatTrial, Sweep, at_its_scale, format_sweep
from mantissa.formats import BF16, FP32, Format, plain
from mantissa.step.step import Step

HEALTHY, FOUND, NOT_REPRODUCED = "HEALTHY", "FOUND", "NOT REPRODUCED"
CRASHED, INCOMPLETE = "CRASHED", "INCOMPLETE"
EXIT_CODES = {HEALTHY: 0, CRASHED: 3, INCOMPLETE: 3, FOUND: 7, NOT_REPRODUCED: 8}


@dataclass
class TakenStep:
    """A step that was taken as the run takes it, and what it started from."""

    step: Step
    began: str
    """Where the replay started, in words: the name of a checkpoint, or the beginning."""
    loss: float = math.nan
    grad_norm: float = math.nan
    skipped: bool = False
    spoils_buffers: bool = False
    """Whether it leaves a buffer that is not finite, and was."""
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
    start: Step | None = None
    """An earlier step of the same run, before its loss left its course, as far as is known; None: the step itself."""
    history: str = ""
    """How its loss went wrong by its record; empty: it did not, or there is none."""
    notes: list[str] = field(default_factory=list)

    @property
    def precision(self) -> str:
        """Name of the format."""
        return self.step.format.name

    @property
    def finite(self) -> bool:
        """Whether the step was taken, and leaves all finite; an infinite norm clips gradients to 0, or to NaN."""
        return not (self.skipped or self.spoils_buffers) and math.isfinite(self.loss) and self.grad_norm != math.inf


@dataclass(frozen=True)
class Fault:
    """What a check reported, paired with the cures that hold."""

    trial: Trial
    """Tries its cures, on the check that reported it."""
    half: bool
    """Whether fp32 in some places may cure it."""
    held: tuple[Cure, ...] = ()
    at: dict[str, Any] = field(default_factory=dict)
    """Where it is by what it is gone without, if it shows nowhere."""

    @property
    def reported(self) -> Finding:
        """What the check reported, with candidates."""
        return self.trial.finding

    @property
    def finding(self) -> Finding:
        """The same with its place and the cures that hold, for the report."""
        return replace(self.reported, **self.at, cure=tuple(map(str, self.held)), candidates=())


@dataclass
class Diagnosis:
    """What the examination of one step says so far."""

    taken: TakenStep
    budget: Budget
    step: Step
    """The step, at the loss scale at which it is finite, if there is one."""
    course: Course
    """How training goes on from where the run left its course, or from the step."""
    verdict: str = HEALTHY
    sweep: Sweep = field(default_factory=Sweep)
    faults: list[Fault] = field(default_factory=list)
    beside: Cure | None = None
    """Cure of what explodes in fp32, too, with which those of other faults are tried together."""
    examined: dict[str, Examined] = field(default_factory=dict)
    """What each part of the examination measured."""
    notes: list[str] = field(default_factory=list)
    not_asked: list[str] = field(default_factory=list)
    """Checks that were not to be made."""
    not_made: list[str] = field(default_factory=list)
    """Checks that say nothing of this step, or nothing new after its faults."""

    @property
    def known(self) -> list[Finding]:
        """The faults of the step that are known so far, with their cures."""
        return [fault.finding for fault in self.faults]

    @property
    def findings(self) -> list[Finding]:
        """The faults of the step, else how the run went by its record; and the checks that crashed."""
        return [*self.known, *self._record(), *self._crashes()]

    def _record(self) -> Iterator[Finding]:
        if self.taken.history and not self.faults:
            yield Finding(NO_PROGRESS, UPDATE, "", self.taken.precision, detail=self.taken.history)

    def _crashes(self) -> Iterator[Finding]:
        for part, trace in self.budget.crashes.items():
            what = trace.strip().rpartition("\n")[2]
            detail = f"{what}; this is a fault of the examination, and says nothing of the step"
            place = f"check {part}"
            yield Finding(CRASH, EXAMINATION, "", self.taken.precision, detail=detail, tensor=place)

    @property
    def held(self) -> list[Cure]:
        """The cures that hold, those of the first fault first."""
        return [cure for fault in self.faults for cure in fault.held]

    @property
    def islands(self) -> Islands | None:
        """The modules in fp32 that cure the step; None: none do, or were sought."""
        return next((cure for cure in self.held if isinstance(cure, Islands)), None)

    @property
    def formats(self) -> list[FormatTrial]:
        """The formats that were tried, and the compiled step."""
        compiled = self.examined.get(COMPILED, Examined())
        return [*self.sweep.trials, *compiled.rows]

    @property
    def range(self) -> Range | None:
        """The loss scales that fit."""
        measured = self.examined.get(RANGE)
        return measured if isinstance(measured, Range) else None

    @property
    def finite(self) -> bool:
        """Whether the step is finite in the run's own format, at a loss scale that its scaler would find."""
        as_run = self.sweep.as_run
        return as_run.status == OK if as_run is not None else self.taken.finite

    @property
    def ended_at_scale(self) -> bool:
        """Whether the run has ended at a loss scale, and the step is finite at a lower one."""
        as_run = self.sweep.as_run
        return self.taken.failed and as_run is not None and as_run.backed_off

    @property
    def facts(self) -> set[str]:
        """What is known of the step before the checks."""
        as_run, fp32 = self.sweep.as_run, self.sweep.of(plain(FP32))
        format = self.step.format
        facts = {
            COMPILES: self.step.compiles,
            HALF: format.half is not None,
            HALF_WEIGHTS: format.only_half,
            RUNS: as_run is None or as_run.status != RAISES,
            FINITE: self.finite,
            BEGINS: self.finite or self.course.start.number < self.step.number,
            EXACT: fp32.status == OK if fp32 is not None else self.finite,
        }
        return {fact for fact, holds in facts.items() if holds}

    @property
    def exit_code(self) -> int:
        """Exit code of a command."""
        return EXIT_CODES[self.verdict]


def diagnose(
    taken: TakenStep,
    checks: Sequence[str],
    time_budget_s: float,
    say: Say = lambda name: None,
) -> Diagnosis:
    """Examine a step.

    Args:
        taken: the step.
        checks: of ``CHECKS``.
        time_budget_s: seconds; fp32 and the run's own format are always tried.
        say: hears what is examined next.
    """
    budget = Budget(time_budget_s, taken.step, say, taken.seconds, taken.memory_bytes)
    result = Diagnosis(taken, budget, taken.step, Course(taken.start or taken.step, budget), notes=list(taken.notes))
    result.not_asked = [name for name in CHECKS if name not in checks]

    # The same step in one format after another: where it breaks first is a fault.
    if SWEEP in checks or not taken.finite:
        _sweep(result)
    # Formats are not at fault where fp32 explodes from the same start.
    exploding: list[Fault] = []
    if result.faults or taken.history or (taken.start is not None and taken.finished):
        exploding = _follow(result)
    result.faults = [*exploding, *map(_tried, result.faults)]

    made = {SWEEP, ISLANDS}
    # What a step can hide that is finite. The cures that a check knows are tried at once: what follows may need one.
    for check in TABLE:
        if check.name in checks and _is_wanted(result, check):
            _make(result, check)
            made.add(check.name)
    result.not_made = [name for name in checks if name not in made]

    # The first fault of 16 bits: another loss scale, fp32 in some places, or another format.
    if ISLANDS in checks:
        _search(result)
    if result.faults:
        _combine(result)

    result.verdict = _verdict(result)
    return result


def _sweep(result: Diagnosis) -> None:
    """Try every format, and go on with the step at the loss scale that its scaler finds."""
    taken = result.taken
    loss = taken.loss if taken.finite and not taken.step.compiles else None
    result.sweep = sweep = format_sweep(taken.step, result.budget, loss, taken.failed)
    result.notes += sweep.notes
    if sweep.as_run is not None and sweep.as_run.status == OK:
        result.step = taken.step.at_scale(sweep.as_run.scale)
        result.course = Course(taken.start or result.step, result.budget)

    # Nothing is left of its faults where a step is finite, and a `Trial` asks that of any cure: where a run has ended
    # though a lower loss scale is finite, at the scale of the cure.
    again = at_its_scale if result.ended_at_scale else lambda other: Examined()
    for finding in sweep.findings:
        trial = Trial(finding, frozenset(), again, taken.step, result.course, result.budget)
        result.faults.append(Fault(trial, sweep.half))


def _follow(result: Diagnosis) -> list[Fault]:
    """Train on in fp32 from where the run left its course: return what explodes there, too, which is the first fault.

    Where its cure does not suffice in the run's format, those of the other faults are tried together with it.
    """
    course, budget = result.course, result.budget
    finding = budget.run("training in fp32", course.explosion)
    if finding is None:
        return []
    fault = Fault(Trial(finding, frozenset(), lambda other: Examined(), course.start, course, budget), half=False)
    if course.start.format.number is FP32 and budget.left() <= 0:  # then what the reference has shown is enough
        about = f"trained in {dtype_name(course.start.exact_dtype)} alone; no time was left"
        fault = replace(fault, held=tuple(replace(cure, about=about) for cure in finding.candidates))
    else:
        fault = _tried(fault)
    others = [replace(other, half=other.half and not fault.held) for other in result.faults]
    if not fault.held and others and finding.candidates and finding.candidates[0].data is None:
        result.beside = finding.candidates[0]
        result.course = Course(result.beside.step, budget)
        others = [replace(other, trial=replace(other.trial, course=result.course)) for other in others]
    result.faults = others
    return [fault]


def _combine(result: Diagnosis) -> None:
    """Let the first fault have its cure where that of another one was tried together with it."""
    first, *others = result.faults
    if result.beside is not None and any(other.held for other in others):
        cure = replace(result.beside, about="together with the next cure")
        result.faults[0] = replace(first, held=(cure,))


def _is_wanted(result: Diagnosis, check: Check) -> bool:
    """Return whether a check has something to say of a step, after the faults that are known."""
    new = check.always_measures or check.is_after(result.known)
    return new and check.needs <= result.facts


def _make(result: Diagnosis, check: Check) -> None:
    """Make a check, and pair what it finds with the cures that hold."""
    # Make it; of some only the table is wanted.
    budget, part, step = result.budget, check.part or check.name, _step_for(result, check)
    examined = budget.run(part, partial(check.find, step, budget))
    if examined is None:
        return
    result.examined[part] = replace(examined, again=None)  # which holds what it compares with
    result.notes += examined.notes
    budget.left_out += examined.left_out
    if not check.is_after(result.known):
        return

    # Every fault, with the cure that holds; but for a cast that is known by what it breaks.
    again = examined.again or (lambda other: check.find(other, budget))
    keys = frozenset(finding.key for finding in examined.findings)
    lines = {finding.line for finding in result.known if finding.line}
    for finding in examined.findings:
        if finding.kind != DTYPE or finding.line not in lines:
            trial = Trial(finding, keys - {finding.key}, again, _base_for(result, check), result.course, budget)
            fault = Fault(trial, check.finds_half)
            unplaced = finding.kind == check.unplaced and not finding.module and not finding.tensor
            placed = budget.run("place", partial(_placed, step, fault)) if unplaced else _tried(fault)
            result.faults.append(placed or fault)


def _step_for(result: Diagnosis, check: Check) -> Step:
    """Return the step that a check examines: as it is, or cured of the faults that are known."""
    base = _base_for(result, check)
    cured = [base.changed_as(fault.held[0].step, fault.trial.base) for fault in result.faults if fault.held]
    return cured[0] if check.of_cured and cured else base


def _base_for(result: Diagnosis, check: Check) -> Step:
    """Return the step that a check is for: this one, or that from which on the course is followed."""
    return result.course.start if check.of_course else result.step


def _tried(fault: Fault) -> Fault:
    """Return a fault with the first of the cures that its check knows, if one holds; of data, the best."""
    choose = fault.trial.best if fault.reported.kind == INPUT else fault.trial.first
    return replace(fault, held=tuple(choose(fault.reported.candidates)))


def _placed(step: Step, fault: Fault) -> Fault:
    """Return a fault that shows nowhere, with the place where a cure of it changes something."""
    held, at = fault.trial.place(chain(fault.reported.candidates, places(step, fault.trial)))
    if not held and not at:
        at = {"line": str(line_of_error(step, "") or "")}
    return replace(fault, held=tuple(held), at=at)


_IN_HALF = (OVERFLOW, UNDERFLOW, SCALE, DOMAIN, ERROR, EXCEPTION)
"""Kinds of faults that fp32 may cure."""


def _search(result: Diagnosis) -> None:
    """Search for what cures the first fault of 16 bits, where its check knows nothing."""
    # What is searched for: the first such fault, if no cure of it is known.
    step, scales = result.step, result.range
    of_half = (fault for fault in result.faults if fault.half and fault.reported.kind in _IN_HALF)
    fault = next(of_half, None)
    if fault is None or fault.held or step.format.half is None:
        return

    # With which scale and format, and from which place.
    scale = scales.proposed if scales is not None else None
    # A run that has ended is cured at the scale at which it ended, or by a lower one.
    if result.ended_at_scale and result.sweep.as_run is not None:
        step = result.taken.step
        scale = min(scale, result.sweep.as_run.scale) if scale is not None else None
    trial = replace(fault.trial, finding=fault.finding, base=step)  # with its place
    held = result.budget.run(ISLANDS, partial(search, step, trial, scale, _other_format(result)))
    result.faults[result.faults.index(fault)] = replace(fault, held=tuple(held or ()))


def _other_format(result: Diagnosis) -> Format | None:
    """Return bf16 where its loss is that of fp32."""
    bf16, fp32 = result.sweep.of(plain(BF16)), result.sweep.of(plain(FP32))
    if bf16 is None or fp32 is None or (bf16.status, fp32.status) != (OK, OK) or result.step.format is bf16.format:
        return None
    return bf16.format if math.isclose(bf16.loss, fp32.loss, rel_tol=DIFFERENT) else None


def _verdict(result: Diagnosis) -> str:
    """Return the verdict; what is not reproduced is noted with what to do."""
    taken, as_run = result.taken, result.sweep.as_run
    if result.faults or taken.history:
        return FOUND
    if result.budget.crashes:
        return CRASHED
    if taken.failed and taken.finite:
        deterministic = taken.step.remedies.deterministic
        result.notes.append(f"the run failed at this step, but its replay is finite; train with {deterministic}")
        return NOT_REPRODUCED
    if not taken.finite and as_run is not None and not as_run.backed_off:
        result.notes.append("the step is not finite as the run takes it, and finite in every format that was examined")
        return NOT_REPRODUCED
    return INCOMPLETE if result.budget.left_out else HEALTHY
