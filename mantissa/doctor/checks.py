"""The checks of a step, in order, and what each of them needs and comes after: read as data, by ``diagnose``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mantissa.doctor.budget import Budget
from mantissa.doctor.compiled import compiled
from mantissa.doctor.data import data
from mantissa.doctor.dtypes import manifest
from mantissa.doctor.finding import DIVERGENCE, DTYPE, ERROR, LOST, UPDATE, Examined, Finding
from mantissa.doctor.fp16_range import fp16_range
from mantissa.doctor.gradients import gradients
from mantissa.doctor.module_errors import module_errors
from mantissa.doctor.training import divergence
from mantissa.doctor.updates import state_updates, updates
from mantissa.doctor.whole_gradients import whole_gradients
from mantissa.step.step import Step
from mantissa.step.trace import FORWARD

SWEEP, ISLANDS = "formats", "islands"
"""Names of the format sweep and of the search for cures among the checks."""
MANIFEST, RANGE, MODULES, COMPILED = "manifest", "range", "modules", "compiled step"
"""Names of the parts whose rows are read: they are in ``Diagnosis.examined``."""
RUNS, FINITE, EXACT = "the run's format raises nothing", "the step is finite in it", "the step is finite in fp32"
COMPILES, HALF, HALF_WEIGHTS = "the run compiles", "it computes in 16 bits", "it keeps weights in 16 bits alone"
BEGINS = "the step from which on its course is followed is finite"
"""What is known of a step before the checks: from the format sweep, then of the run and its format."""
Sort = tuple[str, str]
"""A kind of faults and their direction."""
STORED, LOST_UPDATES = (DTYPE, FORWARD), (LOST, UPDATE)


@dataclass(frozen=True)
class Check:
    """A check: what it does, of which steps, and after which faults."""

    name: str
    """Name among ``checks``."""
    find: Callable[[Step, Budget], Examined]
    part: str = ""
    """Name of the part where a check has several; empty: that of the check."""
    needs: frozenset[str] = frozenset({FINITE})
    """What has to be known of the step."""
    after: frozenset[Sort] | None = None
    """The faults after which it is made; after others it says nothing new. None: after any."""
    always_measures: bool = False
    """Whether it is made after others, too, for its table alone."""
    of_cured: bool = False
    """Whether it examines the step that is cured of the faults before it."""
    of_course: bool = False
    """Whether it is for the step from which on the course is followed, and what follows."""
    unplaced: str = ""
    """Kind of its faults that may show nowhere: such a one is where a cure changes something."""
    finds_half: bool = False
    """Whether fp32 in some places may cure what it finds."""

    def is_after(self, findings: Iterable[Finding]) -> bool:
        """Return whether it says something new after these."""
        return self.after is None or all((finding.kind, finding.direction) in self.after for finding in findings)


NOTHING: frozenset[Sort] = frozenset()
TABLE = (
    # Compiled code beside eager code: of use only where nothing else is wrong.
    Check(SWEEP, compiled, COMPILED, needs=frozenset({FINITE, COMPILES}), after=NOTHING),
    # What operators run in, and whether gradients arrive.
    Check(MANIFEST, manifest, needs=frozenset({RUNS})),
    Check("gradients", gradients),
    # What 16 bits cannot hold: gradients, data, results.
    Check(
        RANGE,
        fp16_range,
        needs=frozenset({RUNS, EXACT}),
        after=NOTHING,
        always_measures=True,
        finds_half=True,
    ),
    Check("data", data, needs=frozenset({FINITE, HALF}), after=frozenset({STORED})),
    Check(MODULES, module_errors, after=frozenset({STORED}), unplaced=ERROR, finds_half=True),
    Check(MODULES, whole_gradients, "whole gradients", after=frozenset({STORED}), unplaced=ERROR, finds_half=True),
    # What training loses.
    Check("updates", updates, needs=frozenset({BEGINS, HALF_WEIGHTS}), of_course=True),
    Check("state", state_updates, needs=frozenset({BEGINS}), of_course=True),
    Check(
        "divergence",
        divergence,
        needs=frozenset({BEGINS}),
        after=frozenset({LOST_UPDATES}),
        of_cured=True,
        of_course=True,
        unplaced=DIVERGENCE,
    ),
)
CHECKS = tuple(dict.fromkeys((SWEEP, *(check.name for check in TABLE), ISLANDS)))
"""Names of all that can be asked for."""
