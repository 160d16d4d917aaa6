"""Updates that do not arrive in 16-bit weights, and second moments that are 0 in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

from evidence.doctor.step.finding import LOST, MOMENT, UPDATE, Finding
from mantissa.formats import FORMATS
from trainer.precision.modes import Precision
from trainer.profiling.updates import ParameterUpdate

_MOST = 0.5
_QUALITY = 0.9
_SHOWN = 3


def judge(updates: list[ParameterUpdate], precision: Precision) -> tuple[list[Finding], list[str]]:
    """Return the findings of one step's updates, the worst modules first, and notes.

    Only weights that are kept in 16 bits between steps are judged: masters hold what their copies lose, and stochastic
    rounding loses single updates on purpose.
    """
    if not keeps_16_bits(precision):
        return [], []
    mode = precision.mode
    name = FORMATS[mode].number.name
    moments = _worst(updates, lambda each: each.second_moment_zero)
    found = [
        _finding(
            MOMENT,
            each,
            mode,
            f"the second moment of {each.second_moment_zero:.0%} of the elements is 0 in {name}, their gradient is not",
            f"precision={name}_master",
        )
        for each in moments
    ]
    lost = _worst([each for each in updates if not each.edq >= _QUALITY], lambda each: each.lost)
    found += [
        _finding(
            LOST,
            each,
            mode,
            f"{each.lost:.0%} of the updates are rounded away, effective descent quality {each.edq:.2f}",
            f"precision={name}_master" + (", or precision=bf16_sr" if name == "bf16" else ""),
        )
        for each in lost
    ]
    modules = {each.module for each in found}
    notes = [f"{len(modules)} modules have such updates; the worst {_SHOWN} are shown"] if len(found) > _SHOWN else []
    return found[:_SHOWN], notes


def keeps_16_bits(precision: Precision) -> bool:
    """Return whether weights are kept only in 16 bits, and rounded to nearest: the ``*_pure`` modes."""
    return precision.mode.endswith("_pure")


def _worst(updates: list[ParameterUpdate], share: Callable[[ParameterUpdate], float]) -> list[ParameterUpdate]:
    """Return of each module the parameter with the largest share, of those with most of it, the largest first."""
    found: dict[str, ParameterUpdate] = {}
    for each in sorted(updates, key=share, reverse=True):
        if share(each) > _MOST:
            found.setdefault(each.name.rpartition(".")[0], each)
    return list(found.values())


def _finding(kind: str, of: ParameterUpdate, mode: str, detail: str, cure: str) -> Finding:
    return Finding(kind, UPDATE, of.name.rpartition(".")[0], mode, detail=f"{of.name}: {detail}", cure=[cure])
