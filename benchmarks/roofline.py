"""Where the time of a step goes: matmuls and their rate beside the measured one, and everything else by group."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from torch.utils.flop_counter import FlopCounterMode

from benchmarks.jobs import Job, gpt2_job, resnet_job, shakespeare
from benchmarks.rows import ENDLESS, Bench, Row
from evidence.turns import steps_of
from mantissa.formats import BASIC, FORMATS
from trainer.devices import synchronise
from trainer.hardware import UNAVAILABLE
from trainer.profiling.profiler import new_profile, operator_times
from trainer.profiling.rates import product_rates
from trainer.trainer import Trainer

ATTENTION, MATMULS = "fused attention", "matmuls"
ELEMENTWISE = "element-wise operators and the rest"
GROUPS = {
    ATTENTION: re.compile(r"attention"),
    MATMULS: re.compile(r"(mm|linear|conv\w*)(_backward)?$|convolution|mm_|scaled_mm"),
    "normalisation": re.compile(r"(layer|batch|group|instance|rms)_norm"),
    "optimizer and clipping": re.compile(r"_fused_(adam|sgd)|_foreach_|linalg_vector_norm|addcdiv_|addcmul_|lerp_"),
    "copies, casts and views": re.compile(
        r"copy|^to$|clone|contiguous|^cat$|^stack$|fill_|zero|empty|ones|as_strided|view|reshape|transpose|^t$|permute"
        r"|narrow|slice|select|split|chunk|expand|detach|unsqueeze|squeeze|flatten|arange|^result_type$"
    ),
    "reductions, softmax and losses": re.compile(
        r"softmax|nll_loss|cross_entropy|^sum|^mean|^norm|max|min|argmax|pool"
    ),
}
"""Groups by what their names contain; the first that fits counts. All others are ``ELEMENTWISE``."""
OUTSIDE = "Python, autograd and waiting"
"""What is left of a step besides torch's operators; the cost of tracing them is in it."""


def roofline(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the shares of a step and the rate of its matmuls, of each job in each format that is worthwhile here."""
    hardware = bench.hardware
    for job in jobs or (gpt2_job(hardware), resnet_job(hardware), shakespeare(bench.text)):
        for mode in BASIC:
            if hardware.support(mode) == UNAVAILABLE:
                continue
            if (why := bench.left_out(mode)) is None:
                yield from _rows(bench, job, mode)
            else:
                yield Row(f"{job.name} {mode}, rate of its matmuls / measured", "x", [], why)


def _rows(bench: Bench, job: Job, mode: str) -> Iterator[Row]:
    hardware, device = bench.hardware, bench.hardware.device
    options = (f"precision={mode}", "clip=norm")
    trainer = Trainer.from_config(job.config(*options, ENDLESS, f"device={device}"), hardware)
    take = steps_of(trainer)
    take(2)
    flop = _flop_of_matmuls(trainer)
    rate = product_rates(hardware, (FORMATS[mode].number.name,))[FORMATS[mode].number.name]
    shares: dict[str, list[float]] = {}
    fractions: list[float] = []
    seconds: list[float] = []
    for repeat in range(bench.repeats + 1):
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
        seconds.append(1e-6 * times[MATMULS])
        fractions.append(flop / seconds[-1] / 1e12 / rate)
    what = f"{job.line(*options)}; in a profiled step"
    how = (
        f"{what}, matmuls of {flop / 1e9:.2f} GFLOP take at least {1e3 * min(seconds):.1f} ms; "
        f"square matrices reach {rate:.3g} TFLOP/s here"
    )
    yield Row(f"{job.name} {mode}, rate of its matmuls / measured", "x", fractions, how)
    for name, values in shares.items():
        yield Row(f"{job.name} {mode}, share of {name}", "%", values, what)


def group(name: str) -> str:
    """Return the group of an operator, such as ``aten::addmm``."""
    short = name.removeprefix("aten::")
    return next((title for title, pattern in GROUPS.items() if pattern.search(short)), ELEMENTWISE)


def by_group(times: dict[str, float]) -> dict[str, float]:
    """Return the times of operators added up by group; groups without any have 0."""
    totals = dict.fromkeys((*GROUPS, ELEMENTWISE), 0.0)
    for name, us in times.items():
        totals[group(name)] += us
    return totals


def _flop_of_matmuls(trainer: Trainer) -> int:
    """Return the FLOP of a step's matmuls, forward and backward, by torch's formulas."""
    with FlopCounterMode(display=False) as counter:
        steps_of(trainer)(1)
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operator, count in counts.items() if group(str(operator).removeprefix("aten.")) == MATMULS)
