"""Which of the faster settings is soonest at the default's final loss: whole runs with five seeds, compared."""

from __future__ import annotations

import time
from collections.abc import Sequence

from evidence.advice.candidates import Candidate
from evidence.advice.report import overrides_of
from evidence.advice.search import HELPS, Search
from evidence.comparison.command import compared
from mantissa.compare import times
from trainer.config.compose import key_of

MOST = 3
"""How many settings are trained beside the default: the fastest."""


def soonest(search: Search, given: Sequence[str]) -> tuple[Candidate | None, str]:
    """Return what takes clearly less time to the default's final loss, and that in words; None: nothing does."""
    found = [entry for entry in search.entries.values() if entry.times and search.speed(entry) > HELPS]
    fastest = sorted(found, key=search.speed, reverse=True)[:MOST]
    if not fastest:
        return None, "No setting is clearly faster, so none was trained"
    own = {f"setting{number}": entry.candidate for number, entry in enumerate(fastest, 1)}
    arms = {"default": search.reference.candidate, **own}
    common = [text for text in overrides_of(given, Candidate()) if key_of(text) != "seed"]
    typed = [f"arm.{name}={' '.join(candidate.overrides)}" for name, candidate in arms.items()]
    result = compared([*common, *typed, f"name=advice-{time.strftime('%Y%m%d-%H%M%S')}"])
    judged = {arm.label: ratio for arm in result.arms if (ratio := arm.reach.seconds_ratio)}
    if not judged:  # a busy machine, or a loss that is not reached with each seed
        return None, f"Time to the default's final loss is not judged of any setting ({result.plan.folder})"
    ratios = {label: ratio for label, ratio in judged.items() if ratio.high < 1}
    if not ratios:
        return None, f"No setting takes clearly less time to the default's final loss ({result.plan.folder})"
    best = min(ratios, key=lambda name: ratios[name].mean)
    said = f"{own[best].label}: {times(ratios[best])} of the default's time to its final loss ({result.plan.folder})"
    return own[best], said
