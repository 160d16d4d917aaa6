"""The report of a run that ran out of memory: the forecast of its step by category, and what would fit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mantissa.formats import BASIC
from trainer.config.compose import compose
from trainer.errors import OutOfMemory, RunError, UserError
from trainer.hardware import available_bytes, detect
from trainer.profiling.ledger import MIB
from trainer.run.memory.forecast import Forecast, copies_on_device, forecast, required_bytes, size_within, table

USABLE = 0.9
"""Of what is free, since allocators waste some. The failed run needs too much, so what fits must need clearly less."""


def out_of_memory(error: BaseException, overrides: Sequence[str]) -> OutOfMemory:
    """Return the error to report in the place of ``error``, which the allocator raised.

    Call it when the run is gone: what is free then is what a new one would find.
    """
    words = _first_words(error)
    try:
        return OutOfMemory(f"out of memory ({words})\n{_advice(overrides)}")
    except Exception:  # no forecast for this model, several processes, or not enough memory for a forecast
        remedies = "half the micro_batch_size, activation_checkpointing=blocks or precision=bf16"
        return OutOfMemory(f"out of memory ({words}); try {remedies}")


def _first_words(error: BaseException) -> str:
    text = str(error)
    if found := re.search(r"tried to allocate (\d+) bytes", text):  # the CPU's, between file names and error codes
        return f"tried to allocate {int(found[1]) / MIB:.1f} MiB"
    return text.splitlines()[0] if text else type(error).__name__


def _advice(overrides: Sequence[str]) -> str:
    typed = _Need("this run", overrides)
    usable = min(USABLE * available_bytes(detect(typed.config.device).device), USABLE * typed.bytes)
    divides = typed.batching.micro_batch_size > typed.config.augment.micro_batch_multiple
    remedies = [_smaller(typed, overrides, usable)] if divides else []
    if typed.config.activation_checkpointing.mode == "none":
        remedies.append("activation_checkpointing=blocks")
    if typed.config.precision.format.half is None:
        remedies.append("precision=bf16")
    tried = [need for need in (_need(remedy, overrides) for remedy in remedies) if need is not None]
    fitting = [need for need in tried if need.bytes <= usable]
    if not fitting and len(tried) > 1:
        tried.append(_Need(" ".join(need.label for need in tried), overrides))
        fitting = [need for need in tried[-1:] if need.bytes <= usable]
    columns = [Forecast(need.label, need.ledger) for need in [typed, *tried]]
    free = f"the {usable / MIB:.0f} MiB that are available"
    if fitting:
        lines = [f"Forecast to fit into {free}:", *(f"  {need.label}" for need in fitting)]
    else:
        lines = [f"None of these is forecast to fit into {free}; train a smaller model."]
    return "\n".join(["forecast peak memory of this step and of smaller alternatives:\n", table(columns), "", *lines])


def advice(overrides: Sequence[str], usable: float) -> str:
    """Return which overrides are forecast to fit into ``usable`` bytes, where microbatches of one sample do not.

    First what leaves the model as it is, all of it together; then the largest smaller model of the recipe.
    """
    found = []
    try:
        typed = compose(overrides)
        more = ["checkpoint.background=false"] if copies_on_device(typed) else []
        more += ["activation_checkpointing=blocks"] if typed.activation_checkpointing.mode == "none" else []
        precisions = ["bf16_master", "bf16_sr"] if typed.precision.mode in BASIC else []
        options = [" ".join(["micro_batch_size=1", *more, f"precision={mode}"]) for mode in precisions]
        recipe = typed.resolve(detect(typed.device)).config.recipe
        for candidates in (options, [f"{smaller} micro_batch_size=1" for smaller in recipe.smaller()]):
            found += next(([label] for label in candidates if _fits(label, overrides, usable)), [])
    except RunError:  # several processes, for which there is no forecast
        pass
    if not found:
        return "To need less, try a smaller model, activation_checkpointing=blocks, precision=bf16_master or bf16_sr."
    return "\n".join(["Forecast to fit:", *(f"  {label}" for label in found)])


def _fits(label: str, overrides: Sequence[str], usable: float) -> bool:
    need = _need(label, overrides)
    return need is not None and need.bytes <= usable


class _Need:
    """A forecast of the run with one more override, or several."""

    def __init__(self, label: str, overrides: Sequence[str]) -> None:
        more = label.split() if "=" in label else []
        self.label = label
        changed = {override.partition("=")[0] for override in more}
        self.config = compose([*(each for each in overrides if each.partition("=")[0] not in changed), *more])
        self.ledger = forecast(self.config)
        self.bytes = required_bytes(self.config, self.ledger)
        self.batching = self.config.resolve(detect(self.config.device)).plan.batching


def _need(remedy: str, overrides: Sequence[str]) -> _Need | None:
    try:
        return _Need(remedy, overrides)
    except UserError:  # this recipe, or this hardware, does not have it
        return None


def _smaller(typed: _Need, overrides: Sequence[str], usable: float) -> str:
    """Return the largest microbatch that a straight line through two forecasts says will fit, the batch unchanged."""
    least, size = typed.config.augment.micro_batch_multiple, typed.batching.micro_batch_size
    sizes = [smaller for smaller in range(least, size, least) if typed.batching.batch_size % smaller == 0]
    half = _Need(f"micro_batch_size={sizes[-1]}", overrides)
    most = size_within(usable, (sizes[-1], half.bytes), (size, typed.bytes))
    return f"micro_batch_size={max((size for size in sizes if size <= most), default=least)}"
