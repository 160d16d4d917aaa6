"""The forecast of a step's memory against a ledger of the real one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from evidence.memory.trial import peak_of
from recipes.bignet import BigNet
from tests.helpers import compose, trainer_of
from trainer.data.contract import Batch
from trainer.errors import RunError, UserError
from trainer.hardware import detect, peak_memory_bytes, reset_peak_memory
from trainer.recipe import LossOutput
from trainer.run.forecast import forecast

GPT2 = ("recipe=gpt2", "recipe.size=nano", "recipe.context=64", "data=synthetic", "data.vocab_size=512")
RESNET = (
    "recipe=resnet",
    "recipe.arch=shufflenet_v2_x0_5",
    "recipe.image_size=32",
    "data=synthetic",
    "data.samples=64",
)
BIGNET = ("recipe=bignet", "recipe.width=128", "recipe.layers=6", "data.samples=256")


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (GPT2, "precision=bf16"),
        (GPT2, "activation_checkpointing=blocks optimizer=sgd clip=value"),
        (GPT2, "activation_checkpointing=selective optimizer=sgd clip=value"),
        (RESNET, "precision=fp16"),
        *((BIGNET, f"precision={mode}") for mode in ("fp64", "fp32", "bf16_sr", "fp16_pure")),
        (BIGNET, "precision=bf16_master optimizer=muon"),
        (BIGNET, "optimizer.state=bf16"),
        # These read numbers from tensors.
        (BIGNET, "optimizer=adafactor"),
        (BIGNET, "optimizer=lamb"),
        (BIGNET, "optimizer=adamw optimizer.name=ASGD ~optimizer.options.betas optimizer.weight_decay=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_agrees_with_a_real_step(job: tuple[str, ...], options: str) -> None:
    line = [*job, *options.split(), "device=cpu", "batch_size=12", "micro_batch_size=4"]
    found, trainer = forecast(compose(*line)).peak_bytes, trainer_of(*line)
    trainer.loss_scale.scale.fill_(1.0)
    batches = trainer.batches()
    trainer.train_step(next(batches))
    microbatches = next(batches)
    measured = peak_of(trainer, lambda: trainer.train_step(microbatches))
    assert found == pytest.approx(measured, rel=0.001 if job is BIGNET else 0.05)
    if "activation_checkpointing" in options:  # activations are computed again
        assert forecast(compose(*line, "activation_checkpointing.mode=none")).peak_bytes > 1.1 * found


def test_accumulation_holds_gradients_while_the_next_microbatch_runs() -> None:
    line = (*BIGNET, "device=cpu", "micro_batch_size=64")
    once, twice, often = (forecast(compose(*line, f"batch_size={64 * count}")) for count in (1, 2, 5))
    assert twice.peak_bytes > 1.05 * once.peak_bytes
    waiting = 3 * 64 * 128 * 2 * 4  # of the further microbatches: x and y in fp32
    assert often.peak_bytes == twice.peak_bytes + waiting


def test_a_model_larger_than_the_machine_takes_no_memory() -> None:
    device = detect("cpu").device
    config = compose("recipe=bignet", "recipe.width=65536", "data.samples=8", "batch_size=4", "device=cpu")
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    ledger = forecast(config)
    assert peak_memory_bytes(device) - before < 2**29
    assert ledger.at_peak["weights"] == 20 * 4 * 65536 * 65537
    assert ledger.highest["optimizer"] >= 2 * ledger.at_peak["weights"]


class Whimsical(BigNet):
    name = ""  # not to be found by recipe=

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        output = super().loss(model, batch)
        return output if output.loss_sum.item() > 0 else output._replace(loss_sum=-output.loss_sum)


def test_what_cannot_be_forecast_is_reported() -> None:
    config = replace(compose(*BIGNET, "device=cpu"), recipe=Whimsical(layers=6, width=128))
    with pytest.raises(RunError, match="profiler=memory"):
        forecast(config)
    with pytest.raises(UserError, match="parallel=ddp"):
        forecast(compose(*BIGNET, "device=cpu", "parallel=ddp"))
