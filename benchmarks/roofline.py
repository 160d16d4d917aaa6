"""Where the time of a step goes: products and their rate beside the measured one, and everything else by group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.jobs import Job, gpt2_job, resnet_job, shakespeare
from benchmarks.operators import ATTENTION, PRODUCTS_GROUP, by_group, group
from benchmarks.rows import Bench, Row
from evidence.turns import steps_of, synchronise
from mantissa.formats import BASIC, FORMATS
from trainer.hardware import UNAVAILABLE
from trainer.profiling.flops import attention
from trainer.profiling.profiler import new_profile, operator_times
from trainer.profiling.rates import product_rates
from trainer.trainer import Trainer

OUTSIDE = "Python, autograd and waiting"
"""What is left of a step besides torch's operators; the cost of tracing them is in it."""


def roofline(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the shares of a step and the rate of its products, of each job in each format that is worthwhile here."""
    hardware = bench.hardware
    for job in jobs or (gpt2_job(hardware), resnet_job(hardware), shakespeare(bench.text)):
        for mode in BASIC:
            if hardware.support(mode) == UNAVAILABLE:
                continue
            if (why := bench.left_out(mode)) is None:
                yield from _rows(bench, job, mode)
            else:
                yield Row(f"{job.name} {mode}, rate of its products / measured", "x", [], why)


def _rows(bench: Bench, job: Job, mode: str) -> Iterator[Row]:
    hardware, device = bench.hardware, bench.hardware.device
    bench.report(f"{job.name} {mode}: building")
    options = (f"precision={mode}", "clip=norm")
    trainer = Trainer.from_config(job.config(*options, "steps=1000000", f"device={device}"), hardware)
    take = steps_of(trainer)
    take(2)
    flops = _flops(trainer)
    rate = product_rates(hardware, (FORMATS[mode].number.name,))[FORMATS[mode].number.name]
    shares: dict[str, list[float]] = {}
    fractions: list[float] = []
    seconds: list[float] = []
    for repeat in range(bench.repeats + 1):
        bench.repeat(f"{job.name} {mode}", repeat)
        synchronise(device)
        with new_profile(device) as profile:
            began = time.perf_counter()
            take(1)
            synchronise(device)
            step_us = 1e6 * (time.perf_counter() - began)
        if not repeat:  # the tracer's first step is slow
            continue
        times = by_group(operator_times(profile, device))
        times[OUTSIDE] = max(0.0, step_us - sum(times.values()))
        for name, us in times.items():
            shares.setdefault(name, []).append(100 * us / step_us)
        seconds.append(1e-6 * times[PRODUCTS_GROUP])
        fractions.append(flops[PRODUCTS_GROUP] / seconds[-1] / 1e12 / rate)
    what = f"{job.line(*options)}; in a profiled step"
    how = (
        f"{what}, products of {flops[PRODUCTS_GROUP] / 1e9:.2f} GFLOP take at least {1e3 * min(seconds):.1f} ms; "
        f"square matrices reach {rate:.3g} TFLOP/s here"
    )
    yield Row(f"{job.name} {mode}, rate of its products / measured", "x", fractions, how)
    for name, values in shares.items():
        attention = f"; {flops[ATTENTION] / 1e9:.2f} GFLOP, masked scores included" if name == ATTENTION else ""
        yield Row(f"{job.name} {mode}, share of {name}", "%", values, f"{what}{attention}")


def _flops(trainer: Trainer) -> dict[str, int]:
    """Return the FLOP of a step's products and of its attention, forward and backward, by torch's formulas.

    Attention counts as if it were not causal. It has formulas of its own, because torch 2.11 has none for the CPU's
    kernel and refuses groups of queries.
    """
    counter = FlopCounterMode(display=False)
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        name = f"_scaled_dot_product_{kernel}"
        counter.flop_registry[getattr(torch.ops.aten, name)] = attention
        counter.flop_registry[getattr(torch.ops.aten, f"{name}_backward")] = _attention_backward
    with counter:
        steps_of(trainer)(1)
    totals = {ATTENTION: 0, PRODUCTS_GROUP: 0}
    for operator, count in counter.get_flop_counts()["Global"].items():
        totals[group(str(operator).removeprefix("aten."))] += count
    return totals


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOP of attention's backward pass: the scores again, and two products for each product of forward."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])
