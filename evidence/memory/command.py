"""The command lines of scripts/memory.py and scripts/max_batch.py."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

from evidence.memory.max_batch import MARGIN, largest_micro_batch, parse_memory_budget
from mantissa.display import columns
from mantissa.step.ledger import CATEGORIES, MIB, Ledger
from trainer.config.compose import combinations, compose
from trainer.config.options import Overriding, parse
from trainer.hardware import detect
from trainer.run.forecast import forecast


def memory(arguments: list[str]) -> int:
    """Forecast every combination of the overrides, and print a table."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    _, overrides = parse(arguments, Overriding, "overrides")
    configs = {
        label: compose(overrides) for label, overrides in combinations(overrides).items()
    }  # mistakes before any work
    ledgers = {}
    for number, (label, config) in enumerate(configs.items(), 1):
        print(f"forecasting {number} of {len(configs)} …", file=sys.stderr)
        ledgers[label or "forecast"] = forecast(config)
    print("Forecast of an optimizer step, at its peak, of the model without torch.compile:\n")
    print(_table(ledgers))
    return 0


def _table(ledgers: dict[str, Ledger]) -> str:
    """Return a line for each forecast: MiB by category, the peak, its ratio to the first, and where it is reached."""
    first = next(iter(ledgers.values())).peak_bytes
    names = [name for name in CATEGORIES if any(ledger.at_peak[name] for ledger in ledgers.values())]
    rows = [["MiB", *names, "peak", "ratio", "reached in"]]
    for label, ledger in ledgers.items():
        sizes = [f"{size / MIB:.1f}" for size in (*(ledger.at_peak[name] for name in names), ledger.peak_bytes)]
        rows.append([label, *sizes, f"{ledger.peak_bytes / first:.2f}x", ledger.peak_phase])
    return columns(rows)


@dataclass
class MaxBatchOptions(Overriding):
    """Options of scripts/max_batch.py."""

    fixed = dict.fromkeys(("micro_batch_size",), "it is what this command finds")

    memory_budget: str = "device"


def max_batch(arguments: list[str]) -> int:
    """Search for the largest microbatch, and print it with the overrides to paste."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, MaxBatchOptions, "overrides")
    config = compose(overrides)
    config.precision.check_single("the largest batch is found for one format at a time")
    memory_bytes = parse_memory_budget(options.memory_budget, detect(config.device))
    largest = largest_micro_batch(overrides, memory_bytes)
    print(f"\nlargest micro_batch_size in {options.memory_budget}, {MARGIN:.0%} of it left free: ", end="")
    print(
        f"{largest.micro_batch_size}{', as batch_size, too' if largest.micro_batch_size > largest.batch_size else ''}"
    )
    print(f"largest of these that divides batch_size={largest.batch_size}: {largest.dividing}; paste:")
    print(largest.overrides)
    return 0
