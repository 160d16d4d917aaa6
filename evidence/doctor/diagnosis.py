"""The examination of one step: the ladder first, then what a finite step can still hide."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from evidence.doctor.islands import Islands, price, search
from evidence.doctor.ladder.compiled import compiled_rungs
from evidence.doctor.ladder.divergence import REPLAYS, STEPS, divergence, masters_cure
from evidence.doctor.ladder.exchange import overflow_of_sum
from evidence.doctor.ladder.rungs import BREAKS, FP32, FP64, LEFT_OUT, OK, TF32, Rung, rungs
from evidence.doctor.measured import range as gradients
from evidence.doctor.measured.manifest import OperatorManifest, manifest
from evidence.doctor.measured.pairs import Pairs, check_reference, measure
from evidence.doctor.measured.updates import judge, keeps_16_bits
from evidence.doctor.provenance.origin import absorbed, find
from evidence.doctor.step.case import Case, CaseTrainer
from evidence.doctor.step.finding import BACKWARD, DOMAIN, ERROR, FORWARD, NOT_FINITE, OVERFLOW, UNDERFLOW, Finding
from evidence.doctor.step.replay import Replay, following
from mantissa.display import size
from trainer.errors import first_line, is_out_of_memory
from trainer.hardware import available_bytes

HEALTHY, FOUND, NOT_REPRODUCED = "HEALTHY", "FOUND", "NOT REPRODUCED"
EXIT_CODES = {HEALTHY: 0, FOUND: 7, NOT_REPRODUCED: 8}
CHECKS = ("ladder", "manifest", "range", "pairs", "updates", "divergence", "islands")


class Budget:
    """Seconds that may be spent; what does not fit is left out, and named."""

    def __init__(self, seconds: float, device: torch.device, say: Callable[[str], None] = lambda name: None) -> None:
        self.seconds = seconds
        self.device = device
        self.say = say
        """Hears the name of every part before it is run."""
        self.left_out: list[str] = []
        self.spent: dict[str, float] = {}
        self._began = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self._began)

    def take(self, name: str, part: Callable[[], Any], memory_bytes: int = 0) -> Any:
        """Run a part of the examination if there is time and memory for it, and return its result; else None."""
        if memory_bytes > (free := available_bytes(self.device)):
            self.left_out.append(f"{name} (it needs about {size(memory_bytes)}, {size(free)} are free)")
            return None
        if self.left <= 0:
            self.left_out.append(f"{name} (no time left of budget_s={self.seconds:g})")
            return None
        try:
            return self.timed(name, part)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.left_out.append(f"{name} (out of memory)")
            return None

    def timed(self, name: str, part: Callable[[], Any]) -> Any:
        """Run a part, add its seconds to ``spent``, and return its result."""
        self.say(name)
        began = time.monotonic()
        try:
            return part()
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - began


@dataclass
class Diagnosis:
    """What was found in one step."""

    replay: Replay
    budget: Budget
    verdict: str = HEALTHY
    ladder: list[Rung] = field(default_factory=list)
    own: Rung | None = None
    """Of the ladder: what the run does."""
    findings: list[Finding] = field(default_factory=list)
    manifest: OperatorManifest | None = None
    range: gradients.Range | None = None
    pairs: Pairs | None = None
    islands: Islands | None = None
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Of the steps that ``divergence`` takes, by format."""
    notes: list[str] = field(default_factory=list)
    checks: tuple[str, ...] = CHECKS
    """That were asked for."""

    @property
    def finite(self) -> bool:
        """Whether the step is finite in the run's own format, at a loss scale that its scaler would find."""
        return self.own.status == OK if self.own is not None else self.replay.finite

    @property
    def reference_is_finite(self) -> bool:
        """Whether the step is finite in fp32."""
        fp32 = next((rung for rung in self.ladder if rung.name == FP32), None)
        return self.finite if fp32 is None else fp32.status == OK

    @property
    def exit_code(self) -> int:
        """Of scripts/doctor.py."""
        return EXIT_CODES[self.verdict]


def diagnose(
    replay: Replay,
    checks: tuple[str, ...] = CHECKS,
    budget_s: float = 60,
    reference: torch.dtype | None = None,
    say: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Examine a step.

    Args:
        replay: the step.
        checks: of ``CHECKS``.
        budget_s: seconds; the rung of fp32 and the run's own are always taken.
        reference: what the modules are compared with; None: fp32 for 16 bits, fp64 for fp32 and tf32.
        say: hears what is examined next.

    Raises:
        UserError: that reference is not wider than the run's format.
    """
    check_reference(replay.precision, reference)
    result = Diagnosis(
        replay, Budget(budget_s, replay.case.hardware.device, say), notes=list(replay.notes), checks=checks
    )
    if "ladder" in checks or not replay.finite:
        _climb(result)
    if "manifest" in checks:
        # The formats do not depend on the number of samples; batch norm needs two.
        few = replay.case.few(2)
        result.manifest = result.budget.take("manifest", lambda: manifest(_own(few), replay.precision))
        if result.manifest is not None:
            result.findings += result.manifest.findings
            result.notes += result.manifest.notes
    if "range" in checks and result.reference_is_finite:
        result.range = result.budget.take("range", lambda: gradients.measure(replay.case))
        if result.range is not None:
            result.findings += [] if result.findings else result.range.findings
            result.notes += result.range.notes
    if "pairs" in checks and result.finite and not result.findings:
        result.pairs = result.budget.take("pairs", lambda: _measure(replay.case, reference), 2 * replay.memory_bytes)
        if result.pairs is not None:
            result.findings += result.pairs.findings
            result.notes += result.pairs.notes
    if "updates" in checks:
        found, notes = judge(replay.updates, replay.case.config.precision)
        result.findings += found
        result.notes += notes
    if "divergence" in checks:
        _train_on(result)
    if "islands" in checks:
        _cure(result)
    if result.findings:
        result.verdict = FOUND
    elif replay.failed and replay.finite:
        result.verdict = NOT_REPRODUCED
        result.notes.append("the run failed at this step, and taken again it is finite; train with deterministic=true")
    elif not replay.finite and result.own is not None and result.own.scale == result.own.scales[0]:
        result.verdict = NOT_REPRODUCED
        result.notes.append("the step is not finite as the run takes it, and finite in every rung that was examined")
    return result


def _unlocated(rung: Rung) -> Finding:
    """Return the finding of a step that no operator makes infinite."""
    harmed = rung.harmed or []
    gradient = next((name for name in harmed if name != "loss"), "")
    direction, module = (FORWARD, "") if "loss" in harmed else (BACKWARD, gradient.rpartition(".")[0])
    shown = ", ".join(harmed[:3]) + (", …" if len(harmed) > 3 else "")
    return Finding(NOT_FINITE, direction, module, rung.name, detail=f"{shown}: no operator of torch made it so")


def _own(case: Case) -> CaseTrainer:
    """Return a trainer as the run's own, eager."""
    return case.trainer(case.config.precision, own=True, scale=case.scale)


def _train_on(result: Diagnosis) -> None:
    """Train some steps in the run's format and in fp32, where nothing was found and there is time."""
    replay, budget = result.replay, result.budget
    case = replay.case
    if case.config.precision.half is None:
        result.notes.append("divergence: only formats of 16 bits are compared with fp32")
    if result.findings or not result.finite or case.config.precision.half is None:
        return
    fp32 = next((rung.seconds for rung in result.ladder if rung.name == FP32), replay.seconds)
    seconds = STEPS * (REPLAYS * fp32 + replay.seconds)
    if seconds > budget.left:
        budget.left_out.append(
            f"divergence (it takes about {seconds:.0f} s; set budget_s={budget.seconds + seconds:.0f})"
        )
        return
    batches = following(case, STEPS)
    found = budget.take("divergence", lambda: divergence(case, batches))
    if found is None:
        return
    if found.first and keeps_16_bits(found.precision):
        found.masters_cure = budget.take("divergence with masters", lambda: masters_cure(case, batches, found))
    result.losses = found.losses
    result.findings += found.findings


_WIDER = {FP64: 2}
"""The memory of a rung, relative to that of the run's own step."""
_CURABLE = (OVERFLOW, UNDERFLOW, DOMAIN, ERROR)
_INEXACT = (FP32, FP64, TF32)


def _cure(result: Diagnosis) -> None:
    """Search for fp32 modules that cure the first finding of 16 bits in a module, and measure their cost."""
    case, budget = result.replay.case, result.budget
    found = [each for each in result.findings if each.kind in _CURABLE and each.rung not in _INEXACT]
    if not found or case.config.precision.half is None or found[0].direction not in (FORWARD, BACKWARD):
        return
    finding = found[0]

    def healthy(trainer: CaseTrainer) -> bool:
        return result.pairs is None or not measure(replace(case, config=trainer.config)).findings

    islands = budget.take("islands", lambda: search(case, finding, healthy, lambda: budget.left))
    if islands is None:
        return
    result.islands = islands
    if islands.cured:
        budget.take("price of the islands", lambda: price(case, islands))
    finding.cure.append(islands.text())
    bf16 = next((rung for rung in result.ladder if rung.name == "bf16"), None)
    if bf16 is not None and bf16.status == OK and case.config.precision.mode != "bf16":
        finding.cure.append("or precision=bf16, which is finite here")


def _measure(case: Case, reference: torch.dtype | None) -> Pairs:
    found = measure(case, reference)
    if found.findings:
        found.findings = absorbed(_own(case), found.findings)
    return found


def _too_large_a_scale(trainer: CaseTrainer, rung: Rung) -> list[Finding]:
    """Return what overflows at the loss scale at which a run ended, and the scale at which nothing does."""
    trainer.loss_scale.scale.fill_(rung.scales[0])
    finding = find(trainer, rung.name)
    if finding is None:
        return []
    finding.cure = [
        f"scaler.init={rung.scale:g}, at which this step is finite; or a larger scaler.max_consecutive_skips"
    ]
    return [finding]


def _climb(result: Diagnosis) -> None:
    """Take every rung; where one breaks, find the cause at the first."""
    case, budget = result.replay.case, result.budget
    result.ladder = rungs(case)
    broken: Rung | None = None
    own = result.own = result.ladder[-1]
    needed = {FP32, own.name}
    if result.replay.finite and case.config.compile.mode == "off":  # it was taken already, as the run takes it
        own.status, own.scale, own.loss = OK, own.scales[0], result.replay.loss
    for rung in result.ladder:
        if rung.status:
            continue
        try:
            memory = _WIDER.get(rung.name, 1) * result.replay.memory_bytes
            if rung.name in needed:
                trainer = budget.timed(rung.name, rung.climb)
            else:
                trainer = budget.take(rung.name, rung.climb, memory)
        except RuntimeError as error:  # a model that cannot run in this format, such as one with hard-coded dtypes
            if rung is own or is_out_of_memory(error):
                raise
            rung.status, rung.why = LEFT_OUT, f"cannot run this model ({first_line(error)})"
            continue
        if trainer is None:
            rung.status, rung.why = LEFT_OUT, "left out"
            continue
        if rung.status == BREAKS and rung.name != FP64 and broken is None:
            broken = rung
            result.findings.append(find(trainer, rung.name) or _unlocated(rung))
        elif rung is own and result.replay.failed and rung.scale != rung.scales[0]:
            result.findings += _too_large_a_scale(trainer, rung)
        del trainer
    if own.status == OK:
        case.scale = own.scale
    if broken is None and case.ranks > 1:
        found = budget.take("sum of ranks", lambda: overflow_of_sum(_own(case), case.ranks))
        result.findings += found or []
    if broken is None and case.config.compile.mode != "off":
        compiled = budget.take("compiled rungs", lambda: compiled_rungs(case, lambda: budget.left))
        result.ladder += compiled[0] if compiled else []
        result.findings += compiled[1] if compiled else []
    if broken is not None and broken.name == FP32:
        fp64 = next(rung for rung in result.ladder if rung.name == FP64)
        cause = (
            "fp32 itself is too narrow here" if fp64.status == OK else "it is the data, the learning rate or the model"
        )
        result.notes.append(f"the step is not finite in fp32, so 16 bits are not the cause: {cause}")
