"""What is tried: the options that change speed or memory and nothing else, and their values on this hardware."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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


@dataclass(frozen=True)
class Candidate:
    """One setting of the recipe."""

    label: str
    """What differs from the baseline, in the words of the command line: ``bf16 + compile, micro_batch_size=32``."""
    overrides: tuple[str, ...] = ()
    """Of train.py, one for each change; they come after the user's own."""
    compiles: bool = False
    """Whether it runs under torch.compile."""


def key_of(override: str) -> str:
    """Return the option that an override sets."""
    return override.partition("=")[0]


@dataclass
class Space:
    """All candidates of one recipe on one machine: every combination of the options' values."""

    precision: str
    """The default's, in words."""
    compiles: bool = False
    """Whether the default runs under torch.compile."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """By option the overrides that set another value than the default's, those nearest to it first."""
    words: dict[str, str] = field(default_factory=dict)
    """What overrides are called in labels, where that is not ``option=value``."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Values that are not tried, each with its reason."""
    notes: list[str] = field(default_factory=list)
    """About the baseline, for the user."""
    refused: Callable[[Candidate], str | None] = lambda candidate: None
    """Returns why a candidate is not to be started: its forecast memory. None: it fits."""

    def candidate(self, overrides: Iterable[str] = ()) -> Candidate:
        """Return the candidate with these changes of the default."""
        changes = {key_of(override): override for override in overrides}
        ordered = tuple(changes[key] for key in self.choices if key in changes)
        compiles = not changes[COMPILE].endswith("=off") if COMPILE in changes else self.compiles
        precision = self.words[changes[PRECISION]] if PRECISION in changes else self.precision
        others = (self.in_words(each) for each in ordered if key_of(each) not in (PRECISION, COMPILE))
        label = ", ".join([precision + " + compile" * compiles, *others])
        return Candidate(label, ordered, compiles)

    def in_words(self, override: str) -> str:
        """Return what an override is called in labels."""
        return self.words.get(override, override.removeprefix("recipe."))

    def changed(self, candidate: Candidate, key: str, override: str | None) -> Candidate:
        """Return the candidate with another value of one option; None: the default's."""
        others = [each for each in candidate.overrides if key_of(each) != key]
        return self.candidate([*others, override] if override else others)

    def one_change(self, candidate: Candidate, most: int | None = None) -> Iterator[Candidate]:
        """Yield the candidates that differ in one option, in at most so many values of each."""
        for key, choices in self.choices.items():
            for override in (None, *choices[:most]):
                if (other := self.changed(candidate, key, override)) != candidate:
                    yield other


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
    recipe, batching = config.resolve(hardware).config.recipe, config.resolve(hardware).plan.batching
    fits = Fits(common, hardware, datasets)
    builder = _Builder(config, common, hardware, notes)
    builder.precisions(goal, quality)
    builder.vary(COMPILE, ["default" if config.compile.mode == "off" else "off"])
    if notes or not given(common, "micro_batch_size"):
        normalises = any(isinstance(each, _BatchNorm) for each in meta_model(recipe, datasets).modules())
        builder.micro_batches(batching.batch_size, batching.micro_batch_size, normalises)
    own = {entry.name: getattr(recipe, entry.name) for entry in fields(recipe)}
    for name in ("channels_last", "chunked_loss"):
        if name in own:
            builder.vary(f"recipe.{name}", ["false" if own[name] is True else "true"])
    if "attention" in own:
        builder.vary("recipe.attention", [form for form in ("sdpa", "eager") if form != own["attention"]])
    builder.threads()
    if (goal == "memory" or notes) and type(recipe).blocks is not Recipe.blocks:
        now = config.activation_checkpointing.mode
        builder.vary("activation_checkpointing", [mode for mode in CHECKPOINTING if mode != now])
    optimizer = config.optimizer
    if optimizer.fused == "auto" and "fused" in accepted_options(optimizer_class(optimizer.name)):
        builder.vary("optimizer.fused", ["false"])
    builder.space.refused = lambda candidate: fits([each for each in candidate.overrides if key_of(each) != "threads"])
    return builder.space, common


class _Builder:
    """Collects the choices; each method adds those of one option, or the reason why there is none."""

    def __init__(self, config: Config, overrides: list[str], hardware: Hardware, notes: list[str]) -> None:
        self.config, self.overrides, self.hardware = config, overrides, hardware
        self.space = Space(self._words(config.precision.mode), config.compile.mode != "off", notes=notes)

    def precisions(self, goal: str, quality: bool) -> None:
        """For speed, what the hardware computes in instructions of its own, or not much slower than fp32."""
        # With fp32 sums at least; purely 16-bit training loses small updates.
        half = [name for name, row in FORMATS.items() if row.half_weights and row.accumulates_in_fp32]
        modes = []
        for mode in [] if given(self.overrides, PRECISION) else [*BASIC, *half * quality]:
            if mode == self.config.precision.mode or self.hardware.support(mode) == UNAVAILABLE:
                continue
            self.space.words[f"{PRECISION}={mode}"] = self._words(mode)
            if goal == "speed" and (why := self._too_slow(mode)):
                self.space.left_out[mode] = why
            else:
                modes.append(mode)
        self.vary(PRECISION, modes)

    def _words(self, mode: str) -> str:
        """Return the name of a precision, with what its times are of where that is not its format."""
        not_timed = not_timed_here(mode, self.hardware, self.config.precision.kernels)
        return f"{mode} (fp32 arithmetic)" if not_timed else mode

    def _too_slow(self, mode: str) -> str | None:
        if why := not_timed_here(mode, self.hardware, self.config.precision.kernels):
            return why
        times, number = slowdown(mode, self.hardware), FORMATS[mode].number.name
        return f"{number} matmuls are {about(times)} times slower than fp32's here" if times > SLOWER else None

    def micro_batches(self, batch_size: int, now: int, normalises: bool) -> None:
        """Powers of two that divide the batch; with batch norm, whose statistics are of a microbatch, none."""
        least = self.config.augment.micro_batch_multiple
        sizes = {2**power for power in range(batch_size.bit_length())} | {batch_size}
        near = {size for size in sizes if max(size, now) <= AROUND * min(size, now)}
        others = [size for size in near if size != now and batch_size % size == 0 and size % least == 0]
        if normalises and others:
            why = "not varied: it would change batch norm's statistics, which are those of a microbatch"
            self.space.left_out["other values of micro_batch_size"] = why
            return
        others.sort(key=lambda size: (max(size, now) / min(size, now), -size))
        self._add("micro_batch_size", others)

    def threads(self) -> None:
        """One, half of the cores, all cores: on a CPU, unless the user or the environment says how many."""
        if self.hardware.device.type != "cpu" or given(self.overrides, "threads"):
            return
        if number := os.environ.get("OMP_NUM_THREADS"):
            self.space.left_out["other numbers of threads"] = f"OMP_NUM_THREADS={number} is set; unset it to try them"
            return
        cores = self.hardware.cpu_cores
        counts = sorted({1, max(1, cores // 2), cores} - {torch.get_num_threads()}, reverse=True)
        self.space.words |= {f"threads={count}": f"{count} thread{'s' * (count > 1)}" for count in counts}
        self._add("threads", counts)

    def vary(self, key: str, values: Sequence[object]) -> None:
        """Other values of an option that the user has not set."""
        if not given(self.overrides, key):
            self._add(key, values)

    def _add(self, key: str, values: Sequence[object]) -> None:
        """Add those values that train.py does not refuse."""
        for override in (f"{key}={value}" for value in values):
            try:
                config = compose(merged(self.overrides, [override]))
                config.resolve(self.hardware)
                if config.compile.mode != "off":
                    config.compile.apply([], self.hardware.device)  # it looks for a C++ compiler
            except UserError as error:
                words = COMPILE if key == COMPILE else self.space.in_words(override)
                self.space.left_out[words] = first_line(error)
            else:
                self.space.choices.setdefault(key, []).append(override)
