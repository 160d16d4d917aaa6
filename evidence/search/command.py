"""The command lines of scripts/lr_range.py and scripts/search.py."""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from evidence.search.lr_range import FIRST, Curve, range_test
from evidence.search.lr_report import write_report
from evidence.search.space import Dimension, check_space, parse_space
from trainer.config.compose import combinations, compose
from trainer.config.options import parse
from trainer.config.schema import Config
from trainer.errors import RunError, UserError, nearest
from trainer.files import check_output_dir
from trainer.hardware import detect
from trainer.parallel.world import launched_processes
from trainer.run.folder import RunFolder

PRUNERS = ("median", "hyperband", "none")


@dataclass
class RangeOptions:
    """Of scripts/lr_range.py."""

    min: float = 1e-7
    max: float = 10.0
    steps: int = 100


def lr_range(arguments: list[str]) -> int:
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
        curves.append(range_test(config, hardware, options.min, options.max, label, print))
        print(f"  ended {_ended(curves[-1])}")
    name = first.run_name or (first.name if len(configs) == 1 else first.recipe.name)
    folder = RunFolder.create(f"{first.output_dir}/lr_range", name).path
    title = f"Learning-rate range test: {name}"
    command = shlex.join(["python", "scripts/lr_range.py", *arguments])
    plot = write_report(curves, folder, title, command, hardware)
    print(f"\nplot {plot}")
    for curve in curves:
        _show(curve)
    if not any(curve.suggestions() for curve in curves):
        raise RunError("the loss does not fall within this range: set a larger max, or more steps (steps=300)")
    return 0


def _configs(options: RangeOptions, overrides: list[str]) -> dict[str, Config]:
    for key, value in (("min", options.min), ("max", options.max)):
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{key}={value:g} must be a learning rate above 0, such as {key}={_DEFAULTS[key]:g}")
    if options.min >= options.max:
        raise UserError(f"min={options.min:g} must be below max={options.max:g}")
    if options.steps <= 2 * FIRST:
        raise UserError(f"steps={options.steps} are too few for a curve; use more than {2 * FIRST}, such as steps=100")
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key == "optimizer.lr" or key.partition(".")[0] == "schedule" or key in ("resume", "epochs"):
            raise UserError(f"{override} has no effect: the test sets every rate and steps itself; leave it out")
    if launched_processes():
        raise UserError("the test runs in one process; start it without torchrun")
    configs = {}
    for label, own in combinations([*overrides, f"steps={options.steps}"]).items():
        config = configs[label] = compose(own)
        if config.parallel.kind != "single":
            raise UserError(f"the test runs in one process; leave out parallel={config.parallel.kind}")
        config.resolve(detect(config.device))  # mistakes before any work
    return configs


_DEFAULTS = {"min": RangeOptions.min, "max": RangeOptions.max}


def _ended(curve: Curve) -> str:
    skipped = f", {curve.skipped_steps} steps skipped by the loss scale" if curve.skipped_steps else ""
    return f"after {len(curve.lr)} steps: {curve.ended}{skipped}"


def _show(curve: Curve) -> None:
    print(f"\n{curve.label or 'paste one of'}")
    for reason, lr in curve.suggestions().items():
        print(f"  optimizer.lr={lr:g}  {reason}")
    if not curve.suggestions():
        print("  the loss does not fall")


@dataclass
class SearchOptions:
    """Of scripts/search.py."""

    trials: int = 20
    pruner: str = "median"
    metric: str = "valid/loss"
    study: str = ""


def search(arguments: list[str]) -> int:
    """Search a space, and print its trials and the best of them; the exit code is 1 where no trial was complete.

    Raises:
        UserError: a space that is none, or a mistake of train.py's.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    options, others = parse(arguments, SearchOptions, "overrides")
    given, overrides = parse_space(others)
    if options.pruner not in PRUNERS:
        near = nearest(options.pruner, PRUNERS)
        raise UserError(f"pruner={options.pruner} is not a pruner ({', '.join(PRUNERS)}){near}")
    if launched_processes():
        raise UserError("trials run in one process each; start the command without torchrun, several times for several")
    first = check_space(given, overrides)
    if first.parallel.kind != "single":
        raise UserError(f"trials run in one process each; leave out parallel={first.parallel.kind}")
    return _search(options, given, overrides, first)


def _search(options: SearchOptions, given: list[Dimension], overrides: list[str], first: Config) -> int:
    from evidence.search.mlflow import Parent
    from evidence.search.report import lines
    from evidence.search.search import run_trials
    from evidence.search.study import open_search, pruner_of

    name = options.study or first.name
    if "/" in name or name in (".", ".."):
        raise UserError(f"study={name} must be the name of a folder, without a slash")
    check_output_dir(first.output_dir)
    plan = first.resolve(detect(first.device)).plan
    kept = sorted(
        text for text in overrides if text.partition("=")[0].partition(".")[0] not in ("output_dir", "tracking")
    )
    described = {"space": [str(each) for each in given], "options": kept, "metric": options.metric}
    found = open_search(
        name,
        Path(first.output_dir).expanduser(),
        given,
        described,
        maximise=not first.recipe.falls(options.metric),
        trials=options.trials,
        seed=first.seed,
        pruner=pruner_of(options.pruner, plan.eval_every, plan.steps),
    )
    print(f"study {name}: {len(found.counted())} of {options.trials} trials; runs print to {found.folder}", flush=True)
    shown = {"space": " ".join(described["space"]), "options": " ".join(kept), "metric": options.metric}
    parent = Parent(first, found, shown | {"pruner": options.pruner})
    status = "KILLED"
    try:
        run_trials(found, overrides, options.metric, parent.run_id, lambda line: print(line, flush=True))
        status = "FINISHED"
    finally:
        parent.close(found, options.metric, status)
        if parent.problem:
            print(f"MLflow has not taken the search ({parent.problem}); its trials are in {found.folder.parent.parent}")
    print("\n" + "\n".join(lines(found, options.metric, overrides)))
    return int(not any(trial.state.name == "COMPLETE" for trial in found.counted()))
