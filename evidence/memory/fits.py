"""Which candidates fit into the memory, by forecast, and the default that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evidence.runs import merged
from mantissa.display import size
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.data.contract import Datasets
from trainer.errors import OutOfMemory, UserError
from trainer.hardware import Hardware, available_bytes
from trainer.parallel.activation import MODES as CHECKPOINTING
from trainer.parallel.world import World
from trainer.run.memory.fit import USABLE, fit_plan, rough_bytes
from trainer.run.memory.forecast import forecast, required_bytes


def given(overrides: Sequence[str], *keys: str) -> bool:
    """Return whether the user has set one of these options, or a group's choice by ``group.mode``."""
    typed = {override.lstrip("+~").partition("=")[0] for override in overrides}
    return bool(typed & {*keys, *(f"{key}.mode" for key in keys)})


def fitting(
    config: Config, overrides: Sequence[str], hardware: Hardware, datasets: Datasets
) -> tuple[list[str], list[str]]:
    """Return the overrides with which train.py's default fits into the memory, and what was changed for that."""
    trials: list[list[str]] = [[]]
    if not given(overrides, "activation_checkpointing"):
        trials += [[f"activation_checkpointing={mode}"] for mode in CHECKPOINTING[:0:-1]]
    first: OutOfMemory | None = None
    for more in trials:
        try:
            tried = merged(overrides, more)
            composed = compose(tried) if more else config
            resolved = composed.resolve(hardware)
            fitted = fit_plan(composed, resolved, hardware, World(), datasets, tried)
        except OutOfMemory as error:
            first = first or error
            continue
        except UserError:  # a recipe without blocks
            continue
        needed, auto = (each.plan.batching.micro_batch_size for each in (fitted, resolved))
        pinned = [f"micro_batch_size={needed}"] * (needed != auto)
        changed = [*more, *pinned]
        why = f"every candidate has {' '.join(changed)}, because train.py's default does not fit into the memory"
        return merged(overrides, changed), [why] * bool(changed)
    assert first is not None
    raise first


@dataclass
class Fits:
    """Says why a setting is not forecast to fit into the memory."""

    overrides: list[str]
    hardware: Hardware
    datasets: Datasets

    def __post_init__(self) -> None:
        self.usable = int(USABLE * available_bytes(self.hardware.device))
        self._known: dict[tuple[str, ...], str | None] = {}

    def __call__(self, more: Sequence[str]) -> str | None:
        """Return the reason against these further overrides; None: it fits, or cannot be forecast."""
        # Compiled, a model needs no more than eager.
        key = tuple(override for override in more if not override.startswith("compile="))
        if key not in self._known:
            self._known[key] = self._reason(list(key))
        return self._known[key]

    def _reason(self, overrides: list[str]) -> str | None:
        try:
            config = compose(merged(self.overrides, overrides))
            resolved = config.resolve(self.hardware)
            rough = rough_bytes(resolved.config.recipe, self.datasets, resolved.plan.batching.micro_batch_size)
            if rough is None or rough < self.usable / 2:
                return None
            config = replace(config, micro_batch_size=resolved.plan.batching.micro_batch_size)
            need = required_bytes(config, forecast(config))
        except Exception:  # the run itself reports it
            return None
        return f"forecast to need {size(need)}, {size(self.usable)} can be used" if need > self.usable else None
