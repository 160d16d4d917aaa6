"""The language model beside nanoGPT's recipe for a CPU: the time of a step, and the time to a validation loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from evidence.bench.baselines import BareLoop, Workload
from evidence.bench.jobs import Job, steps_of
from evidence.bench.measurement import Bench
from evidence.bench.nanogpt_loop import PlainLoop, PlainShape
from evidence.bench.turns import Block, Row, Times, ratios, stopwatch
from recipes.data.text.source import TextDatasets
from trainer.data.contract import Batch
from trainer.data.evaluation import evaluation_samples
from trainer.data.loader import to_device
from trainer.hardware import NATIVE, Hardware
from trainer.trainer import Trainer

GOAL = 1.89
"""Validation loss in nats per character: what the recipe reaches with the text of tinyshakespeare."""
EVERY = 250
"""Steps from one evaluation to the next, as the recipe has it."""
RACES = 3
PLAIN, BARE, DEFAULT = "nanoGPT's loop", "a bare loop", "ours"
_MUON = ("optimizer=muon", "optimizer.lr=6e-3", "schedule.final=0", "recipe.vocabulary_multiple=1")
SETTINGS = {
    DEFAULT: (),
    "ours with Muon": (*_MUON, "recipe.gelu=erf", "steps=550"),
    "ours with Muon and recipe=llama": (*_MUON, "recipe=llama", "steps=450"),
}
"""What races: the recipe as published, with an optimizer that needs fewer steps, and with another model, too."""
STEP_TARGET, RACE_TARGET, AMX_TARGET = 1.0, 0.7, 0.5
"""Targets of times over nanoGPT's: of a step; to the loss; to the loss with AMX."""


@dataclass(frozen=True)
class Contest:
    """What is measured; tests make it smaller."""

    job: Job
    shape: PlainShape = field(default_factory=PlainShape)
    """Of the baseline; the vocabulary is the text's."""
    ours: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SETTINGS)
    """Further options of the recipe by the name of what races with them."""
    rounds: int = 40
    """Blocks of each contestant on the way to the loss, in turns; each takes its share of its steps."""
    windows: int = 1000
    """Of the validation text, on which all are judged."""
    judged_from: float = 0.4
    """The share of the rounds after which losses are looked at."""
    modes: tuple[str, ...] = ("fp32", "bf16")
    compiled: tuple[bool, ...] = (False, True)


class Point(NamedTuple):
    """Where a contestant is after a round."""

    seconds: float
    """Of training alone."""
    step: int
    loss: float


@dataclass
class Contestant:
    """One that trains to the loss."""

    steps: int
    """Of its whole run."""
    block: Block
    judge: Callable[[], float]
    """Returns the validation loss on the common windows."""
    evaluation: Callable[[], float]
    """Takes its own evaluation, as every ``EVERY`` steps, and returns the seconds."""
    seconds: float = 0.0
    done: int = 0
    curve: list[Point] = field(default_factory=list)
    evaluation_s: float = 0.0
    """Seconds of one of its own evaluations."""

    def reached(self, goal: float) -> Point | None:
        """Return where it first had a loss of ``goal`` or less; None: nowhere."""
        return next((point for point in self.curve if point.loss <= goal), None)

    def to(self, goal: float, evaluated: bool) -> float:
        """Return the seconds to a loss of ``goal``, with its own evaluations or without.

        Where it was not reached, they are those of the whole run: a lower bound.
        """
        point = self.reached(goal) or self.curve[-1]
        return point.seconds + (point.step // EVERY * self.evaluation_s if evaluated else 0.0)


def shakespeare(text: str = "") -> Job:
    """Return the recipe on a file of text; without one, on the source of the standard library."""
    data = (f"data.path={text}",) if text else ("data=python_docs", "data.tokenizer=chars")
    return Job("shakespeare", ("experiment=shakespeare_cpu", *data, "clip=norm"), steps=10)


def nanogpt(bench: Bench, contest: Contest | None = None) -> Iterator[Row]:
    """Measure a step beside nanoGPT's and beside a bare loop's, and the time to the same validation loss."""
    contest = contest or Contest(shakespeare(bench.text))
    yield from step_rows(bench, contest)
    yield from race_rows(bench, contest)


def step_rows(bench: Bench, contest: Contest) -> Iterator[Row]:
    """Measure the time of a step, in each format and with and without torch.compile."""
    job, hardware = contest.job, bench.hardware
    forms = [(mode, compiled) for mode in contest.modes for compiled in contest.compiled]
    if not any(map(shutil.which, ("c++", "g++", "clang++"))) and hardware.device.type == "cpu":
        forms = [(mode, compiled) for mode, compiled in forms if not compiled]
    for mode in contest.modes:
        if why := bench.left_out(mode):
            forms = [form for form in forms if form[0] != mode]
            yield Row(f"{job.name}, step, ours {mode} / {PLAIN} {mode}", "x", [], f"left out: {why}")
    blocks: dict[str, Callable[[], float]] = {}
    for mode, compiled in forms:
        bench.report(f"{job.name}: building {_form(mode, compiled)}")
        for name, block in _step_blocks(contest, mode, compiled, hardware).items():
            blocks[f"{name} {_form(mode, compiled)}"] = partial(block, job.steps)
    times = bench.interleave(job.name, blocks)
    for mode, compiled in forms:
        form = _form(mode, compiled)
        command = job.line(f"precision={mode}", *(["compile=default"] if compiled else []))
        for other, target in ((PLAIN, STEP_TARGET), (BARE, None)):
            yield _step_row(times, f"ours {form}", f"{other} {form}", job, command, target)
        if form != _form("fp32", False) and "fp32" in contest.modes:
            yield _step_row(times, f"ours {form}", f"{PLAIN} fp32", job, command, None)


def _step_row(times: Times, ours: str, other: str, job: Job, command: str, target: float | None) -> Row:
    each = [1e3 * min(times[name]) / job.steps for name in (ours, other)]
    how = f"{command}; a step takes at least {each[0]:.1f} and {each[1]:.1f} ms; {job.steps} steps a repeat"
    return Row(f"{job.name}, step, {ours} / {other}", "x", ratios(times, ours, other), how, target)


def _form(mode: str, compiled: bool) -> str:
    return f"{mode} compiled" if compiled else mode


def _step_blocks(contest: Contest, mode: str, compiled: bool, hardware: Hardware) -> dict[str, Block]:
    options: tuple[str, ...] = (f"precision={mode}", "steps=1000000", f"device={hardware.device}")
    options += ("compile=default",) if compiled else ()
    trainer = Trainer.from_config(contest.job.config(*options), hardware)
    bare = BareLoop(Workload(trainer))
    if compiled:
        bare.model.compile()
    loops = {"ours": steps_of(trainer), PLAIN: _plain(contest, trainer, 0, compiled).run}
    loops[BARE] = bare.run
    return {name: stopwatch(loop, hardware.device) for name, loop in loops.items()}


def _plain(contest: Contest, trainer: Trainer, seed: int, compiled: bool = False) -> PlainLoop:
    """Return the baseline on a trainer's text and in its format."""
    assert isinstance(trainer.datasets, TextDatasets)
    tokens, precision, device = trainer.datasets.tokens, trainer.config.precision, trainer.device
    shape = replace(contest.shape, vocabulary=tokens.tokenizer.vocab_size)
    autocast = None if precision.mode == "fp32" else partial(precision.autocast, device)
    return PlainLoop(shape, tokens.train, tokens.valid, seed, compiled, autocast, device)


def race_rows(bench: Bench, contest: Contest) -> Iterator[Row]:
    """Measure the time to a loss of ``GOAL``, or to the best that nanoGPT's loop reaches where that is higher.

    One repeat is a whole run of each, with a seed of its own; more than ``RACES`` are not worth their time. A run
    that does not reach the loss counts with its whole time; the figure is then a lower bound.
    """
    job, hardware = contest.job, bench.hardware
    amx = hardware.device.type == "cpu" and "amx_bf16" in hardware.cpu_flags
    fastest = ("precision=bf16",) if hardware.support("bf16") == NATIVE else ()
    options = {name: (*given, *fastest) if given else () for name, given in contest.ours.items()}
    found: dict[tuple[str, bool], list[float]] = {(name, full): [] for name in options for full in (False, True)}
    said: dict[str, list[str]] = {name: [] for name in options}
    failed: set[str] = set()
    for seed in range(min(bench.repeats, RACES)):
        racers = {name: _ours(contest, given, seed, hardware) for name, given in options.items()}
        racers[PLAIN] = plain = _baseline(contest, seed, hardware)
        race(racers, contest, lambda doing: bench.report(f"{job.name}: {doing}"))
        goal = max(GOAL, min(point.loss for point in plain.curve))
        for name in options:
            said[name].append(f"{_end(racers[name], goal)} against {_end(plain, goal)}")
            if racers[name].reached(goal) is None:
                failed.add(name)
            for full in (False, True):
                found[name, full].append(racers[name].to(goal, full) / plain.to(goal, full))
    for (name, full), values in found.items():
        title = f"{job.name}, time to the loss, {name} / {PLAIN}{', evaluations included' if full else ''}"
        target = None if name == DEFAULT else AMX_TARGET if amx else RACE_TARGET
        how = f"{job.line(*options[name])}; {'; '.join(said[name])}"
        yield Row(title, "x", values, how, target, lower_bound=name in failed)


def _end(one: Contestant, goal: float) -> str:
    reached = one.reached(goal)
    point = reached or one.curve[-1]
    return f"{point.loss:.3f}{'' if reached else ' (not reached)'} after {point.step} steps and {point.seconds:.1f} s"


def race(racers: Mapping[str, Contestant], contest: Contest, report: Callable[[str], object]) -> None:
    """Let all take their steps in turns, so that each round is under the same load, and note their losses."""
    for number in range(1, contest.rounds + 1):
        for name in list(racers)[:: -1 if number % 2 else 1]:
            racer = racers[name]
            report(f"{name}, round {number} of {contest.rounds}")
            steps = racer.steps * number // contest.rounds - racer.done
            racer.seconds += racer.block(steps)
            racer.done += steps
            if number >= contest.judged_from * contest.rounds:
                racer.curve.append(Point(racer.seconds, racer.done, racer.judge()))
    for racer in racers.values():
        racer.evaluation_s = racer.evaluation()


def _ours(contest: Contest, options: tuple[str, ...], seed: int, hardware: Hardware) -> Contestant:
    config = contest.job.config(*options, f"seed={seed}", f"device={hardware.device}")
    trainer = Trainer.from_config(config, hardware)
    batches = _windows(trainer, contest.windows)

    @torch.no_grad()
    def judge() -> float:
        trainer.model.eval()
        losses = []
        for batch in batches:
            with trainer.config.precision.autocast(trainer.device):
                losses.append(trainer.recipe.loss(trainer.model, batch).loss_sum.item())
        trainer.model.train()
        return sum(losses) / sum(map(trainer.recipe.count_targets, batches))

    block, evaluate = (stopwatch(work, trainer.device) for work in (steps_of(trainer), lambda _: trainer.evaluate()))
    return Contestant(trainer.plan.steps, block, judge, partial(evaluate, 1))


def _baseline(contest: Contest, seed: int, hardware: Hardware) -> Contestant:
    trainer = Trainer.from_config(contest.job.config("precision=fp32", f"device={hardware.device}"), hardware)
    loop, batches = _plain(contest, trainer, seed), _windows(trainer, contest.windows)

    @torch.no_grad()
    def judge() -> float:
        windows = [batch["tokens"] for batch in batches]
        losses = [loop.model(tokens[:, :-1], tokens[:, 1:]).item() * len(tokens) for tokens in windows]
        return sum(losses) / sum(map(len, windows))

    block, evaluate = (stopwatch(work, loop.device) for work in (loop.run, lambda _: loop.evaluate()))
    return Contestant(contest.shape.steps, block, judge, partial(evaluate, 1))


def _windows(trainer: Trainer, count: int) -> list[Batch]:
    """Return the common windows of the validation text, spread evenly over it."""
    valid = trainer.datasets.valid
    size = trainer.plan.batching.micro_batch_size
    return [to_device(valid.batch(samples), trainer.device) for samples in evaluation_samples(len(valid), count, size)]
