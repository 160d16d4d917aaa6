"""The space of a search, in Hydra's grammar: ``space.KEY=interval(0,1)``."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from trainer.config.compose import check_single, compose, key_of
from trainer.config.explain import types_of
from trainer.config.options import ONE_PROCESS, Overriding
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.errors import UserError, check_choice, check_folder_name, first_line
from trainer.hardware import detect

PREFIX = "space."
Space = dict[str, BaseDistribution]
"""What each option may be, by its key, such as ``optimizer.lr``."""
_EXAMPLE = f'"{PREFIX}optimizer.lr=tag(log,interval(1e-4,1e-2))"'
"""In the quotes that a shell needs."""
_NOT_SEARCHED = ("output_dir", "parallel", "tracking", "checkpoint", "device", "resume", "run_name")
"""Keys, and groups, that are no options of a model or its training."""


@dataclass
class SearchOptions(Overriding):
    """Options of scripts/search.py."""

    fixed = ONE_PROCESS | dict.fromkeys(("resume", "run_name", "checkpoint.best"), "the search sets it for every run")

    trials: int = 20
    pruner: str = "median"
    metric: str = "valid/loss"
    study: str = ""

    def __post_init__(self) -> None:
        check_choice("pruner", self.pruner, ("median", "none"))
        check_folder_name("study", self.study)


def shown(value: Any) -> str:
    """Return a proposed value as it is typed: numbers with four digits, so that they can be pasted."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def overrides_of(params: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a proposal."""
    return [f"{key}={shown(value)}" for key, value in params.items()]


def parse_space(arguments: Sequence[str]) -> tuple[Space, list[str]]:
    """Return the space on a command line, and its other arguments.

    Raises:
        UserError: there is no space, or a part of it is not one.
    """
    space: Space = {}
    others = []
    for argument in arguments:
        if argument.startswith(PREFIX):
            key, distribution = _dimension(argument)
            space[key] = distribution
        else:
            others.append(argument)
    if not space:
        raise UserError(f"there is nothing to search; give a space, such as {_EXAMPLE}")
    for other in others:
        key = key_of(other)
        if key in space:
            raise UserError(f"{other} sets what is searched ({PREFIX}{key})", "", mistake=other)
    return space, others


def check_space(space: Space, overrides: list[str]) -> Config:
    """Compose a space's ends and choices, one dimension after the other; return the config of all first ones.

    Raises:
        UserError: train.py would refuse one of them.
    """
    check_single(overrides, f"search them, as in {PREFIX}precision=choice(fp32,bf16)")
    ends = {
        key: among.choices if isinstance(among, CategoricalDistribution) else (among.low, among.high)
        for key, among in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    others = [first | {key: value} for key, values in ends.items() for value in values[1:]]
    try:
        configs = [compose([*overrides, *overrides_of(params)]) for params in (first, *others)]
    except UserError as error:  # whose remedy may set what is searched
        raise UserError(error.problem) from error
    for config in configs:
        plan_of(config, detect(config.device))
    return configs[0]


def _dimension(argument: str) -> tuple[str, BaseDistribution]:
    """Return the key of an argument, and what it may be."""
    try:
        override = OverridesParser.create().parse_override(argument.removeprefix(PREFIX))
        distribution = _distribution(override)
    except (HydraException, ValueError) as error:
        why = first_line(error).rpartition("': ")[2].rstrip(".")  # after "… while evaluating 'log(1,2)': "
        forms = "interval(low,high), int(interval(low,high)), range(low,high,step) or choice(a,b)"
        raise UserError(f"{argument} is not a search space ({why}); write {_EXAMPLE}, or {forms}") from None
    if isinstance(distribution, FloatDistribution) and "int" in " ".join(types_of(override.key_or_group)):
        key, _, text = argument.partition("=")
        raise UserError(f"{argument}: it is a whole number", shlex.quote(f"{key}=int({text})"), mistake=argument)
    if override.key_or_group.partition(".")[0] in _NOT_SEARCHED:
        key = override.key_or_group
        raise UserError(f"{argument}: {key} is not an option of the training; search another one, such as {_EXAMPLE}")
    return override.get_key_element(), distribution


def _distribution(override: Override) -> BaseDistribution:
    """Return what a sweep may be; unlike Hydra's, a range has its end in it, where the steps reach it.

    Raises:
        ValueError: it is one value, or numbers that are not a range; or several without ``choice``, as in ``int(1,8)``.
    """
    step = None
    match sweep := override.value():
        case ChoiceSweep(simple_form=False, shuffle=False):
            return CategoricalDistribution(tuple(override.sweep_string_iterator()))
        case IntervalSweep(start=low, end=high):
            pass
        case RangeSweep(start=low, stop=high, step=step, shuffle=False):
            pass
        case _:
            raise ValueError("neither an interval, a range nor a choice")
    log = "log" in sweep.tags
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the last step may end before ``high``
        if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
            numbers: BaseDistribution = IntDistribution(low, high, log, 1 if step is None else step)
        else:
            numbers = FloatDistribution(low, high, log, step)
    if numbers.single():
        raise ValueError("it has one value")
    return numbers
