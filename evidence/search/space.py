"""The space of a search: ``space.KEY=log(1e-4,1e-2)``, ``uniform(…)``, ``int(…)`` or ``choice(…)``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.compose import combinations, compose
from trainer.config.options import unquoted
from trainer.config.schema import Config
from trainer.errors import UserError, nearest
from trainer.hardware import detect

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

PREFIX = "space."
KINDS = ("log", "uniform", "int", "choice")
_EXAMPLE = "space.optimizer.lr=log(1e-4,1e-2)"
_SET_HERE = ("resume", "run_name", "checkpoint.best", "tracking.parent")
_NOT_SEARCHED = ("output_dir", "parallel", "tracking", "checkpoint", "device", "resume", "run_name")
"""Keys, and groups, that are no options of a model or its training."""


@dataclass(frozen=True)
class Dimension:
    """One option of the space, and what it may be."""

    key: str
    """Such as ``optimizer.lr``."""
    kind: str
    """One of ``KINDS``."""
    values: tuple[str, ...]
    """The lowest and the highest number; the choices of ``choice``."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.key}={self.kind}({','.join(self.values)})"

    def distribution(self) -> BaseDistribution:
        """Return Optuna's form of it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.kind == "choice":
            return CategoricalDistribution(self.values)
        if self.kind == "int":
            return IntDistribution(*map(int, self.values))
        return FloatDistribution(*map(float, self.values), log=self.kind == "log")


def shown(value: Any) -> str:
    """Return a proposed value as it is typed: numbers with four digits, so that they can be pasted."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def overrides_of(params: dict[str, Any]) -> list[str]:
    """Return the overrides of a proposal."""
    return [f"{key}={shown(value)}" for key, value in params.items()]


def parse_space(arguments: Sequence[str]) -> tuple[list[Dimension], list[str]]:
    """Return the space on a command line, and its other arguments.

    Raises:
        UserError: there is no space, or a part of it is none.
    """
    space: dict[str, Dimension] = {}
    others = []
    for argument in arguments:
        if argument.startswith(PREFIX):
            key, _, text = argument.removeprefix(PREFIX).partition("=")
            space[key] = _dimension(argument, key, unquoted(text))
        else:
            others.append(argument)
    if not space:
        raise UserError(f'there is nothing to search; give a space, such as "{_EXAMPLE}"')
    for other in others:
        key = other.lstrip("+~").partition("=")[0]
        if key in space:
            raise UserError(f"{key} is searched ({space[key]}) and set ({other}); remove one of them")
        if key in _SET_HERE:
            raise UserError(f"{other}: the search sets {key} for every run; leave it out")
    return list(space.values()), others


def check_space(space: Sequence[Dimension], overrides: list[str]) -> Config:
    """Compose the ends and the choices of every dimension; return the config with the first ones.

    Raises:
        UserError: train.py would refuse one of them.
    """
    for override in overrides:
        if len(several := combinations([override])) > 1:
            key, _, values = override.partition("=")
            raise UserError(f"{override} has {len(several)} values; search them with {PREFIX}{key}=choice({values})")
    firsts = [f"{each.key}={each.values[0]}" for each in space]
    first: Config | None = None
    for number, each in enumerate(space):
        for value in each.values[1 if number else 0 :]:
            config = compose([*overrides, *firsts[:number], f"{each.key}={value}", *firsts[number + 1 :]])
            config.resolve(detect(config.device))
            first = first or config
    assert first is not None
    return first


def _dimension(argument: str, key: str, text: str) -> Dimension:
    found = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", text, re.DOTALL)
    if not key or not found:
        example = f"{PREFIX}{key or 'KEY'}=log(1e-4,1e-2)"
        raise UserError(f"{argument} is no space; write {example}, or uniform(…), int(…) or choice(…)")
    kind, values = found[1], tuple(_items(found[2]))
    if kind not in KINDS:
        raise UserError(f"{argument}: {kind} is not a kind of space ({', '.join(KINDS)}){nearest(kind, KINDS)}")
    if key.partition(".")[0] in _NOT_SEARCHED:
        raise UserError(f"{argument}: {key} is not an option of the training; search another one, such as {_EXAMPLE}")
    if kind == "choice":
        if len(set(values)) < max(2, len(values)):
            raise UserError(f"{argument} must have two different values or more, such as {PREFIX}{key}=choice(16,32)")
        return Dimension(key, kind, values)
    if len(values) != 2:
        raise UserError(f"{argument} must have two numbers, the lowest and the highest: {PREFIX}{key}={kind}(…,…)")
    low, high = (_number(argument, value, kind) for value in values)
    if low >= high:
        raise UserError(f"{argument}: the lowest value, {values[0]}, must be below the highest, {values[1]}")
    if kind == "log" and low <= 0:
        raise UserError(
            f"{argument}: a logarithm needs values above 0; begin with 1e-5, for example, or use uniform(…)"
        )
    return Dimension(key, kind, values)


def _number(argument: str, text: str, kind: str) -> float:
    try:
        value = float(int(text) if kind == "int" else text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        wanted = "whole number" if kind == "int" else "number"
        raise UserError(f"{argument}: {text!r} is not a {wanted}; values that are no numbers are choice(a,b)")
    return value


def _items(text: str) -> list[str]:
    """Return what commas separate, outside of brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]
