"""What is tried: the options that change speed or memory and nothing else, and their values on this hardware."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from evidence.advice.schema import LEFT_OUT, Candidate, Entry
from evidence.memory.fits import Fits, fitting, given
from evidence.runs import merged
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.errors import UserError, first_line
from trainer.formats import about
from trainer.hardware import UNAVAILABLE, Hardware
from trainer.kernels.optimizers import accepted_options, optimizer_class
from trainer.parallel.activation import MODES as CHECKPOINTING
from trainer.precision.kernels import not_timed_here
from trainer.precision.modes import BASIC_MODES, WEIGHTS_DTYPE, family
from trainer.profiling.rates import slowdown
from trainer.recipe import Recipe
from trainer.run.memory.forecast import meta_model

GOALS = ("speed", "memory")
SLOWER = 1.2
"""Times as long as in fp32 that products of a format may take for goal=speed: a little more than 1, since 16 bits also
move less memory."""
AROUND = 8
"""Microbatches from 1/AROUND to AROUND times the default's are tried."""

Setting = tuple[int, ...]
"""For each factor the index of its value; all zeros is the baseline."""


@dataclass(frozen=True)
class Value:
    """One value of a factor."""

    words: str
    """In labels; the default's are only shown for the precision and where it compiles."""
    overrides: tuple[str, ...] = ()
    """Of train.py; none: the default."""
    threads: int | None = None


@dataclass(frozen=True)
class Factor:
    """One option that is varied."""

    name: str
    values: tuple[Value, ...]
    """The default first, then the nearest to it."""


@dataclass
class Space:
    """All candidates of one recipe on one machine: every combination of the factors' values."""

    factors: list[Factor]
    left_out: list[Entry] = field(default_factory=list)
    """Values that are not tried, each with its reason."""
    notes: list[str] = field(default_factory=list)
    """About the baseline, for the user."""
    refused: Callable[[Candidate], str | None] = lambda candidate: None
    """Returns why a candidate is not to be started: its forecast memory. None: it fits."""

    @property
    def baseline(self) -> Setting:
        """The setting without a change."""
        return (0,) * len(self.factors)

    def factor(self, name: str) -> int | None:
        """Return the position of a factor; None: it is not varied."""
        return next((index for index, factor in enumerate(self.factors) if factor.name == name), None)

    def candidate(self, setting: Setting) -> Candidate:
        """Return the candidate of a setting."""
        values = [factor.values[index] for factor, index in zip(self.factors, setting, strict=True)]
        first = [
            value.words
            for factor, value in zip(self.factors, values, strict=True)
            if factor.name in ("precision", "compile") and value.words
        ]
        others = [
            value.words
            for factor, value, index in zip(self.factors, values, setting, strict=True)
            if index and factor.name not in ("precision", "compile")
        ]
        threads = next((value.threads for value in values if value.threads is not None), None)
        overrides = tuple(override for value in values for override in value.overrides)
        return Candidate(", ".join([" + ".join(first), *others]), overrides, threads)

    def changed(self, setting: Setting, factor: int, value: int) -> Setting:
        """Return the setting with another value of one factor."""
        return (*setting[:factor], value, *setting[factor + 1 :])

    def one_change(self, anchor: Setting, reach: int | None = None) -> Iterator[Setting]:
        """Yield the settings that differ from ``anchor`` in one factor, the precision last.

        ``reach``: at most so many values of a factor, the nearest to the default.
        """
        order = sorted(range(len(self.factors)), key=lambda index: self.factors[index].name == "precision")
        for index in order:
            values = [value for value in range(len(self.factors[index].values)) if value != anchor[index]]
            for value in values[:reach]:
                yield self.changed(anchor, index, value)

    def changes(self, setting: Setting) -> int:
        """Return how many factors differ from the default."""
        return sum(index != 0 for index in setting)

    def product(self) -> list[Setting]:
        """Return every combination that is not refused, the baseline first."""
        every = itertools.product(*(range(len(factor.values)) for factor in self.factors))
        return [setting for setting in every if self.refused(self.candidate(setting)) is None]


def space_of(
    overrides: Sequence[str], hardware: Hardware, goal: str = "speed", quality: bool = False
) -> tuple[Space, list[str]]:
    """Return what is tried for a recipe here, and the overrides that all candidates share.

    Args:
        overrides: the user's own, which are not varied.
        hardware: where it runs.
        goal: ``speed`` or ``memory``.
        quality: whether the winner's quality is tested, so that 16-bit weights can be tried too.

    Raises:
        UserError: train.py would refuse the overrides.
        OutOfMemory: not even the smallest microbatch is forecast to fit.
    """
    config = compose(overrides)
    resolved = config.resolve(hardware)
    datasets = resolved.config.open_datasets()
    common, notes = fitting(config, overrides, hardware, datasets)
    if common != list(overrides):
        config = compose(common)
        resolved = config.resolve(hardware)
    builder = _Builder(config, common, hardware, goal, quality, bool(notes))
    micro = resolved.plan.batching.micro_batch_size
    normalises = any(isinstance(each, _BatchNorm) for each in meta_model(resolved.config.recipe, datasets).modules())
    builder.precision()
    builder.compile()
    builder.micro_batch(resolved.plan.batching.batch_size, micro, normalises, tight=bool(notes))
    builder.recipe_options(resolved.config.recipe)
    builder.threads()
    builder.checkpointing(resolved.config.recipe)
    builder.fused()
    fits = Fits(common, hardware, datasets)
    return Space(builder.factors, builder.left_out, notes, lambda candidate: fits(candidate.overrides)), common


@dataclass
class _Builder:
    """Collects the factors; each method adds one, or the reason why there is none."""

    config: Config
    overrides: list[str]
    hardware: Hardware
    goal: str
    quality: bool
    tight: bool
    """Whether the memory is."""
    factors: list[Factor] = field(default_factory=list)
    left_out: list[Entry] = field(default_factory=list)

    def precision(self) -> None:
        """For speed, what the hardware computes in instructions of its own, or not much slower than fp32."""
        now = self.config.precision.mode
        values = [Value(self._words(now))]
        if not given(self.overrides, "precision"):
            for mode in (*BASIC_MODES, *(WEIGHTS_DTYPE if self.quality else ())):
                if mode == now or self.hardware.support(mode) == UNAVAILABLE or mode.endswith("_pure"):
                    continue
                overrides = (f"precision={mode}",)
                if why := self._too_slow(mode):
                    self._leave_out(Value(mode, overrides), why)
                else:
                    values += self._possible(Value(self._words(mode), overrides))
        self.factors.append(Factor("precision", tuple(values)))

    def _words(self, mode: str) -> str:
        """Return the name of a precision, with what its times are of where that is not its format."""
        kernels = self.config.precision.kernels
        return f"{mode} (fp32 arithmetic)" if not_timed_here(mode, self.hardware, kernels) else mode

    def _too_slow(self, mode: str) -> str | None:
        if self.goal != "speed":
            return None
        if why := not_timed_here(mode, self.hardware, self.config.precision.kernels):
            return why
        times = slowdown(mode, self.hardware)
        return f"{family(mode)} matmuls are {about(times)} times slower than fp32's here" if times > SLOWER else None

    def compile(self) -> None:
        """On and off."""
        now = self.config.compile.mode
        words = "" if now == "off" else "compile"
        values = [Value(words)]
        if not given(self.overrides, "compile"):
            choice = "default" if now == "off" else "off"
            values += self._possible(Value("compile" if now == "off" else "", (f"compile={choice}",)))
        self.factors.append(Factor("compile", tuple(values)))

    def micro_batch(self, batch_size: int, now: int, normalises: bool, tight: bool) -> None:
        """Powers of two that divide the batch; with batch norm, whose statistics are of a microbatch, none."""
        if given(self.overrides, "micro_batch_size") and not tight:
            return
        least = self.config.augment.micro_batch_multiple
        sizes = {2**power for power in range(batch_size.bit_length())} | {batch_size}
        near = {size for size in sizes if max(size, now) <= AROUND * min(size, now)}
        others = [size for size in near if size != now and batch_size % size == 0 and size % least == 0]
        others.sort(key=lambda size: (max(size, now) / min(size, now), -size))
        values = [Value(f"micro_batch_size={size}", (f"micro_batch_size={size}",)) for size in others]
        if normalises and values:
            why = "not varied: it would change batch norm's statistics, which are those of a microbatch"
            self._leave_out(Value("other values of micro_batch_size"), why)
            return
        self._add("micro_batch_size", values)

    def recipe_options(self, recipe: Recipe) -> None:
        """The order in memory of images, the loss in chunks, and the form of attention, where the recipe has them."""
        own = {entry.name for entry in fields(recipe)}
        flags = {"channels_last": "", "chunked_loss": ""}
        for name in own & flags.keys():
            now = getattr(recipe, name)
            self._vary(f"recipe.{name}", ["false" if now is True else "true"])
        if "attention" in own:
            now = vars(recipe)["attention"]
            self._vary("recipe.attention", [form for form in ("sdpa", "eager") if form != now])

    def threads(self) -> None:
        """One, half of the cores, all cores: on a CPU, unless the user or the environment says how many."""
        if self.hardware.device.type != "cpu" or given(self.overrides, "threads"):
            return
        if number := os.environ.get("OMP_NUM_THREADS"):
            self._leave_out(Value("other numbers of threads"), f"OMP_NUM_THREADS={number} is set; unset it to try them")
            return
        cores = self.hardware.cpu_cores
        counts = {1, max(1, cores // 2), cores} - {torch.get_num_threads()}
        values = [Value(f"{count} thread{'s' * (count > 1)}", (), count) for count in sorted(counts, reverse=True)]
        if values:
            self.factors.append(Factor("threads", (Value(""), *values)))

    def checkpointing(self, recipe: Recipe) -> None:
        """Where memory is the goal, or scarce."""
        scarce = self.goal == "memory" or self.tight
        if not scarce or type(recipe).blocks is Recipe.blocks or given(self.overrides, "activation_checkpointing"):
            return
        now = self.config.activation_checkpointing.mode
        self._vary("activation_checkpointing", [mode for mode in CHECKPOINTING if mode != now])

    def fused(self) -> None:
        """The optimizer without its fused kernel, where ``auto`` takes one."""
        optimizer = self.config.optimizer
        if optimizer.fused == "auto" and "fused" in accepted_options(optimizer_class(optimizer.name)):
            self._vary("optimizer.fused", ["false"])

    def _vary(self, key: str, choices: list[str]) -> None:
        if not given(self.overrides, key):
            self._add(
                key, [Value(f"{key.removeprefix('recipe.')}={choice}", (f"{key}={choice}",)) for choice in choices]
            )

    def _add(self, name: str, values: list[Value]) -> None:
        possible = [found for value in values for found in self._possible(value)]
        if possible:
            self.factors.append(Factor(name, (Value(""), *possible)))

    def _possible(self, value: Value) -> list[Value]:
        """Return the value, or nothing where train.py refuses it."""
        try:
            config = compose(merged(self.overrides, value.overrides))
            config.resolve(self.hardware)
            if config.compile.mode != "off":
                config.compile.apply([], self.hardware.device)  # it looks for a C++ compiler
        except UserError as error:
            self._leave_out(value, first_line(error))
            return []
        return [value]

    def _leave_out(self, value: Value, why: str) -> None:
        self.left_out.append(Entry(Candidate(value.words, value.overrides, value.threads), LEFT_OUT, why))
