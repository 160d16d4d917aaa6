"""What the use of a trained model costs: generation with and without a cache, evaluation beside training's forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from evidence.bench.jobs import Job, gpt2_job, resnet_job
from evidence.bench.turns import Row, interleave, ratios, stopwatch
from inference.evaluate import Opened, evaluate
from inference.generate import GenerateOptions, continued, without_dropout
from inference.setting import Setting
from trainer.data.loader import to_device
from trainer.hardware import Hardware
from trainer.trainer import Trainer

TOKENS = 255
"""Generated after a prompt of one token: as many as gpt2 mini has room for."""


def generation(
    hardware: Hardware, repeats: int, folder: Path, job: Job | None = None, tokens: int = TOKENS
) -> list[Row]:
    """Measure how many times as fast the cache of keys and values makes a text."""
    job = job or gpt2_job(hardware)
    return [
        _generation(job, mode, target, hardware, repeats, tokens) for mode, target in (("fp32", 5.0), ("bf16", None))
    ]


def _generation(job: Job, mode: str, target: float | None, hardware: Hardware, repeats: int, tokens: int) -> Row:
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
    speedup = ratios(interleave(blocks, repeats), "without", "with")
    how = f"{job.line(f'precision={mode}')}, random weights; {tokens} tokens, one text at a time"
    return Row(f"{job.name} {mode}, generation, with cache / without", "x", speedup, how, target, False)


def evaluation(hardware: Hardware, repeats: int, folder: Path, jobs: Sequence[Job] = ()) -> list[Row]:
    """Measure the samples per second of evaluate.py beside those of training's forward pass."""
    return [_evaluation(job, hardware, repeats) for job in jobs or (gpt2_job(hardware), resnet_job(hardware))]


def _evaluation(job: Job, hardware: Hardware, repeats: int, batches: int = 4) -> Row:
    config = job.config("precision=bf16", f"device={hardware.device}")
    trainer = Trainer.from_config(config, hardware)
    config, size = trainer.config, trainer.plan.batching.micro_batch_size
    count = min(batches * size, len(trainer.datasets.valid))
    setting = Setting(config, hardware, own_data=True, own_precision=True, eval_samples=count)
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
    times = interleave(blocks, repeats)
    rates = [ratio * count / (batches * size) for ratio in ratios(times, "forward", "evaluation")]
    how = f"samples per second, {job.line('precision=bf16')}; {count} samples, loading included in evaluation only"
    return Row(f"{job.name}, evaluation / training's forward", "x", rates, how, 1.0, False)
