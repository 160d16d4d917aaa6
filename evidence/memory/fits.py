"""Which candidates fit into the memory, by forecast, and the default that does."""

from __future__ import annotations

from collections.abc import Sequence

from evidence.runs import merge_overrides
from mantissa.display import size
from trainer.config.compose import compose, key_of
from trainer.config.schema import Config
from trainer.config.settle import plan_of, settle
from trainer.data.contract import Datasets
from trainer.hardware import Hardware
from trainer.run.fit import fit, needed_bytes, rough_bytes


def is_set(overrides: Sequence[str], key: str) -> bool:
    """Return whether the user has set an option, or a group's choice by ``group.mode``."""
    return not {key, f"{key}.mode"}.isdisjoint(map(key_of, overrides))


def fitting(
    config: Config, overrides: Sequence[str], hardware: Hardware, datasets: Datasets
) -> tuple[list[str], list[str]]:
    """Return the overrides with which train.py's default fits into the memory, and what was changed for that.

    Raises:
        OutOfMemory: not even the smallest microbatch is forecast to fit.
    """
    settled = settle(plan_of(config, hardware, datasets=datasets))
    smaller = fit(settled, config.micro_batch_size == "auto")
    if smaller is None:
        return list(overrides), []
    changed = f"{smaller.key}={smaller.value}"
    why = f"every run has {changed}, because train.py's default does not fit into the memory"
    return merge_overrides(overrides, [changed]), [why]


def too_large(overrides: Sequence[str], hardware: Hardware, datasets: Datasets, usable_bytes: float) -> str:
    """Return why a setting is not forecast to fit into the memory; empty: it fits, or cannot be forecast."""
    try:
        config = compose(overrides)
        settled = settle(plan_of(config, hardware, datasets=datasets))
        size_now = settled.batching.micro_batch_size
        rough = rough_bytes(settled.config.recipe, datasets, size_now)
        if rough is None or rough < usable_bytes / 2:
            return ""
        need = needed_bytes(settled, size_now)
    except Exception:  # the run itself reports it
        return ""
    return f"forecast to need {size(need)}, {size(usable_bytes)} can be used" if need > usable_bytes else ""
