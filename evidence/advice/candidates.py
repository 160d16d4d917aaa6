"""What is tried: the options that change speed or memory and nothing else, and their values on this hardware."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evidence.memory.fits import fitting, is_set
from evidence.runs import merge_overrides
from mantissa.formats import BASIC, BF16
from trainer.config.compose import compose, key_of
from trainer.config.schema import Config
from trainer.config.settle import plan_of
from trainer.data.contract import Datasets
from trainer.errors import UserError, first_line
from trainer.hardware import UNAVAILABLE, Hardware
from trainer.parallel.activation import MODES as CHECKPOINTING
from trainer.precision.kernels import convolves, not_timed_here
from trainer.recipe import Recipe
from trainer.run.forecast import meta_model

AROUND = 8
"""Microbatches from 1/AROUND to AROUND times the default's are tried."""
REACH = 3
"""Number of values of one option that are tried, those nearest to the default."""
PRECISION, COMPILE = "precision", "compile"


@dataclass(frozen=True)
class Candidate:
    """One setting of the recipe: train.py's default with some changes."""

    overrides: tuple[str, ...] = ()
    """Overrides of train.py, one for each change; they come after the user's own."""

    @property
    def label(self) -> str:
        """Changes in the words of the command line, such as ``bf16, compile=default, micro_batch_size=32``."""
        return ", ".join(map(in_words, self.overrides)) or "the default"


def in_words(override: str) -> str:
    """Return what an override is called in labels."""
    return override.removeprefix(f"{PRECISION}=").removeprefix("recipe.")


@dataclass
class Space:
    """Candidates of one recipe on one machine: combinations of the options' values."""

    choices: dict[str, list[str]] = field(default_factory=dict)
    """Overrides by option that set another value than the default's, those nearest to it first."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Values and candidates that are not tried, each with its reason."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""

    def candidate(self, overrides: Iterable[str]) -> Candidate:
        """Return the candidate with these changes of the default; of one option the last counts."""
        changes = {key_of(override): override for override in overrides}
        return Candidate(tuple(changes[key] for key in self.choices if key in changes))

    def singles(self) -> list[Candidate]:
        """Return the candidates that differ from the default in one option."""
        return [Candidate((override,)) for choices in self.choices.values() for override in choices[:REACH]]


def space_of(overrides: Sequence[str], hardware: Hardware, datasets: Datasets) -> tuple[Space, list[str]]:
    """Return what is tried for a recipe here, and the overrides that all candidates share.

    What the user's own ``overrides`` set is not varied.

    Raises:
        UserError: train.py would refuse the overrides.
        OutOfMemory: not even the smallest microbatch is forecast to fit.
    """
    config = compose(overrides)
    common, notes = fitting(config, overrides, hardware, datasets)
    config = compose(common)
    space, tight = Space(notes=notes), bool(notes)
    recipe = plan_of(config, hardware).config.recipe
    model = meta_model(recipe, datasets)
    if why := config.precision.not_timed(hardware, convolves(model)):
        notes.append(f"the default: {why}")
    values: dict[str, Sequence[object]] = {}
    if not is_set(overrides, PRECISION):
        values[PRECISION] = _precisions(space, config, hardware, model)
    values[COMPILE] = ["default" if config.compile.mode == "off" else "off"]
    if not is_set(overrides, "micro_batch_size"):
        values["micro_batch_size"] = _micro_batches(space, config, hardware, model)
    for name in ("channels_last", "chunked_loss"):
        if hasattr(recipe, name):
            values[f"recipe.{name}"] = ["false" if getattr(recipe, name) is True else "true"]
    if attention := getattr(recipe, "attention", None):
        values["recipe.attention"] = [form for form in ("sdpa", "eager") if form != attention]
    if hardware.device.type == "cpu" and not is_set(overrides, "threads"):
        values["threads"] = _threads(space, hardware)
    if tight and type(recipe).blocks is not Recipe.blocks:
        now = config.activation_checkpointing.mode
        values["activation_checkpointing"] = [mode for mode in CHECKPOINTING if mode != now]
    for key, several in values.items():
        for override in (f"{key}={value}" for value in several if not is_set(overrides, key)):
            if why := _refusal(merge_overrides(common, [override]), hardware):
                space.left_out[in_words(override)] = why
            else:
                space.choices.setdefault(key, []).append(override)
    return space, common


def _refusal(overrides: list[str], hardware: Hardware) -> str:
    """Return why train.py refuses these overrides; empty: it does not."""
    try:
        config = compose(overrides)
        plan_of(config, hardware)
        if config.compile.mode != "off":
            config.compile.apply([], hardware.device)  # it looks for a C++ compiler
    except UserError as error:
        return first_line(error)
    return ""


def _precisions(space: Space, config: Config, hardware: Hardware, model: nn.Module) -> list[str]:
    """Return the modes that the hardware computes in instructions of its own, the most likely first."""
    modes = []
    for mode in BASIC:
        if mode == config.precision.mode or hardware.support(mode) == UNAVAILABLE:
            continue
        if why := not_timed_here(mode, hardware, config.precision.kernels, convolves(model)):
            space.left_out[mode] = why
        else:
            modes.append(mode)
    return sorted(modes, key=lambda mode: mode != BF16.name)


def _micro_batches(space: Space, config: Config, hardware: Hardware, model: nn.Module) -> list[int]:
    """Return powers of two that divide the batch; with batch norm, whose statistics are of a microbatch, none."""
    plan = plan_of(config, hardware)
    batch_size, now = plan.batching.batch_size, plan.batching.micro_batch_size
    sizes = {2**power for power in range(batch_size.bit_length())} | {batch_size}
    near = [size for size in sizes - {now} if max(size, now) <= AROUND * min(size, now)]
    others = [size for size in near if batch_size % size == 0 and size % config.augment.micro_batch_multiple == 0]
    if others and any(isinstance(module, _BatchNorm) for module in model.modules()):
        why = "not varied: it would change batch norm's statistics, which are per microbatch"
        space.left_out["other values of micro_batch_size"] = why
        return []
    return sorted(others, key=lambda size: (max(size, now) / min(size, now), -size))


def _threads(space: Space, hardware: Hardware) -> list[int]:
    """Return one, half of the cores, all cores, unless the environment says how many."""
    if number := os.environ.get("OMP_NUM_THREADS"):
        space.left_out["other numbers of threads"] = f"OMP_NUM_THREADS={number} is set; unset it to try them"
        return []
    cores = hardware.cpu_cores
    return sorted({1, max(1, cores // 2), cores} - {torch.get_num_threads()}, reverse=True)
