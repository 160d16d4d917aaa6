"""Whether autocast pays on a CPU: what its casts cost beside what faster matmuls save; in a small model it does not."""

from __future__ import annotations

import time
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from mantissa.display import quantity
from mantissa.formats import FP32
from trainer.hardware import threads
from trainer.precision.modes import Precision


def slower_than_fp32(model: nn.Module, precision: Precision, flop: float, rates: dict[str, float]) -> str | None:
    """Return why a microbatch of so many FLOP may take as long as in fp32 on this CPU, or longer; None: it should not.

    By the ``rates`` of matmuls, eager. Not counted: casts of activations by their size, and what else 16 bits change.
    """
    dtype, name = precision.format.autocast, precision.format.number.name
    if dtype is None:
        return None
    saved = flop / 1e9 * (1 / rates[FP32.name] - 1 / rates[name])
    if saved <= 0:
        return f"its {name} matmuls are not faster"
    if saved > 10 or saved > (added := casts_ms(model, dtype)):  # of a large model nothing is timed
        return None
    return f"in a microbatch {name} matmuls save {quantity(saved)} ms, and casts add {quantity(added)} ms"


def casts_ms(model: nn.Module, dtype: torch.dtype) -> float:
    """Return the milliseconds that autocast adds to a training pass: its casts, and the calls of 16-bit kernels.

    Each weight counts as a linear layer's, in which so few rows take no time. Of each shape one is timed, on one thread
    and by CPU time, so that other processes matter little.
    """
    added = 0.0
    weights = [weight for weight in model.parameters() if weight.ndim > 1]
    for (rows, columns), count in Counter((len(each), each.numel() // len(each)) for each in weights).items():
        x, weight = (torch.ones(size, columns, requires_grad=True) for size in (8, rows))
        seconds = []
        for enabled in (False, True, False, True):  # the first two are a warm-up
            began = time.thread_time()
            with threads(1), torch.autocast("cpu", dtype, enabled):
                F.linear(x, weight).sum().backward()
            seconds.append(time.thread_time() - began)
        added += 1e3 * count * max(0.0, seconds[3] - seconds[2])
    return added
