"""What the machine can do: versions, the rates of matrix products by format, the rate of copies."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from evidence.bench.turns import stopwatch
from trainer.config.options import parse, run
from trainer.files import write_json
from trainer.hardware import Hardware, detect
from trainer.profiling.rates import product_rates
from trainer.run.provenance import versions

_GPU_BYTES, _CPU_BYTES = 2**32, 2**26


@dataclass
class RatesOptions:
    """Of the command line."""

    device: str = "auto"
    json: Path = Path("rates.json")


def main(arguments: list[str]) -> int:
    """Measure, print and write the rates."""
    options, _ = parse(arguments, RatesOptions)
    hardware = detect(options.device)
    found = {
        "hardware": hardware.facts(),
        "versions": versions(),
        "product_tflops": product_rates(hardware),
        "copy_gb_per_s": copy_rate(hardware),
    }
    print(json.dumps(found, indent=1))
    write_json(options.json, found)
    return 0


def copy_rate(hardware: Hardware) -> float:
    """Return the rate of copies within the device's memory, in 10^9 bytes a second, read and written."""
    count = _GPU_BYTES if hardware.is_gpu else _CPU_BYTES
    source = torch.ones(count, dtype=torch.uint8, device=hardware.device)
    target = torch.empty_like(source)
    copy = stopwatch(lambda _: target.copy_(source), hardware.device)
    copy(1)
    return 2 * count / min(copy(1) for _ in range(5)) / 1e9


if __name__ == "__main__":
    sys.exit(run(main, __doc__, sys.argv[1:]))
