"""What the use of a trained model costs: generation with and without a cache, evaluation beside training's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from evidence.bench.jobs import Job, gpt2_job, resnet_job
from evidence.bench.measurement import Bench
from evidence.bench.turns import Row, ratios, stopwatch
from inference.evaluate import Opened, evaluate
from inference.generate import GenerateOptions, continued, without_dropout
from inference.setting import Setting
from trainer.data.loader import to_device
from trainer.trainer import Trainer

TOKENS = 255
"""Generated after a prompt of one token: as many as gpt2 mini has room for."""


def generation(bench: Bench, job: Job | None = None, tokens: int = TOKENS) -> Iterator[Row]:
    """Measure how many times as fast the cache of keys and values makes a text."""
    job = job or gpt2_job(bench.hardware)
    for mode, target in (("fp32", 5.0), ("bf16", None)):
        if why := bench.left_out(mode):
            yield Row(_title(job, mode), "x", [], f"left out: {why}")
        else:
            yield _generation(bench, job, mode, target, tokens)


def _title(job: Job, mode: str) -> str:
    return f"{job.name} {mode}, generation, with cache / without"


def _generation(bench: Bench, job: Job, mode: str, target: float | None, tokens: int) -> Row:
    hardware = bench.hardware
    device = hardware.device
    trainer = Trainer.from_config(job.config(f"precision={mode}", f"device={device}"), hardware)
    precision, network = trainer.config.precision, trainer.model.get_submodule(trainer.recipe.name)
    network = without_dropout(network.eval())
    prompt = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def text(cache: bool, _: int) -> None:
        with precision.autocast(device):
            continued(network, prompt, tokens, GenerateOptions(cache=cache))

    blocks: dict[str, Callable[[], float]] = {
        name: partial(stopwatch(partial(text, name == "with"), device), 1) for name in ("without", "with")
    }
    speedup = ratios(bench.interleave(f"{job.name} {mode}", blocks), "without", "with")
    how = f"{job.line(f'precision={mode}')}, random weights; {tokens} tokens, one text at a time"
    return Row(_title(job, mode), "x", speedup, how, target, False)


def evaluation(bench: Bench, jobs: Sequence[Job] = ()) -> Iterator[Row]:
    """Measure the samples per second of evaluate.py beside those of training's forward pass."""
    for job in jobs or (gpt2_job(bench.hardware), resnet_job(bench.hardware)):
        yield _evaluation(bench, job)


def _evaluation(bench: Bench, job: Job, batches: int = 4) -> Row:
    hardware, precision = bench.hardware, f"precision={bench.mode}"
    config = job.config(precision, f"device={hardware.device}")
    trainer = Trainer.from_config(config, hardware)
    config, size = trainer.config, trainer.plan.batching.micro_batch_size
    count = min(batches * size, len(trainer.datasets.valid))
    setting = Setting(config, hardware, own_data=True, eval_samples=count)
    opened = Opened(setting, trainer.datasets, trainer.datasets.valid, trainer.model, None)
    device, stream = hardware.device, trainer.batches()
    # Already in memory: loading counts for the evaluation only.
    loaded = [to_device(next(stream)[0], device) for _ in range(batches)]

    def forward(_: int) -> None:
        trainer.model.train()
        for batch in loaded:
            with config.precision.autocast(device):
                trainer.recipe.loss(trainer.model, batch).loss_sum.item()

    def evaluated(_: int) -> None:
        trainer.model.eval()
        evaluate(opened)

    blocks: dict[str, Callable[[], float]] = {
        name: partial(stopwatch(work, device), 1) for name, work in (("forward", forward), ("evaluation", evaluated))
    }
    times = bench.interleave(job.name, blocks)
    rates = [ratio * count / (batches * size) for ratio in ratios(times, "forward", "evaluation")]
    how = f"samples per second, {job.line(precision)}; {count} samples, loading included in evaluation only"
    return Row(f"{job.name}, evaluation / training's forward", "x", rates, how, 1.0, False)
