"""What is forecast to fit: ``micro_batch_size=auto`` before the start, and the advice where memory ran out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from mantissa.ledger import MIB, STEADY, Ledger
from recipes.language import torch_can_chunk
from tests.helpers import compose
from trainer.config.schema import Config
from trainer.config.step import Plan
from trainer.data.loader import Batching
from trainer.errors import OutOfMemory, RunError
from trainer.hardware import Hardware, detect
from trainer.parallel.world import World
from trainer.recipe import Decision
from trainer.run.memory import fit
from trainer.run.memory.fit import USABLE, choose, fit_plan, needed_bytes, out_of_memory, rough_bytes
from trainer.run.memory.forecast import forecast, required_bytes
from trainer.run.resume import as_before
from trainer.run_folder import RunFolder

BIGNET = ["recipe=bignet", "recipe.width=64", "recipe.layers=4", "data.samples=64", "checkpoint=none"]


def fitted(
    monkeypatch: pytest.MonkeyPatch, free_mib: float, *overrides: str, world: World | None = None
) -> tuple[Plan, list[Decision]]:
    monkeypatch.setattr(fit, "available_bytes", lambda device: int(free_mib * MIB))
    config = compose(*overrides, "device=cpu")
    hardware = detect("cpu")
    resolved = config.resolve(hardware, world)
    datasets = resolved.config.recipe.datasets(resolved.config.data, 0)
    fitting, plan, choices, _ = fit_plan(config, resolved, hardware, world or World(), datasets, overrides)
    assert fitting.micro_batch_size == plan.batching.micro_batch_size
    return plan, [choice for choice in choices if choice.key == "micro_batch_size"]


def need_mib(*overrides: str) -> float:
    config = compose(*overrides, "device=cpu")
    return required_bytes(config, forecast(config)) / MIB


def test_auto_shrinks_to_the_largest_divisor_that_fits_and_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    free = need_mib(*BIGNET, "micro_batch_size=128") / USABLE * 1.05
    plan, [choice] = fitted(monkeypatch, free, *BIGNET)
    assert (plan.batching.batch_size, plan.batching.micro_batch_size, choice.value) == (512, 128, 128)
    assert choice.why.startswith("forecast to fit; 512 is forecast to need ")
    assert need_mib(*BIGNET, "micro_batch_size=256") > USABLE * free
    plan, [choice] = fitted(monkeypatch, need_mib(*BIGNET) / USABLE * 1.01, *BIGNET)
    assert (plan.batching.micro_batch_size, choice.why) == (512, "CPU default")


def test_ordinary_starts_are_not_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts: list[object] = []
    monkeypatch.setattr(fit, "forecast", forecasts.append)
    for job in (BIGNET, ["recipe=gpt2", "data=synthetic", "data.vocab_size=4096"], ["recipe=resnet"]):
        fitted(monkeypatch, 8 * 1024, *job)
    assert not forecasts


def test_large_models_large_images_and_large_vocabularies_are() -> None:
    def rough(*overrides: str) -> float:
        config, plan, *_ = compose(*overrides, "device=cpu").resolve(detect("cpu"))
        datasets = config.recipe.datasets(config.data, 0)
        return (rough_bytes(config.recipe, datasets, plan.batching.micro_batch_size) or 0) / 2**30

    assert rough("recipe=gpt2", "recipe.size=350M", "data=synthetic") > 16
    assert rough("recipe=gpt2", "recipe.size=nano", "recipe.context=1024", "data=synthetic") > 16
    assert rough("recipe=resnet", "recipe.image_size=512", "data=synthetic", "data.samples=8") > 16
    assert rough(*BIGNET) < 0.2


def test_a_microbatch_set_by_the_user_is_kept_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = need_mib(*BIGNET, "micro_batch_size=128") / USABLE * 1.05
    with caplog.at_level(logging.WARNING, "mantissa"):
        plan, choices = fitted(monkeypatch, free, *BIGNET, "micro_batch_size=512")
        assert (plan.batching.micro_batch_size, choices) == (512, [])
        fitted(monkeypatch, 0.01, *BIGNET, "micro_batch_size=512")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("micro_batch_size=512 is forecast to need ")
    assert first.endswith("; micro_batch_size=128 is forecast to fit")
    assert second.endswith("; no smaller one is forecast to fit")


def test_what_cannot_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ["recipe=bignet", "recipe.layers=3", "recipe.width=1024", "data.samples=64"]
    smaller = need_mib(*job[:2], "recipe.width=512", *job[3:], "micro_batch_size=1")
    with pytest.raises(OutOfMemory) as caught:
        fitted(monkeypatch, smaller * 1.3, *job)
    text = str(caught.value)
    assert "no smaller one is forecast to fit; nothing was started.\n" in text
    assert options(text) == ["recipe.width=512 micro_batch_size=1"]


def test_what_leaves_the_model_as_it_is_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ["recipe=bignet", "recipe.layers=3", "recipe.width=512", "data.samples=64"]
    together = ["micro_batch_size=1", "checkpoint.background=false", "activation_checkpointing=blocks"]
    least = need_mib(*job, *together, "precision=bf16_master")
    with pytest.raises(OutOfMemory) as caught:
        fitted(monkeypatch, least / USABLE * 1.02, *job, "micro_batch_size=auto", "precision=fp32")
    assert options(str(caught.value))[0] == f"{' '.join(together)} precision=bf16_master"


def options(text: str) -> list[str]:
    """The overrides that a message says will fit."""
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


def advised(monkeypatch: pytest.MonkeyPatch, free_mib: float, *overrides: str) -> str:
    monkeypatch.setattr(fit, "available_bytes", lambda device: int(free_mib * MIB))
    error = RuntimeError("alloc_cpu.cpp: can't allocate memory: you tried to allocate 10485760 bytes. Error code 12")
    ended = out_of_memory(error, [*BIGNET, "device=cpu", *overrides])
    assert ended.exit_code == 4
    assert str(ended).startswith("out of memory (tried to allocate 10.0 MiB)\n")
    return str(ended)


def test_where_memory_ran_out_the_largest_microbatch_that_fits_keeps_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    text = advised(monkeypatch, 10, "batch_size=6000", "micro_batch_size=6000")
    size = int(options(text)[0].removeprefix("micro_batch_size="))
    assert 6000 % size == 0
    peaks = next(line for line in text.splitlines() if line.startswith("peak")).split()
    assert float(peaks[2]) < 0.9 * 10 < float(peaks[1])
    assert size > 1000  # and not the smallest


def test_checkpointing_and_bf16_are_offered_where_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ["batch_size=4000", "micro_batch_size=4000", "recipe.layers=12"]
    assert options(advised(monkeypatch, 10_000, *job))[1:] == ["activation_checkpointing=blocks", "precision=bf16"]
    text = advised(monkeypatch, 10_000, *job, "activation_checkpointing=blocks", "precision=fp16")
    assert [option.split("=")[0] for option in options(text)] == ["micro_batch_size"]
    assert "precision=bf16" not in text
    assert "Nothing that was tried is forecast to fit" in advised(monkeypatch, 0.01, "batch_size=512")


def test_without_a_forecast_there_still_is_advice() -> None:
    error = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nmore"), [*BIGNET, "parallel=ddp"])
    assert str(error).startswith(
        "out of memory (CUDA out of memory. Tried 2 GiB.)\nTo save memory, try half the micro_"
    )


class Two(World):
    """Two processes on one machine, the other of which has less."""

    size = 2

    def __init__(self, others: float) -> None:
        self.others = int(others * MIB)

    def largest(self, value: int) -> int:
        return max(value, -self.others)


def test_processes_of_a_machine_share_its_memory_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    alone = need_mib(*BIGNET, "batch_size=256", "micro_batch_size=64") / USABLE * 1.05
    plan, _ = fitted(monkeypatch, 2 * alone, *BIGNET, world=Two(2 * alone))
    assert (plan.batching.ranks, plan.batching.micro_batch_size) == (2, 64)
    plan, _ = fitted(monkeypatch, 16 * alone, *BIGNET, world=Two(alone))
    assert plan.batching.micro_batch_size == 64


def test_fsdp_shares_weights_gradients_and_optimizer_state() -> None:
    ledger = forecast(compose(*BIGNET, "batch_size=32", "micro_batch_size=32", "device=cpu"))
    steady = sum(ledger.at_peak[name] for name in STEADY)
    needs = {}
    for mode in ("ddp", "fsdp"):
        config = compose(*BIGNET, f"parallel={mode}", "device=cpu")
        needs[mode] = needed_bytes(config, Batching(64, 32, 2), 32)
    assert needs["ddp"] - needs["fsdp"] == steady - steady // 2 > 0


def test_a_model_that_cannot_be_forecast_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: Config) -> Ledger:
        raise RunError("it decides by values")

    monkeypatch.setattr(fit, "forecast", fails)
    plan, [choice] = fitted(monkeypatch, 1, *BIGNET)
    assert (plan.batching.micro_batch_size, choice.why) == (512, "CPU default")


GPT2 = ["recipe=gpt2", "recipe.size=nano", "recipe.context=64", "data=synthetic", "data.vocab_size=8192"]


@pytest.mark.skipif(not torch_can_chunk(), reason="this torch has no chunked linear_cross_entropy")
def test_on_a_gpu_the_logits_are_whole_where_they_are_forecast_to_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = [*GPT2, "batch_size=16", "micro_batch_size=16", "checkpoint=none"]
    whole, chunked = (need_mib(*job, f"recipe.chunked_loss={form}") / USABLE for form in ("false", "true"))
    assert chunked < 0.7 * whole
    monkeypatch.setattr(Hardware, "is_gpu", True)

    def planned(free_mib: float, *more: str) -> tuple[object, int]:
        monkeypatch.setattr(fit, "available_bytes", lambda device: int(free_mib * MIB))
        config = compose(*job, *more, "device=cpu")
        resolved = config.resolve(detect("cpu"))
        datasets = resolved.config.recipe.datasets(resolved.config.data, 0)
        fitted = fit_plan(config, resolved, detect("cpu"), World(), datasets, job)
        assert [each.value for each in fitted.decisions if each.key.endswith("loss")] == [True] * (free_mib < whole)
        before = {"recipe.chunked_loss": fitted.config.recipe.chunked_loss}  # a resumed run has its form again
        again = as_before(RunFolder(tmp_path), before, config, resolved)
        assert again.config.recipe.chunked_loss == fitted.config.recipe.chunked_loss
        return fitted.config.recipe.chunked_loss, fitted.plan.batching.micro_batch_size

    assert planned(1.01 * whole) == (False, 16)
    assert planned(0.98 * whole) == planned(1.02 * chunked) == (True, 16)
    chosen, size = planned(0.7 * chunked, "micro_batch_size=auto")
    assert chosen is True
    assert size < 16


def test_a_resumed_run_keeps_its_microbatch(tmp_path: Path) -> None:
    config = compose(*BIGNET)
    resolved = config.resolve(detect("cpu"))
    for recorded, expected in ((32, 32), (3, 512)):
        before = {"micro_batch_size": recorded}
        now, kept, explained, _ = as_before(RunFolder(tmp_path), before, config, resolved)
        assert now.micro_batch_size == kept.batching.micro_batch_size == expected
        assert [choice.value for choice in explained if choice.key == "micro_batch_size"] == [expected]


@pytest.mark.parametrize(("mixup", "fitting"), [(0, 3), (0.2, 2)])
def test_a_microbatch_divides_what_a_rank_has_and_is_even_for_mixed_images(
    mixup: float, fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "needed_bytes", lambda config, batching, size: 100 * size)
    config = compose("recipe=resnet", f"augment.mixup={mixup}")
    assert choose(config, Batching(12, 6, 2), 450, [])[0] == fitting  # 4 would fit, and divide the whole batch
