"""The largest microbatch that fits into an amount of memory, found by trials in fresh processes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evidence.memory import trial
from evidence.runs import merge_overrides
from mantissa.display import size
from mantissa.step.memory import available_bytes
from trainer.config.compose import compose
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.hardware import Hardware, detect
from trainer.run.fit import REMEDY
from trainer.run.forecast import forecast, required_bytes

MARGIN = 0.05
"""Part of the memory that is left free."""
_EXACT_BELOW = 32
"""Above, the answer is found to within 1/32 of itself."""
_LARGEST = 2**20
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class LargestBatch:
    """The result of the search."""

    micro_batch_size: int
    """The largest size that fitted; above 32 times ``multiple``, to within 1/32."""
    batch_size: int
    """Number of samples per optimizer step, as the config has it."""
    multiple: int
    """Number that a microbatch has to be a multiple of."""

    @property
    def dividing(self) -> int:
        """The largest that fits and divides ``batch_size``."""
        most = min(self.micro_batch_size, self.batch_size)
        return next(size for size in range(most, 0, -self.multiple) if self.batch_size % size == 0)

    @property
    def overrides(self) -> str:
        """Overrides for the same training in microbatches that fit."""
        return f"micro_batch_size={self.dividing} batch_size={self.batch_size}"


def largest_micro_batch(overrides: Sequence[str], memory_bytes: int) -> LargestBatch:
    """Find the largest ``micro_batch_size`` with which two full optimizer steps fit into memory; print each trial.

    Every trial is a fresh process, in which an allocation beyond it fails (see ``trial.fits``). A step has two
    microbatches where ``batch_size`` has more than one: the second runs with the gradients of the first in memory. The
    whole batch of the run comes first. From there the search goes to the forecast, then up or down in steps that double
    until it has a size that fits and one that does not, and then bisects.

    Args:
        overrides: as for scripts/train.py, without ``micro_batch_size``. Never tried: more samples than the data has.
        memory_bytes: for the model and its training; on a CPU the process itself comes on top.

    Raises:
        UserError: the overrides, or memory in which not even one sample fits.
    """
    limit_bytes = int(memory_bytes * (1 - MARGIN))
    config = compose(overrides)
    plan = plan_of(config, detect(config.device))
    config = plan.config
    batch_size, multiple = plan.batching.batch_size, config.augment.micro_batch_multiple
    samples = len(config.open_datasets().train)

    def sized(size: int) -> list[str]:
        samples_of_step = 2 * size if size < batch_size else size
        return merge_overrides(overrides, [f"micro_batch_size={size}", f"batch_size={samples_of_step}"])

    def fits(multiples: int) -> bool:
        size = multiple * multiples
        fitted = trial.fits(sized(size), limit_bytes)
        of_run = ", the whole batch of the run" if size == batch_size else ""
        beyond = f", beyond batch_size={batch_size}" if size > batch_size else of_run
        print(f"micro_batch_size={size} {'fits' if fitted else 'does not fit'}{beyond}", flush=True)
        return fitted

    most = min(_LARGEST, samples) // multiple
    guess = _first_guess(sized, limit_bytes)
    fitting = multiple * search(fits, min(max(1, batch_size // multiple), most), max(1, guess // multiple), most)
    if not fitting:
        raise UserError(f"not even micro_batch_size={multiple} fits into {size(limit_bytes)}; {REMEDY}")
    return LargestBatch(fitting, batch_size, multiple)


def search(fits: Callable[[int], bool], first: int, guess: int, most: int) -> int:
    """Return the largest number from 1 on that ``fits``, to within 1/32 above 32; 0 if none does.

    Args:
        fits: true up to some number, false above; called once for each.
        first: what is tried first, at most ``most``.
        guess: where the search starts then.
        most: the largest number to try.
    """
    low, high = (first, most + 1) if fits(first) else (0, first)
    size = min(max(guess, low + 1), high - 1)
    stride = max(1, size // 8)
    while high - low > (1 if high > most else max(1, low // _EXACT_BELOW)):
        low, high = (size, high) if fits(size) else (low, size)
        if high > most:
            size = min(most, low + stride)
        elif not low:
            size = max(1, high - stride)
        else:
            size = (low + high) // 2
        stride *= 2
    return low


def _first_guess(sized: Callable[[int], list[str]], limit_bytes: int) -> int:
    # Not for a single sample: batch norm refuses it where its last feature map is one pixel.
    configs = compose(sized(2)), compose(sized(8))
    two, eight = (required_bytes(config, forecast(config)) for config in configs)
    of_sample = max(1.0, (eight - two) / 6)  # the straight line through both
    return math.floor(2 + (limit_bytes - two) / of_sample)


def parse_memory_budget(text: str, hardware: Hardware) -> int:
    """Return the bytes of ``8GiB``, ``500MB`` or ``device`` (all of a GPU; what is free now of a machine's memory).

    Raises:
        UserError: no amount of memory, or more than there is.
    """
    there = hardware.memory_bytes if hardware.is_gpu else available_bytes(hardware.device)
    if text == "device":
        return there
    amount = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT]i?B)", text, re.IGNORECASE)
    if not amount or not float(amount[1]):
        remedy = f"{text}GiB" if text.isdecimal() and 0 < int(text) * 2**30 <= there else "device"
        remedy = f"{text}iB" if re.fullmatch(r"[1-9]\d*[MGT]", text) else remedy
        raise UserError(f"memory_budget={text} is not a size, such as 8GiB", f"memory_budget={remedy}")
    wanted = int(float(amount[1]) * _UNITS[amount[2].upper()])
    if wanted > there:
        held = f"{hardware.name} {'has' if hardware.is_gpu else 'has free now'}, {size(there)}"
        raise UserError(f"memory_budget={text} is more than {held}", "memory_budget=device")
    return wanted
