"""The command line of scripts/lr_range.py."""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import dataclass

from evidence.search.lr_range import FIRST, range_test
from evidence.search.lr_report import write_report
from trainer.config.compose import combinations, compose, key_of
from trainer.config.options import parse
from trainer.config.schema import Config
from trainer.errors import RunError, UserError
from trainer.hardware import detect
from trainer.parallel.world import launched_processes
from trainer.run_folder import RunFolder


@dataclass
class RangeOptions:
    """Of scripts/lr_range.py."""

    min: float = 1e-7
    max: float = 10.0
    steps: int = 100


def main(arguments: list[str]) -> int:
    """Run the test for every combination of the overrides, and print what to paste.

    Raises:
        UserError: a range that is none, an option that the test sets itself, or a mistake of train.py's.
        RunError: nothing can be suggested.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, overrides = parse(arguments, RangeOptions, "overrides")
    configs = _configs(options, overrides)
    first = next(iter(configs.values()))
    hardware = detect(first.device)
    curves = []
    for label, config in configs.items():
        print(f"{label or config.name}: {options.steps} steps, lr from {options.min:g} to {options.max:g}")
        curve = range_test(config, hardware, options.min, options.max, label, print)
        skipped = f", {curve.skipped_steps} steps skipped by the loss scale" if curve.skipped_steps else ""
        print(f"  ended after {len(curve.lr)} steps: {curve.ended}{skipped}")
        curves.append(curve)
    name = first.run_name or (first.name if len(configs) == 1 else first.recipe.name)
    folder = RunFolder.create(f"{first.output_dir}/lr_range", name).path
    command = shlex.join(["python", "scripts/lr_range.py", *arguments])
    plot = write_report(curves, folder, f"Learning-rate range test: {name}", command, hardware)
    print(f"\nplot {plot}")
    for curve in curves:
        print(f"\n{curve.label or 'paste one of'}")
        for reason, lr in curve.suggestions().items():
            print(f"  optimizer.lr={lr:g}  {reason}")
        if not curve.suggestions():
            print("  the loss does not fall")
    if not any(curve.suggestions() for curve in curves):
        raise RunError("the loss does not fall within this range: set a larger max, or more steps (steps=300)")
    return 0


def _configs(options: RangeOptions, overrides: list[str]) -> dict[str, Config]:
    """Return the configs of the tests by their labels; mistakes are found before any work."""
    if not 0 < options.min < options.max < math.inf:
        raise UserError(
            f"min={options.min:g} and max={options.max:g} must be learning rates above 0, min the lower one, such as "
            f"min={RangeOptions.min:g} max={RangeOptions.max:g}"
        )
    if options.steps <= 2 * FIRST:
        raise UserError(f"steps={options.steps} are too few for a curve; use more than {2 * FIRST}, such as steps=100")
    for override in overrides:
        key = key_of(override)
        if key == "optimizer.lr" or key.partition(".")[0] == "schedule" or key in ("resume", "epochs"):
            raise UserError(f"{override} has no effect: the test sets every rate and steps itself; leave it out")
    if launched_processes():
        raise UserError("the test runs in one process; start it without torchrun")
    configs = {}
    for label, own in combinations([*overrides, f"steps={options.steps}"]).items():
        config = configs[label] = compose(own)
        if config.parallel.kind != "single":
            raise UserError(f"the test runs in one process; leave out parallel={config.parallel.kind}")
        config.resolve(detect(config.device))
    return configs
