"""The examination of one step: the format sweep, the checks, the cures of what they find, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from mantissa.doctor.budget import Budget
from mantissa.doctor.checks import CHECKS, COMPILED, EXACT, FINITE, ISLANDS, RUNS, SWEEP, TABLE, Check, Fault
from mantissa.doctor.cures import Islands, Trial, line_of_error, places, search
from mantissa.doctor.fp16_range import Range
from mantissa.doctor.sweep import DIFFERENT, OK, RAISES, FormatTrial, Sweep, format_sweep
from mantissa.finding import (
    CRASH,
    DOMAIN,
    ERROR,
    EXAMINATION,
    EXCEPTION,
    OVERFLOW,
    SCALE,
    UNDERFLOW,
    UPDATE,
    Cure,
    Examined,
    Finding,
)
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
    step: Step
    """The step, at the loss scale at which it is finite, if there is one."""
    verdict: str = HEALTHY
    formats: Sweep = field(default_factory=Sweep)
    findings: list[Finding] = field(default_factory=list)
    """The faults, with the cures that hold."""
    examined: dict[str, Examined] = field(default_factory=dict)
    """What each part measured."""
    islands: Islands | None = None
    notes: list[str] = field(default_factory=list)
    not_asked: list[str] = field(default_factory=list)
    """Checks that were not to be made."""
    half: list[tuple[int, Trial]] = field(default_factory=list)
    """Faults that fp32 in some places may cure: the place among the findings, and the trial."""
    cured: dict[Fault, Step] = field(default_factory=dict)
    """The step that is cured of faults."""

    @property
    def sweep(self) -> list[FormatTrial]:
        """The formats that were tried, and the compiled step."""
        compiled = self.examined.get(COMPILED, Examined())
        return [*self.formats.trials, *compiled.rows]

    @property
    def range(self) -> Range | None:
        """The loss scales that fit."""
        measured = self.examined.get("range")
        return measured if isinstance(measured, Range) else None

    @property
    def runs(self) -> bool:
        """Whether the run's own format raises nothing."""
        own = self.formats.own
        return own is None or own.status != RAISES

    @property
    def finite(self) -> bool:
        """Whether the step is finite in the run's own format, at a loss scale that its scaler would find."""
        own = self.formats.own
        return own.status == OK if own is not None else self.taken.finite

    @property
    def facts(self) -> set[str]:
        """What the format sweep says."""
        exact = self.formats.of(plain(FP32))
        finite_in_fp32 = exact.status == OK if exact is not None else self.finite
        return {fact for fact, holds in {RUNS: self.runs, FINITE: self.finite, EXACT: finite_in_fp32}.items() if holds}

    @property
    def exit_code(self) -> int:
        """Exit code of a command."""
        return EXIT_CODES[self.verdict]


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
    checks = CHECKS if checks is None else checks
    budget = Budget(time_budget_s, taken.step, say, taken.seconds, taken.memory_bytes)
    result = Diagnosis(taken, budget, taken.step, notes=list(taken.notes))
    result.not_asked = [name for name in CHECKS if name not in checks]

    # The same step in one format after another: where it breaks first is a fault.
    if SWEEP in checks or not taken.finite:
        _sweep(result)

    # What a step can hide that is finite. A cure that a check knows is tried at once, for what comes after.
    for check in TABLE:
        if check.name in checks and _is_made(result, check):
            _make(result, check)

    # The first fault of 16 bits, which a loss scale or fp32 in some places may cure.
    for place, trial in result.half[:1]:
        result.findings[place] = _searched(result, result.findings[place], trial, ISLANDS in checks)

    _judge(result)
    return result


def _sweep(result: Diagnosis) -> None:
    """Try every format, and go on with the step at the loss scale that its scaler finds."""
    taken = result.taken
    loss = taken.loss if taken.finite and not taken.step.compiles else None
    result.formats = sweep = format_sweep(taken.step, result.budget, loss, taken.failed)
    if sweep.own is not None and sweep.own.status == OK:
        result.step = taken.step.at_scale(sweep.own.scale)
    # Of a fault that the sweep finds, nothing is left where the step is finite.
    _add(
        result,
        Examined(findings=sweep.findings, notes=sweep.notes),
        lambda step: Examined(),
        half=sweep.half,
        waits=True,
    )


def _is_made(result: Diagnosis, check: Check) -> bool:
    """Return whether a check has something to say of a step, after the checks before it."""
    is_wanted = check.always_measures or check.is_after(result.findings)
    return is_wanted and check.needs <= result.facts and check.applies_to(result.step)


def _make(result: Diagnosis, check: Check) -> None:
    """Make a check, and add what it finds."""
    step, part = result.step, check.part or check.name
    if check.of_cured:
        step = next((result.cured[fault] for fault in check.after or () if fault in result.cured), step)
    examined = result.budget.run(part, partial(check.find, step, result.budget))
    if examined is None:
        return
    result.examined[part] = examined
    if not check.is_after(result.findings):  # its table alone is wanted
        examined = replace(examined, findings=())
    again = examined.again or (lambda other: check.find(other, result.budget))
    _add(result, examined, again, half=check.finds_half, unplaced=check.unplaced)


def _add(
    result: Diagnosis,
    examined: Examined,
    again: Callable[[Step], Examined],
    half: bool = False,
    unplaced: str = "",
    waits: bool = False,
) -> None:
    """Add the findings of a check with the cures that hold; a line that an earlier check names is named once.

    Args:
        result: the diagnosis.
        examined: what the check says.
        again: the check, of another step.
        half: whether fp32 in some places may cure what it finds.
        unplaced: the kind of its faults whose place a cure shows.
        waits: whether cures of faults of 16 bits wait until it is known which loss scales fit.
    """
    result.notes += examined.notes
    lines = {finding.line for finding in result.findings if finding.line}
    keys = frozenset(finding.key for finding in examined.findings)
    for finding in examined.findings:
        if finding.line in lines:
            continue
        trial = Trial(finding, keys - {finding.key}, again, result.budget)
        in_half = half and finding.kind in _IN_HALF and result.step.format.half is not None
        if in_half:
            result.half.append((len(result.findings), trial))
        told: Finding | None = None
        if finding.kind == unplaced and not finding.module and not finding.tensor:
            told = result.budget.run("place", partial(_placed, result, trial))
        elif finding.cures and not (in_half and waits):
            told = result.budget.run("cures", partial(_tried, result, trial))
        result.findings.append(told or finding)


_IN_HALF = (OVERFLOW, UNDERFLOW, SCALE, DOMAIN, ERROR, EXCEPTION)
"""Kinds of faults that fp32 may cure."""


def _tried(result: Diagnosis, trial: Trial) -> Finding:
    """Return a finding with the first of its cures that holds."""
    held = trial.first(trial.finding.cures)
    for cure in held:
        result.cured.setdefault((trial.finding.kind, trial.finding.direction), cure.step)
    return _told(trial.finding, held)


def _placed(result: Diagnosis, trial: Trial) -> Finding:
    """Return a finding that shows nowhere, with the place where a cure of it changes something."""
    step = result.step
    held, at = trial.place(chain(trial.finding.cures, places(step, trial)))
    if not held and not at:
        at = {"line": str(line_of_error(step, "") or "")}
    return _told(replace(trial.finding, **at), held)


def _searched(result: Diagnosis, finding: Finding, trial: Trial, search_places: bool) -> Finding:
    """Return a finding of 16 bits with what cures it; a loss scale that loses gradients is no cure."""
    budget, scales = result.budget, result.range
    if finding.cure:
        return finding
    fitting = [cure for cure in finding.cures if scales is None or scales.holds(cure.step.scale)]
    held = budget.run("cures", partial(trial.first, fitting)) if fitting else []
    if not held and search_places and finding.direction != UPDATE:
        scale = scales.proposed if scales is not None else None
        searching = partial(search, result.step, replace(trial, finding=finding), scale, _other_format(result, finding))
        held = budget.run(ISLANDS, searching)
    held = held or []
    result.islands = next((cure for cure in held if isinstance(cure, Islands)), None)
    line = next((cure.at["line"] for cure in held if "line" in cure.at), finding.line)
    return _told(replace(finding, line=line), held)


def _other_format(result: Diagnosis, finding: Finding) -> Format | None:
    """Return bf16 where its loss is that of fp32, and it has no fewer bits where those are at fault."""
    bf16, fp32 = result.formats.of(plain(BF16)), result.formats.of(plain(FP32))
    if bf16 is None or fp32 is None or (bf16.status, fp32.status) != (OK, OK) or result.step.format is bf16.format:
        return None
    agrees = math.isclose(bf16.loss, fp32.loss, rel_tol=DIFFERENT)
    fewer_bits = finding.kind == ERROR and result.step.format.needs_loss_scale
    return bf16.format if agrees and not fewer_bits else None


def _told(finding: Finding, held: list[Cure]) -> Finding:
    """Return a finding with the texts of the cures that hold."""
    return replace(finding, cure=(*finding.cure, *(cure.text for cure in held)), cures=())


def _judge(result: Diagnosis) -> None:
    """Set the verdict, and add a finding of each check that crashed."""
    taken, own = result.taken, result.formats.own
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
