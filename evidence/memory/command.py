"""The command lines of scripts/memory.py and scripts/max_batch.py."""

from __future__ import annotations

import logging

from evidence.memory.max_batch import largest_micro_batch, parse_budget, parse_margin
from evidence.memory.trial import trial
from evidence.options import MaxBatchOptions, MemoryOptions
from trainer.config.compose import combinations, compose
from trainer.config.options import parse
from trainer.hardware import detect
from trainer.run.memory.forecast import Forecast, forecast, table


def memory(arguments: list[str]) -> int:
    """Forecast every combination of the overrides, measure it too where ``check=true``, and print a table."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, MemoryOptions, "overrides")
    combined = combinations(overrides)
    configs = {label: compose(own) for label, own in combined.items()}  # mistakes before any work
    columns = [Forecast(label or "forecast", forecast(config)) for label, config in configs.items()]
    if options.check:
        for column, own in zip(columns, combined.values(), strict=True):
            column.measured_bytes = trial([*own, "compile.mode=off"], ledger=True).peak_bytes
    print("Forecast of an optimizer step, at its peak, of the model without torch.compile:\n")
    print(table(columns))
    return 0


def max_batch(arguments: list[str]) -> int:
    """Search for the largest microbatch, and print it with the overrides to paste."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, MaxBatchOptions, "overrides")
    margin = parse_margin(options.margin)
    budget_bytes = parse_budget(options.budget, detect(compose(overrides).device))
    found = largest_micro_batch(overrides, budget_bytes, margin, print)
    print(f"\nlargest micro_batch_size in {options.budget}, {options.margin} of it left free: ", end="")
    print(f"{found.micro_batch_size} ({found.trials} trials)")
    print(f"largest of these that divides batch_size={found.batch_size}: {found.dividing}; paste:")
    print(found.overrides)
    return 0
