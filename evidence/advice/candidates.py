"""What is tried: the options that change speed or memory and nothing else, and their values on this hardware."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from evidence.memory.fits import Fits, fitting, given
from evidence.runs import merged
from mantissa.display import about
from mantissa.formats import BASIC, FORMATS
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.errors import UserError, first_line
from trainer.hardware import UNAVAILABLE, Hardware
from trainer.optim.classes import accepted_options, optimizer_class
from trainer.parallel.activation import MODES as CHECKPOINTING
from trainer.precision.kernels import not_timed_here
from trainer.profiling.rates import slowdown
from trainer.recipe import Recipe
from trainer.run.memory.forecast import meta_model

SLOWER = 1.2
"""Times as long as in fp32 that matmuls of a format may take for goal=speed: a little more than 1, since 16 bits also
move less memory."""
AROUND = 8
"""Microbatches from 1/AROUND to AROUND times the default's are tried."""
PRECISION, COMPILE = "precision", "compile"

Setting = tuple[int, ...]
"""For each factor the index of its value; all zeros is the baseline."""


@dataclass(frozen=True)
class Candidate:
    """One setting of the recipe."""

    label: str
    """What differs from the baseline, in the words of the command line: ``bf16 + compile, micro_batch_size=32``."""
    overrides: tuple[str, ...] = ()
    """Of train.py; they come after the user's own."""
    compiles: bool = False
    """Whether it runs under torch.compile."""


@dataclass(frozen=True)
class Value:
    """One value of a factor: its words in labels, and the overrides of train.py that set it (none: the default)."""

    words: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Factor:
    """One option that is varied: the default first, then the values nearest to it."""

    name: str
    values: tuple[Value, ...]


@dataclass
class Space:
    """All candidates of one recipe on one machine: every combination of the factors' values."""

    factors: list[Factor]
    left_out: dict[str, str] = field(default_factory=dict)
    """Values that are not tried, each with its reason."""
    notes: list[str] = field(default_factory=list)
    """About the baseline, for the user."""
    refused: Callable[[Candidate], str | None] = lambda candidate: None
    """Returns why a candidate is not to be started: its forecast memory. None: it fits."""

    @property
    def baseline(self) -> Setting:
        """The setting without a change."""
        return (0,) * len(self.factors)

    @property
    def varied(self) -> list[str]:
        """The names of the options that have several values."""
        return [factor.name for factor in self.factors if len(factor.values) > 1]

    def position(self, name: str) -> int:
        """Return the place of a factor in a setting."""
        return [factor.name for factor in self.factors].index(name)

    def candidate(self, setting: Setting) -> Candidate:
        """Return the candidate of a setting."""
        first: list[str] = []
        others: list[str] = []
        overrides: list[str] = []
        for factor, index in zip(self.factors, setting, strict=True):
            value = factor.values[index]
            overrides += value.overrides
            if factor.name in (PRECISION, COMPILE):
                first.append(value.words)
            elif index:
                others.append(value.words)
        label = ", ".join([" + ".join(filter(None, first)), *others])
        return Candidate(label, tuple(overrides), COMPILE in first)

    def every(self) -> Iterator[Setting]:
        """Yield all combinations."""
        return itertools.product(*(range(len(factor.values)) for factor in self.factors))

    def changed(self, setting: Setting, factor: int, value: int) -> Setting:
        """Return the setting with another value of one factor."""
        return (*setting[:factor], value, *setting[factor + 1 :])

    def one_change(self, anchor: Setting) -> Iterator[Setting]:
        """Yield the settings that differ from ``anchor`` in one factor, those nearest to the default first."""
        for index, factor in enumerate(self.factors):
            for value in range(len(factor.values)):
                if value != anchor[index]:
                    yield self.changed(anchor, index, value)

    def changes(self, setting: Setting) -> int:
        """Return how many factors differ from the default."""
        return sum(index != 0 for index in setting)


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
    datasets = config.resolve(hardware).config.open_datasets()
    common, notes = fitting(config, overrides, hardware, datasets)
    config = compose(common)
    resolved = config.resolve(hardware)
    recipe, batching = resolved.config.recipe, resolved.plan.batching
    scarce = bool(notes)
    builder = _Builder(config, common, hardware)
    builder.precision(goal, quality)
    builder.compile()
    if scarce or not given(common, "micro_batch_size"):
        normalises = any(isinstance(each, _BatchNorm) for each in meta_model(recipe, datasets).modules())
        builder.micro_batch(batching.batch_size, batching.micro_batch_size, normalises)
    builder.recipe_options(recipe)
    builder.threads()
    if (goal == "memory" or scarce) and type(recipe).blocks is not Recipe.blocks:
        now = config.activation_checkpointing.mode
        builder.vary("activation_checkpointing", [mode for mode in CHECKPOINTING if mode != now])
    optimizer = config.optimizer
    if optimizer.fused == "auto" and "fused" in accepted_options(optimizer_class(optimizer.name)):
        builder.vary("optimizer.fused", ["false"])
    fits = Fits(common, hardware, datasets)

    def refused(candidate: Candidate) -> str | None:
        return fits([each for each in candidate.overrides if not each.startswith("threads=")])

    return Space(builder.factors, builder.left_out, notes, refused), common


@dataclass
class _Builder:
    """Collects the factors; each method adds one, or the reason why there is none."""

    config: Config
    overrides: list[str]
    hardware: Hardware
    factors: list[Factor] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def precision(self, goal: str, quality: bool) -> None:
        """For speed, what the hardware computes in instructions of its own, or not much slower than fp32."""
        now = self.config.precision.mode
        values = [Value(self._words(now))]
        # With fp32 sums at least; purely 16-bit training loses small updates.
        half = [name for name, row in FORMATS.items() if row.half_weights and row.accumulates_in_fp32]
        for mode in [] if given(self.overrides, PRECISION) else [*BASIC, *half * quality]:
            if mode == now or self.hardware.support(mode) == UNAVAILABLE:
                continue
            if goal == "speed" and (why := self._too_slow(mode)):
                self.left_out[mode] = why
            else:
                values += self._possible(Value(self._words(mode), (f"precision={mode}",)))
        self.factors.append(Factor(PRECISION, tuple(values)))

    def _words(self, mode: str) -> str:
        """Return the name of a precision, with what its times are of where that is not its format."""
        not_timed = not_timed_here(mode, self.hardware, self.config.precision.kernels)
        return f"{mode} (fp32 arithmetic)" if not_timed else mode

    def _too_slow(self, mode: str) -> str | None:
        if why := not_timed_here(mode, self.hardware, self.config.precision.kernels):
            return why
        times, number = slowdown(mode, self.hardware), FORMATS[mode].number.name
        return f"{number} matmuls are {about(times)} times slower than fp32's here" if times > SLOWER else None

    def compile(self) -> None:
        """On and off."""
        off = self.config.compile.mode == "off"
        other = Value(COMPILE, ("compile=default",)) if off else Value("", ("compile=off",))
        more = [] if given(self.overrides, COMPILE) else self._possible(other)
        self.factors.append(Factor(COMPILE, (Value("" if off else COMPILE), *more)))

    def micro_batch(self, batch_size: int, now: int, normalises: bool) -> None:
        """Powers of two that divide the batch; with batch norm, whose statistics are of a microbatch, none."""
        least = self.config.augment.micro_batch_multiple
        sizes = {2**power for power in range(batch_size.bit_length())} | {batch_size}
        near = {size for size in sizes if max(size, now) <= AROUND * min(size, now)}
        others = [size for size in near if size != now and batch_size % size == 0 and size % least == 0]
        if normalises and others:
            why = "not varied: it would change batch norm's statistics, which are those of a microbatch"
            self.left_out["other values of micro_batch_size"] = why
            return
        others.sort(key=lambda size: (max(size, now) / min(size, now), -size))
        self._add(
            "micro_batch_size", [Value(f"micro_batch_size={size}", (f"micro_batch_size={size}",)) for size in others]
        )

    def recipe_options(self, recipe: Recipe) -> None:
        """The order in memory of images, the loss in chunks, and the form of attention, where the recipe has them."""
        own = {entry.name for entry in fields(recipe)}
        for name in ("channels_last", "chunked_loss"):
            if name in own:
                self.vary(f"recipe.{name}", ["false" if getattr(recipe, name) is True else "true"])
        if "attention" in own:
            now = vars(recipe)["attention"]
            self.vary("recipe.attention", [form for form in ("sdpa", "eager") if form != now])

    def threads(self) -> None:
        """One, half of the cores, all cores: on a CPU, unless the user or the environment says how many."""
        if self.hardware.device.type != "cpu" or given(self.overrides, "threads"):
            return
        if number := os.environ.get("OMP_NUM_THREADS"):
            self.left_out["other numbers of threads"] = f"OMP_NUM_THREADS={number} is set; unset it to try them"
            return
        cores = self.hardware.cpu_cores
        counts = sorted({1, max(1, cores // 2), cores} - {torch.get_num_threads()}, reverse=True)
        self._add("threads", [Value(f"{n} thread{'s' * (n > 1)}", (f"threads={n}",)) for n in counts])

    def vary(self, key: str, choices: list[str]) -> None:
        """Other values of an option that the user has not set."""
        if not given(self.overrides, key):
            name = key.removeprefix("recipe.")
            self._add(key, [Value(f"{name}={choice}", (f"{key}={choice}",)) for choice in choices])

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
            self.left_out[value.words] = first_line(error)
            return []
        return [value]
