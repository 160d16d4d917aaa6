"""Formats of modules: ``precision.modules`` has a mode for each name pattern, and the last one that matches decides.

A module has its format with all that it contains. fp32 makes it an island, outside of autocast; the other modes choose
what its linear layers multiply (``scaled``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from mantissa.display import shortened
from mantissa.formats import BF16, FORMATS, FP32, TF32, Number
from mantissa.names import format_name
from trainer.errors import UserError, most_like
from trainer.precision import scaled
from trainer.precision.names import matching, typed

OPTION = "precision.modules"
Formats = Mapping[str, str]
"""Modes by name pattern, as they are typed."""
BY_MODULE = (FP32.name, *(name for name, row in FORMATS.items() if row.autocast is BF16.dtype))
"""Modes that a module can have: the other ones are alike in autocast's dtype and in what weights are."""


# --- what can be typed ---


def check_names(formats: Formats) -> None:
    """Check that each format is one that a module can have.

    Raises:
        UserError: there is no such format, or it is one of whole runs.
    """
    for pattern, mode in formats.items():
        if mode in BY_MODULE:
            continue
        said = f"{OPTION}: {pattern}:{mode}"
        if mode not in FORMATS:
            near = most_like(format_name(mode), BY_MODULE)
            remedy = typed(OPTION, {**formats, pattern: near}) if near else without(formats, pattern)
            raise UserError(f"{said}: there is no such format ({', '.join(BY_MODULE)})", remedy)
        why = "autocast has one 16-bit dtype"
        if FORMATS[mode].weights != torch.float32:
            why = "how weights are held and updated is chosen for the whole model"
        elif FORMATS[mode].number is TF32:
            why = "TF32 is on or off for the whole process"
        raise UserError(f"{said}: {why}; a module has one of {', '.join(BY_MODULE)}", without(formats, pattern))


def check_beside(formats: Formats, mode: str, *remedies: str) -> None:
    """Check that the modules' formats can be in a run in ``mode``; ``remedies`` are other modes that are allowed.

    Raises:
        UserError: beside fp32, some cannot.
    """
    others = {pattern: each for pattern, each in formats.items() if each != FP32.name}
    if others and FORMATS[mode].half and mode not in BY_MODULE:
        pattern, other = next(iter(others.items()))
        raise UserError(
            f"{OPTION}: {pattern}:{other} with precision={mode}: beside fp32, modules have formats of their own only "
            f"in a run in one of {', '.join(name for name in BY_MODULE if name != FP32.name)}",
            typed(OPTION, {pattern: each for pattern, each in formats.items() if pattern not in others}),
            *remedies,
        )


def without(formats: Formats, pattern: str) -> str:
    """Return the override that leaves a pattern out."""
    return typed(OPTION, {each: mode for each, mode in formats.items() if each != pattern})


def with_islands(formats: Formats, patterns: Sequence[str]) -> dict[str, str]:
    """Return the formats with these patterns in fp32, and no others."""
    others = {pattern: mode for pattern, mode in formats.items() if mode != FP32.name or pattern in patterns}
    more = [pattern for pattern in patterns if others.get(pattern) != FP32.name]  # they come last, and decide
    return {pattern: mode for pattern, mode in others.items() if pattern not in more} | dict.fromkeys(more, FP32.name)


def named(formats: Formats, of_run: str, mode: str) -> str:
    """Return which option has a mode: that of the run, ``of_run``, or that of a module."""
    of_module = next((pattern for pattern, each in formats.items() if each == mode), "")
    return f"precision={mode}" if mode == of_run else f"{OPTION}: {of_module}:{mode}"


# --- what it means in a model ---


def chosen(formats: Formats, model: nn.Module) -> list[tuple[str, str]]:
    """Return the submodules that have a format of their own, by name, and the mode of each; the last one decides.

    Raises:
        UserError: a pattern that matches no submodule.
    """
    return [(name, formats[pattern]) for pattern, names in _matched(formats, model).items() for name in names]


def _matched(formats: Formats, model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the submodules that each pattern matches."""
    names = [name for name, _ in model.named_modules() if name]
    return {pattern: sorted(matching(OPTION, pattern, names, "submodule")) for pattern in formats}


def islands_of(formats: Formats, model: nn.Module, of_recipe: Iterable[str] = ()) -> list[str]:
    """Return the names of the submodules that stay in fp32, those ``of_recipe`` among them.

    Raises:
        UserError: a pattern that matches no submodule, or has no effect; or another format inside of an island, where
            autocast is off.
    """
    of_recipe, matched = list(of_recipe), _matched(formats, model)
    last = {id(each): mode for name, mode in chosen(formats, model) for each in model.get_submodule(name).modules()}
    islands = [
        name
        for pattern, names in matched.items()
        for name in names
        if formats[pattern] == last[id(model.get_submodule(name))] == FP32.name
    ]
    inside = {id(each): name for name in islands for each in model.get_submodule(name).modules()}
    recipes_own = {id(each) for name in of_recipe for each in model.get_submodule(name).modules()}
    for pattern, names in matched.items():
        mode = formats[pattern]
        if mode == FP32.name:
            continue
        modules = {id(model.get_submodule(name)): name for name in names}
        if recipes_own.issuperset(modules):
            raise UserError(
                f"{OPTION}: {pattern}:{mode} has no effect: the recipe keeps {shortened(names)} in fp32",
                without(formats, pattern),
            )
        for key, name in modules.items():
            if last[key] == mode and key in inside:
                raise UserError(
                    f"{OPTION}: {name}:{mode} is inside of {inside[key]}, all of which computes in fp32",
                    typed(OPTION, _with_fp32_last(formats)),
                )
    return sorted({*of_recipe, *islands})


def _with_fp32_last(formats: Formats) -> dict[str, str]:
    """Return the formats in an order in which fp32 decides over all others."""
    return dict(sorted(formats.items(), key=lambda each: each[1] == FP32.name))


def scaled_layers(
    formats: Formats, number: Number, model: nn.Module, blocks: list[nn.Module], islands: list[str]
) -> dict[str, Number]:
    """Return the linear layers that multiply scaled numbers, by name, and the numbers of each.

    Args:
        formats: of modules.
        number: of the run's mode.
        model: all of it.
        blocks: its repeated blocks.
        islands: names of the submodules that stay in fp32.

    Raises:
        UserError: a scaled format is left no linear layer, or one whose sides are not multiples.
    """
    submodules = chosen(formats, model)
    for pattern, names in _matched(formats, model).items():
        mode = formats[pattern]
        if FORMATS[mode].number.scaled and not any(map(partial(scaled.has_linear, model), names)):
            raise UserError(
                f"{OPTION}: {pattern}:{mode}: {shortened(names)} has no linear layer (subclasses of nn.Linear stay in "
                "bf16)",
                without(formats, pattern),
            )
    numbers = scaled.layers_of(model, blocks, islands, number, submodules)
    if odd := scaled.odd_sides(model, numbers):
        # Layers of all blocks, whose numbers stand between dots, have one pattern; fp32 comes last, and stays so.
        in_bf16 = dict.fromkeys((re.sub(r"\.\d+\.", ".*.", name) for name in odd), BF16.name)
        before = {pattern: mode for pattern, mode in formats.items() if mode == FP32.name or pattern not in in_bf16}
        others = _with_fp32_last({**before, **{each: mode for each, mode in in_bf16.items() if each not in before}})
        left = [name for name, each in numbers.items() if each is number]
        left = [name for name in left if not any(fnmatchcase(name, pattern) for pattern in others)]
        remedies = [typed(OPTION, others)] if left or not number.scaled else []
        if not odd.keys() & scaled.layers_of(model, blocks, islands, BF16, submodules).keys():
            remedies.append(f"precision={BF16.name}")
        name, side = next(iter(odd.items()))
        raise UserError(
            f"{named(formats, number.name, numbers[name].name)}: a side of {name}.weight is {side}, which must be a "
            f"multiple of {scaled.ARITHMETIC[numbers[name]].multiple}",
            *(remedies or [f"precision={BF16.name} {typed(OPTION, others)}"]),
        )
    if number.scaled and number not in numbers.values():
        raise UserError(
            f"precision={number.name}: no linear layer in the model's blocks is left for it (convolutions stay in "
            f"bf16, {OPTION} in formats of their own)",
            f"precision={BF16.name}",
        )
    return numbers
