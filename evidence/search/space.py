"""The space of a search: ``space.KEY=log(1e-4,1e-2)``, ``uniform(…)``, ``int(…)`` or ``choice(…)``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from trainer.config.compose import check_single, compose, key_of
from trainer.config.options import ONE_PROCESS, Overriding
from trainer.config.text import unquoted
from trainer.errors import UserError, check_choice, check_folder_name

if TYPE_CHECKING:
    from trainer.config.schema import Config

PREFIX = "space."
Space = dict[str, BaseDistribution]
"""What each option may be, by its key, such as ``optimizer.lr``."""
_KINDS = {
    "log": lambda low, high: FloatDistribution(float(low), float(high), log=True),
    "uniform": lambda low, high: FloatDistribution(float(low), float(high)),
    "int": lambda low, high: IntDistribution(int(low), int(high)),
    "choice": lambda *values: CategoricalDistribution(values),
}
_EXAMPLE = "space.optimizer.lr=log(1e-4,1e-2)"
_NOT_SEARCHED = ("output_dir", "parallel", "tracking", "checkpoint", "device", "resume", "run_name")
"""Keys, and groups, that are no options of a model or its training."""
_ITEM = re.compile(r"(?:[^,()\[\]{}]|\[[^\]]*\]|\{[^}]*\}|\([^)]*\))+")
"""What commas separate, outside of brackets."""


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
        UserError: there is no space, or a part of it is none.
    """
    space: Space = {}
    others = []
    for argument in arguments:
        if argument.startswith(PREFIX):
            key, _, text = argument.removeprefix(PREFIX).partition("=")
            space[key] = _distribution(argument, key, unquoted(text))
        else:
            others.append(argument)
    if not space:
        raise UserError(f'there is nothing to search; give a space, such as "{_EXAMPLE}"')
    for other in others:
        key = key_of(other)
        if key in space:
            raise UserError(f"{key} is searched and set ({other}); remove one of them")
    return space, others


def check_space(space: Space, overrides: list[str]) -> Config:
    """Compose a space's ends and choices, one dimension after the other; return the config of all first ones.

    Raises:
        UserError: train.py would refuse one of them.
    """
    check_single(overrides, f"search them, as in {PREFIX}precision=choice(fp32,bf16)")
    from trainer.hardware import detect

    ends = {
        key: among.choices if isinstance(among, CategoricalDistribution) else (among.low, among.high)
        for key, among in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    others = [first | {key: value} for key, values in ends.items() for value in values[1:]]
    configs = [compose([*overrides, *overrides_of(params)]) for params in (first, *others)]
    for config in configs:
        config.plan(detect(config.device))
    return configs[0]


def _distribution(argument: str, key: str, text: str) -> BaseDistribution:
    found = re.fullmatch(rf"\s*({'|'.join(_KINDS)})\s*\((.*)\)\s*", text, re.DOTALL)
    if not found:
        raise UserError(f"{argument} is no space; write {_EXAMPLE}, or uniform(…), int(…) or choice(…)")
    if key.partition(".")[0] in _NOT_SEARCHED:
        raise UserError(f"{argument}: {key} is not an option of the training; search another one, such as {_EXAMPLE}")
    kind, values = found[1], [item.strip() for item in _ITEM.findall(found[2])]
    numbers = "2,8" if kind == "int" else "0.001,0.01"
    try:
        return _KINDS[kind](*values)
    except (TypeError, ValueError):
        wanted = f"two numbers{' above 0' * (kind == 'log')}, the lower one first"
        raise UserError(f"{argument} must have {wanted}, such as {PREFIX}{key}={kind}({numbers})") from None
