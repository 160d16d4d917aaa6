"""Measure one thing without a training run: ``python benchmarks/probe.py gemm size=4096 precision=bf16``.

  gemm         one square matmul, its speed and its error
    size=4096  precision=fp32, tf32, bf16 or fp16  repeats=10  rows=64 (that are compared with fp64)
  clip_order   what clip_grad_norm_ sees before and after unscale_, in a plain loop with torch's scaler
    order=after or before  max_norm=1  scale=65536
  max_batch    the largest batch that trains within a budget of memory, in one microbatch
    budget=1GiB  by=trials or forecast
All take device=auto, seed=0, output_dir=outputs and run_name; clip_order and max_batch also what train.py takes.
Exit code: 0, 1 when the measurement fails, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from evidence.turns import stopwatch
from trainer.config.compose import compose
from trainer.config.options import parse, run
from trainer.errors import UserError, nearest
from trainer.files import write_json
from trainer.hardware import Hardware, detect
from trainer.precision import kernels
from trainer.precision.modes import Precision

_BLOCK_S = 5e-3
"""Products are timed in blocks of at least this."""
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Probe:
    """What all probes take."""

    takes_overrides: ClassVar[bool] = True
    """Whether train.py's overrides say what is measured."""
    not_timed = ""
    """Why its times are not those of its format, see ``kernels.not_timed``; empty: they are."""
    device: str = "auto"
    seed: int = 0
    output_dir: Path = Path("outputs")
    run_name: str = ""
    """Of the folder below ``output_dir`` (default: the probe's name)."""

    def measure(self, hardware: Hardware, overrides: list[str]) -> dict[str, float]:
        """Return what was measured, by name."""
        raise NotImplementedError


@dataclass
class Gemm(Probe):
    """``gemm``: one square matmul, its speed and its error.

    Measures ``tflops`` (10^12 floating-point operations a second, the median of ``repeats`` blocks) and ``error``
    (the largest difference from fp64, relative to the largest element, over the first ``rows`` rows).
    """

    takes_overrides = False
    size: int = 4096
    precision: str = "fp32"
    repeats: int = 10
    rows: int = 64

    def measure(self, hardware: Hardware, overrides: list[str]) -> dict[str, float]:
        """Multiply, and compare ``rows`` rows with fp64."""
        if self.precision not in _DTYPES:
            raise UserError(f"precision={self.precision} is not one of {', '.join(_DTYPES)}")
        precision = Precision(mode=self.precision)
        precision.check(hardware)
        forms = precision.in_fp32_arithmetic(hardware)
        precision.apply(forms)
        self.not_timed = kernels.not_timed(precision.mode, forms, hardware) or ""
        generator = torch.Generator().manual_seed(self.seed)
        a, b = (torch.randn(self.size, self.size, generator=generator) for _ in range(2))
        exact = a[: self.rows].double() @ b.double()
        left, right = (matrix.to(hardware.device, _DTYPES[self.precision]) for matrix in (a, b))
        product = left @ right

        def products(count: int) -> None:
            for _ in range(count):
                torch.mm(left, right)

        multiply = stopwatch(products, hardware.device)
        count = 1
        while multiply(count) < _BLOCK_S:  # the start of a product is to count little
            count *= 2
        seconds = sorted(multiply(count) / count for _ in range(self.repeats))
        error = (product[: self.rows].cpu().double() - exact).abs().max() / exact.abs().max()
        return {"tflops": 2 * self.size**3 / seconds[len(seconds) // 2] / 1e12, "error": error.item()}


@dataclass
class ClipOrder(Probe):
    """``clip_order``: what clip_grad_norm_ sees before and after ``unscale_``, in a plain loop with torch's scaler.

    Takes train.py's overrides for the model, the data and the precision, and uses one step's first microbatch.
    Measures ``grad_norm`` (what clip_grad_norm_ returns) and ``update_norm`` (the norm of the clipped, unscaled
    gradients). Without a scaler (fp32, bf16) both orders are the same.
    """

    order: str = "after"
    """``before`` or ``after`` unscale_."""
    max_norm: float = 1.0
    scale: float = 65536.0

    def measure(self, hardware: Hardware, overrides: list[str]) -> dict[str, float]:
        """Take the gradients of one microbatch, clip them in that order, unscale them."""
        from trainer.data.loader import to_device
        from trainer.trainer import Trainer

        if self.order not in ("before", "after"):
            raise UserError(f"order={self.order} is neither before nor after")
        trainer = Trainer.from_config(compose([*overrides, f"seed={self.seed}"]), hardware)
        config = trainer.config
        batch = to_device(next(trainer.batches())[0], hardware.device)
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
        scaled = config.precision.mode == "fp16"
        scaler = torch.amp.GradScaler(hardware.device.type, init_scale=self.scale, enabled=scaled)
        with config.precision.autocast(hardware.device):
            loss = config.recipe.loss(trainer.model, batch).loss_sum / config.recipe.count_targets(batch)
        scaler.scale(loss).backward()
        parameters = list(trainer.model.parameters())
        if self.order == "after":
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        if self.order == "before":
            scaler.unscale_(optimizer)
        gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return {"grad_norm": norm.item(), "update_norm": torch.nn.utils.get_total_norm(gradients).item()}


@dataclass
class MaxBatch(Probe):
    """``max_batch``: the largest batch that trains within a budget of memory, in one microbatch.

    Takes train.py's overrides. Measures ``largest_batch`` and, by forecast, ``mib_per_sample`` and ``fixed_mib``: the
    slope and the intercept of the straight line through batches of 4 and 8.
    """

    budget: str = "1GiB"
    by: str = "trials"
    """``trials`` in fresh processes, or ``forecast``: where that line reaches the budget."""

    def measure(self, hardware: Hardware, overrides: list[str]) -> dict[str, float]:
        """Search by trials, or compute it from the forecast."""
        from evidence.memory.max_batch import MARGIN, largest_micro_batch, parse_budget
        from mantissa.ledger import MIB
        from trainer.run.memory.forecast import forecast

        if self.by not in ("trials", "forecast"):
            raise UserError(f"by={self.by} is neither trials nor forecast")
        budget = parse_budget(self.budget, hardware)
        four, eight = (
            forecast(compose([*overrides, f"batch_size={size}", f"micro_batch_size={size}"])).peak_bytes / MIB
            for size in (4, 8)
        )
        each = (eight - four) / 4
        fixed = eight - 8 * each
        if self.by == "forecast":
            largest = int((budget * (1 - MARGIN) / MIB - fixed) / each)
        else:
            # Otherwise small freed blocks that glibc keeps would count, too.
            os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")
            largest = largest_micro_batch([*overrides, "batch_size=1"], budget).micro_batch_size
        return {"largest_batch": largest, "mib_per_sample": each, "fixed_mib": fixed}


PROBES: dict[str, type[Probe]] = {"gemm": Gemm, "clip_order": ClipOrder, "max_batch": MaxBatch}


def main(arguments: list[str]) -> int:
    """Measure, and print the summary."""
    print(measure(arguments).read_text(encoding="utf-8"))
    return 0


def measure(arguments: list[str]) -> Path:
    """Run ``<probe> key=value …`` and write ``<output_dir>/<run_name>/summary.json``, and return its path.

    Raises:
        UserError: no such probe or option, or a measurement that is not a number.
    """
    name, *rest = arguments or [""]
    if name not in PROBES:
        raise UserError(f"{name or 'nothing'} is not a probe{nearest(name, PROBES)} ({', '.join(PROBES)})")
    probe, overrides = parse(rest, PROBES[name], "overrides" if PROBES[name].takes_overrides else "none")
    hardware = detect(probe.device)
    began = time.monotonic()
    measures = probe.measure(hardware, overrides)
    if wrong := [key for key, value in measures.items() if not math.isfinite(value)]:
        raise UserError(f"{name} measured no number for {wrong[0]}: {measures[wrong[0]]}")
    folder = probe.output_dir / (probe.run_name or name)
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {
        "status": "FINISHED",
        "probe": name,
        "measures": measures,
        "wall_time_s": time.monotonic() - began,
        "fp32_arithmetic": probe.not_timed or None,
        "hardware": hardware.facts(),
    }
    write_json(folder / "summary.json", summary)
    return folder / "summary.json"


if __name__ == "__main__":
    sys.exit(run(main, __doc__))
