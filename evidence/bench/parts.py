"""What parts of a step cost: optimizers, averaged weights, diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from evidence.bench.jobs import Job, gpt2_job, steps_of
from evidence.bench.measurement import Bench
from evidence.bench.turns import Row, ratios, stopwatch
from trainer.errors import UserError
from trainer.parallel.world import World
from trainer.profiling.diagnostics import Numerics
from trainer.trainer import Trainer

OPTIMIZERS = ("muon", "lion", "lamb", "adafactor", "schedulefree schedule=constant")
"""Choices of ``optimizer``, with what else they need, that are measured beside adamw."""


def optimizers(bench: Bench, job: Job | None = None, names: Sequence[str] = OPTIMIZERS) -> Iterator[Row]:
    """Measure a step with each optimizer beside one with AdamW."""
    hardware, job = bench.hardware, job or gpt2_job(bench.hardware)
    blocks: dict[str, Callable[[], float]] = {}
    missing: dict[str, str] = {}
    for name in ("adamw", *names):
        overrides = (*f"optimizer={name}".split(), "steps=1000000", f"device={hardware.device}")
        try:
            trainer = Trainer.from_config(job.config(*overrides), hardware)
        except UserError as error:  # the library that has it is not installed
            missing[name] = str(error)
            continue
        blocks[name] = partial(stopwatch(steps_of(trainer), hardware.device), job.steps)
    times = bench.interleave(job.name, blocks)
    for name in names:
        title = f"{job.name}, a step with {name.partition(' ')[0]} / with adamw"
        if name in missing:
            yield Row(title, "x", [], f"not measured: {missing[name]}")
        else:
            yield Row(title, "x", ratios(times, name, "adamw"), job.line(f"optimizer={name}"))


def ema_cost(bench: Bench, job: Job | None = None) -> Iterator[Row]:
    """Measure what ema=default adds to a step: the update of the averages."""
    hardware, job = bench.hardware, job or gpt2_job(bench.hardware)
    options = ("ema=default", "steps=1000000", f"device={hardware.device}")
    trainer = Trainer.from_config(job.config(*options), hardware)

    def update(steps: int) -> None:
        for _ in range(steps):
            trainer.average.update(trainer.step)

    timed = {"step": steps_of(trainer), "update": update}
    blocks: dict[str, Callable[[], float]] = {
        name: partial(stopwatch(work, hardware.device), 1) for name, work in timed.items()
    }
    times = bench.interleave(job.name, blocks, 2 * bench.repeats)
    share = [100 * update / (step - update) for step, update in zip(times["step"], times["update"], strict=True)]
    how = f"{job.line('ema=default')}; steps and further updates of the averages alternate"
    yield Row(f"{job.name}, ema=default, over ema=none", "%", share, how, 2.0)


def diagnostics_cost(bench: Bench, job: Job | None = None) -> Iterator[Row]:
    """Measure what diagnostics=numerics adds to its step, as a share of the steps from it to the next."""
    hardware, job = bench.hardware, job or gpt2_job(bench.hardware)
    trainer = Trainer.from_config(job.config("clip=norm", "steps=1000000", f"device={hardware.device}"), hardware)
    every = Numerics().every
    diagnostics = Numerics(1).start(trainer.model, trainer.update, trainer.config.precision.half, every, World())
    batches, device = trainer.batches(), hardware.device

    def update(measured: bool) -> float:
        correction = trainer.gradients(next(batches)).correction

        def step(_: int) -> None:
            with diagnostics.step(1) if measured else nullcontext():
                trainer.update.step(0, correction)
            list(diagnostics.collect())

        return stopwatch(step, device)(1)

    blocks: dict[str, Callable[[], float]] = {
        "step": partial(stopwatch(steps_of(trainer), device), 1),
        "update": partial(update, False),
        "measured": partial(update, True),
    }
    times = bench.interleave(job.name, blocks, 2 * bench.repeats)
    columns = zip(times["step"], times["update"], times["measured"], strict=True)
    share = [100 * (measured - update) / (every * step) for step, update, measured in columns]
    how = f"{job.line()}; updates with and without a measurement alternate, the difference is spread over {every} steps"
    yield Row(f"{job.name}, diagnostics=numerics, over diagnostics=none", "%", share, how, 2.0)
