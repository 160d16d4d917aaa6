"""The language model beside nanoGPT's recipe for a CPU: the time of a step, and the time to a validation loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from evidence.bench.baselines import BareLoop, Workload
from evidence.bench.jobs import Job, steps_of
from evidence.bench.nanogpt_loop import PlainLoop, PlainShape
from evidence.bench.turns import Block, Row, Times, interleave, ratios, stopwatch
from trainer.data.contract import Batch
from trainer.data.evaluation import evaluation_samples
from trainer.data.loader import to_device
from trainer.hardware import NATIVE, Hardware
from trainer.trainer import Trainer

GOAL = 1.89
"""Validation loss in nats per character: what the recipe reaches with the text of tinyshakespeare."""
EVERY = 250
"""Steps from one evaluation to the next, as the recipe has it."""
BEST = ("steps=1000", "optimizer.lr=4e-3", "schedule.final=0")
STEP_TARGET, RACE_TARGET, AMX_TARGET = 1.0, 0.7, 0.5
"""Targets of times over nanoGPT's: of a step; to the loss; to the loss with AMX."""


@dataclass(frozen=True)
class Contest:
    """What is measured; tests make it smaller."""

    job: Job
    shape: PlainShape = field(default_factory=PlainShape)
    """Of the baseline; the vocabulary is the text's."""
    best: tuple[str, ...] = BEST
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

    def to(self, goal: float, evaluated: bool) -> float | None:
        """Return the seconds to a loss of ``goal``, with its own evaluations or without; None: not reached."""
        for point in self.curve:
            if point.loss <= goal:
                return point.seconds + (point.step // EVERY * self.evaluation_s if evaluated else 0.0)
        return None


def shakespeare(text: str = "") -> Job:
    """Return the recipe on a file of text; without one, on the source of the standard library."""
    data = (f"data.path={text}",) if text else ("data=python_docs", "data.tokenizer=chars")
    return Job("shakespeare", ("experiment=shakespeare_cpu", *data, "clip=norm"), steps=10)


def nanogpt(
    hardware: Hardware, repeats: int, folder: Path, text: str = "", contest: Contest | None = None
) -> list[Row]:
    """Measure a step beside nanoGPT's and beside a bare loop's, and the time to the same validation loss."""
    contest = contest or Contest(shakespeare(text))
    return step_rows(contest, hardware, repeats) + race_rows(contest, hardware, min(repeats, 3))


def step_rows(contest: Contest, hardware: Hardware, repeats: int) -> list[Row]:
    """Measure the time of a step, in each format and with and without torch.compile."""
    modes = [mode for mode in contest.modes if mode == "fp32" or hardware.support(mode) == NATIVE]
    compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    forms = [(mode, compiled) for mode in modes for compiled in contest.compiled if compiler or not compiled]
    blocks: dict[str, Callable[[], float]] = {}
    for mode, compiled in forms:
        for name, block in _step_blocks(contest, mode, compiled, hardware).items():
            blocks[f"{name} {_form(mode, compiled)}"] = partial(block, contest.job.steps)
    times = interleave(blocks, repeats)
    rows = []
    for mode, compiled in forms:
        form = _form(mode, compiled)
        command = contest.job.line(f"precision={mode}", *(["compile=default"] if compiled else []))
        for other, target in (("nanoGPT's loop", STEP_TARGET), ("a bare loop", None)):
            rows.append(_step_row(times, f"ours {form}", f"{other} {form}", contest.job, command, target))
    plain = f"nanoGPT's loop {_form('fp32', False)}"
    for mode, compiled in forms[1:]:
        rows.append(_step_row(times, f"ours {_form(mode, compiled)}", plain, contest.job, contest.job.line(), None))
    return rows


def _step_row(times: Times, ours: str, other: str, job: Job, command: str, target: float | None) -> Row:
    each = [1e3 * min(times[name]) / job.steps for name in (ours, other)]
    how = f"{command}; a step takes at least {each[0]:.1f} and {each[1]:.1f} ms; {job.steps} steps a repeat"
    return Row(f"{job.name}, step, {ours} / {other}", "x", ratios(times, ours, other), how, target)


def _form(mode: str, compiled: bool) -> str:
    return f"{mode} compiled" if compiled else mode


def _step_blocks(contest: Contest, mode: str, compiled: bool, hardware: Hardware) -> dict[str, Block]:
    options = (f"precision={mode}", "steps=1000000", f"device={hardware.device}")
    options += ("compile=default",) if compiled else ()
    trainer = Trainer.from_config(contest.job.config(*options), hardware)
    bare = BareLoop(Workload(trainer))
    if compiled:
        bare.model.compile()
    loops = {"ours": steps_of(trainer), "nanoGPT's loop": _plain(contest, trainer, 0, compiled).run}
    loops["a bare loop"] = bare.run
    return {name: stopwatch(loop, hardware.device) for name, loop in loops.items()}


def _plain(contest: Contest, trainer: Trainer, seed: int, compiled: bool = False) -> PlainLoop:
    """Return the baseline on a trainer's text and in its format."""
    tokens, precision, device = trainer.datasets.tokens, trainer.config.precision, trainer.device
    shape = replace(contest.shape, vocabulary=tokens.tokenizer.vocab_size)
    autocast = None if precision.mode == "fp32" else partial(precision.autocast, device)
    return PlainLoop(shape, tokens.train, tokens.valid, seed, compiled, autocast, device)


def race_rows(contest: Contest, hardware: Hardware, repeats: int) -> list[Row]:
    """Measure the time to a loss of ``GOAL``, or to the best that nanoGPT's loop reaches where that is higher.

    One repeat is a whole run of each, with a seed of its own.
    """
    amx = hardware.device.type == "cpu" and "amx_bf16" in hardware.cpu_flags
    target = AMX_TARGET if amx else RACE_TARGET
    names = {"ours": (), "ours, other options": contest.best}
    found: dict[tuple[str, bool], list[float]] = {(name, full): [] for name in names for full in (False, True)}
    said: dict[str, list[str]] = {name: [] for name in names}
    for seed in range(repeats):
        racers = {name: _ours(contest, options, seed, hardware) for name, options in names.items()}
        racers["nanoGPT's loop"] = plain = _baseline(contest, seed, hardware)
        race(list(racers.values()), contest.rounds, contest.judged_from)
        goal = max(GOAL, min(point.loss for point in plain.curve))
        for name in names:
            last = racers[name].curve[-1]
            said[name].append(f"{_reached(plain, goal)} and {_reached(racers[name], goal)} (at last {last.loss:.3f})")
            for full in (False, True):
                own, other = racers[name].to(goal, full), plain.to(goal, full)
                if own is not None and other is not None:
                    found[name, full].append(own / other)
    rows = []
    for (name, full), values in found.items():
        title = f"{contest.job.name}, time to the loss, {name} / nanoGPT's loop"
        title += ", with evaluations" if full else ""
        how = f"{contest.job.line(*names[name])}; to {GOAL:g}: nanoGPT's loop and ours: {'; '.join(said[name])}"
        rows.append(Row(title, "x", values, how, target if names[name] else None))
    return rows


def _reached(one: Contestant, goal: float) -> str:
    for point in one.curve:
        if point.loss <= goal:
            return f"{point.loss:.3f} after {point.step} steps and {point.seconds:.1f} s"
    return "not reached"


def race(racers: Sequence[Contestant], rounds: int, judged_from: float) -> None:
    """Let all take their steps in turns, so that each round is under the same load, and note their losses."""
    for number in range(1, rounds + 1):
        for racer in list(racers)[:: -1 if number % 2 else 1]:
            steps = racer.steps * number // rounds - racer.done
            racer.seconds += racer.block(steps)
            racer.done += steps
            if number >= judged_from * rounds:
                racer.curve.append(Point(racer.seconds, racer.done, racer.judge()))
    for racer in racers:
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
