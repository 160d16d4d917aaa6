"""Updates that do not arrive in 16-bit weights, and second moments that are 0 in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

from evidence.doctor.step.finding import LOST, MOMENT, UPDATE, Finding
from trainer.precision.modes import WEIGHTS_DTYPE, Precision, family
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
    found = _moments(updates, precision, _MOST)
    found += _lost([each for each in updates if not each.edq >= _QUALITY], precision, _MOST)
    modules = {each.module for each in found}
    notes = [f"{len(modules)} modules have such updates; the worst {_SHOWN} are shown"] if len(found) > _SHOWN else []
    return found[:_SHOWN], notes


def suspects(updates: list[ParameterUpdate], precision: Precision, too_large: bool) -> list[Finding]:
    """Return what can have made the updates of 16-bit weights too large, or too small, the worst modules first.

    A second moment of 0 is a denominator that is too small. Lost updates are too small ones. Any share of them counts,
    so this is for a run whose loss is known to be wrong.
    """
    return (_moments if too_large else _lost)(updates, precision, 0.0)[:_SHOWN]


def keeps_16_bits(precision: Precision) -> bool:
    """Return whether the optimizer changes 16-bit weights, and neither masters nor random rounding hold the rest."""
    return precision.mode in WEIGHTS_DTYPE and precision.mode.endswith("_pure")


def _moments(updates: list[ParameterUpdate], precision: Precision, most: float) -> list[Finding]:
    name = family(precision.mode)
    return [
        _finding(
            MOMENT,
            each,
            precision.mode,
            f"the second moment of {each.second_moment_zero:.0%} of the elements is 0 in {name}, their gradient is not",
            f"precision={name}_master",
        )
        for each in _worst(updates, lambda each: each.second_moment_zero, most)
    ]


def _lost(updates: list[ParameterUpdate], precision: Precision, most: float) -> list[Finding]:
    name = family(precision.mode)
    return [
        _finding(
            LOST,
            each,
            precision.mode,
            f"{each.lost:.0%} of the updates are rounded away, effective descent quality {each.edq:.2f}",
            f"precision={name}_master" + (", or precision=bf16_sr" if name == "bf16" else ""),
        )
        for each in _worst(updates, lambda each: each.lost, most)
    ]


def _worst(
    updates: list[ParameterUpdate], share: Callable[[ParameterUpdate], float], most: float
) -> list[ParameterUpdate]:
    """Return of each module the parameter with the largest share, of those with more than ``most``, largest first."""
    found: dict[str, ParameterUpdate] = {}
    for each in sorted((each for each in updates if share(each) > most), key=share, reverse=True):
        found.setdefault(each.name.rpartition(".")[0], each)
    return list(found.values())


def _finding(kind: str, of: ParameterUpdate, mode: str, detail: str, cure: str) -> Finding:
    return Finding(kind, UPDATE, of.name.rpartition(".")[0], mode, detail=f"{of.name}: {detail}", cure=[cure])
