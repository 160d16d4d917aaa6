"""The microbatch that fits: ``micro_batch_size=auto`` before the start, and where memory ran out."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest

from mantissa.step.ledger import MIB, STEADY, Ledger
from tests.helpers import compose, needs_chunks
from trainer.config import settle
from trainer.config.schema import Config
from trainer.config.settle import Plan
from trainer.data.loader import Batching
from trainer.errors import OutOfMemory, RunError
from trainer.hardware import Hardware, detect
from trainer.parallel.world import World
from trainer.recipe import Decision
from trainer.run import fit, start
from trainer.run.fit import USABLE, halved, needed_bytes, ran_out
from trainer.run.forecast import forecast, required_bytes

BIGNET = ["recipe=bignet", "recipe.width=64", "recipe.layers=4", "data.samples=64", "checkpoint=none"]


def fitted(
    monkeypatch: pytest.MonkeyPatch, free_mib: float, *overrides: str, world: World | None = None
) -> tuple[Plan, list[Decision]]:
    monkeypatch.setattr(settle, "available_bytes", lambda device: int(free_mib * MIB))
    config = compose(*overrides, "device=cpu")
    hardware = detect("cpu")
    plan = settle.settle(settle.plan_of(config, hardware, world))
    smaller = fit.fit(plan, config.micro_batch_size == "auto")
    if smaller is not None:
        plan = settle.settle(settle.plan_of(config, hardware, world, fitted=smaller, datasets=plan.datasets))
    return plan, [choice for choice in plan.decisions if choice.key == "micro_batch_size"]


def need_mib(*overrides: str) -> float:
    config = compose(*overrides, "device=cpu")
    return required_bytes(config, forecast(config)) / MIB


def test_auto_is_halved_until_it_fits_and_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    free = need_mib(*BIGNET, "micro_batch_size=128") / USABLE * 1.05
    plan, [choice] = fitted(monkeypatch, free, *BIGNET)
    assert (plan.batching.batch_size, plan.batching.micro_batch_size, choice.value) == (512, 128, 128)
    assert choice.why.startswith("forecast to fit; 512 is forecast to need ")
    assert need_mib(*BIGNET, "micro_batch_size=256") > USABLE * free
    plan, [choice] = fitted(monkeypatch, need_mib(*BIGNET) / USABLE * 1.01, *BIGNET)
    assert (plan.batching.micro_batch_size, choice.why) == (512, "the recipe's own for a CPU")


@pytest.mark.parametrize(
    ("job", "is_forecast"),
    [
        (BIGNET, False),
        (["recipe=gpt2", "data=synthetic", "data.vocab_size=4096"], False),
        (["recipe=resnet"], False),
        (["recipe=gpt2", "recipe.size=350M", "data=synthetic"], True),
        (["recipe=gpt2", "recipe.size=nano", "recipe.context=1024", "data=synthetic"], True),
        (["recipe=resnet", "recipe.image_size=512", "data=synthetic", "data.samples=8"], True),
    ],
)
def test_large_models_images_and_vocabularies_are_forecast_and_ordinary_starts_are_not(
    job: list[str], is_forecast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts: list[int] = []

    def needed(plan: Plan, size: int) -> int:
        forecasts.append(size)
        return 0

    monkeypatch.setattr(fit, "needed_bytes", needed)
    fitted(monkeypatch, (16 if is_forecast else 8) * 1024, *job)
    assert bool(forecasts) == is_forecast


def test_a_microbatch_set_by_the_user_is_kept_with_a_warning_and_auto_refused_where_none_fits(
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
    with pytest.raises(OutOfMemory, match=r"no smaller one is forecast to fit; nothing was started. A smaller model, "):
        fitted(monkeypatch, 0.01, *BIGNET)


NO_SPACE = RuntimeError("alloc_cpu.cpp: can't allocate memory: you tried to allocate 10485760 bytes. Error code 12")


@pytest.mark.parametrize(
    ("size", "retry", "most", "taken", "message"),
    [
        ("auto", True, 16, [64, 32, 16], ""),
        ("auto", True, 0, [64, 32, 16, 8, 4, 2, 1], "; a smaller model, "),  # and the smallest
        ("auto", False, 16, [64], "; set micro_batch_size=32, which takes the same steps"),  # a step was taken
        ("64", True, 16, [64], "; set micro_batch_size=32, which takes the same steps"),  # the user's own
    ],
)
def test_the_microbatch_is_halved_where_memory_runs_out(
    size: str, retry: bool, most: int, taken: list[int], message: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    sizes: list[int] = []

    def train(config: Config, smaller: Decision | None, *_: object) -> str:
        size = config.micro_batch_size if smaller is None else smaller.value
        sizes.append(64 if size == "auto" else int(str(size)))
        if sizes[-1] <= most:
            return "trained"
        raise ran_out(NO_SPACE, config, Batching(64, sizes[-1]), retry)

    monkeypatch.setattr(start, "_train", train)
    ended = r"out of memory with micro_batch_size=\d+ .tried to allocate 10.0 MiB." + message
    expected = pytest.raises(OutOfMemory, match=ended) if message else nullcontext()
    with caplog.at_level(logging.WARNING, "mantissa"), expected:
        assert start.train(compose(*BIGNET, "batch_size=64", f"micro_batch_size={size}")) == "trained"
    assert sizes == taken
    told = [f"starting again with micro_batch_size={size}" for size in taken[1:]]
    assert [record.getMessage().partition("; ")[2] for record in caplog.records] == told


def test_what_all_ranks_raise_is_reported_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object) -> None:
        raise OutOfMemory("no smaller one is forecast to fit", shared=True)

    monkeypatch.setattr(start, "_train", train)
    with pytest.raises(OutOfMemory, match="no smaller one") as raised:
        start.train(compose(*BIGNET))
    assert raised.value.shared


class Two(World):
    """Two processes on one machine, the other of which has less."""

    size = 2

    def run_on_main(self, work: Any) -> Any:
        return work()

    def __init__(self, others: float) -> None:
        self.others = int(others * MIB)

    def all_reduce_max(self, value: int) -> int:
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
        sizes = ("batch_size=64", "micro_batch_size=32")
        config, hardware = compose(*BIGNET, f"parallel={mode}", *sizes, "device=cpu"), detect("cpu")
        plan = settle.settle(settle.plan_of(config, hardware, Two(0)))
        needs[mode] = needed_bytes(plan, 32)
    assert needs["ddp"] - needs["fsdp"] == steady - steady // 2 > 0


def test_a_model_that_cannot_be_forecast_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: Plan) -> Ledger:
        raise RunError("it decides by values")

    monkeypatch.setattr(fit, "ledger_of", fails)
    plan, [choice] = fitted(monkeypatch, 1, *BIGNET)
    assert (plan.batching.micro_batch_size, choice.why) == (512, "the recipe's own for a CPU")


def test_on_a_gpu_nothing_is_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "is_gpu", True)
    plan, _ = fitted(monkeypatch, 0.01, *BIGNET, "batch_size=64")
    assert plan.batching.micro_batch_size == 64


GPT2 = ["recipe=gpt2", "recipe.size=nano", "recipe.context=64", "data=synthetic", "data.vocab_size=8192"]
LOGITS = 12 * 16 * 64 * 8192 / MIB
"""Of 16 samples: the logits, log-probabilities and gradients."""


@needs_chunks
def test_a_loss_in_chunks_avoids_the_logits() -> None:
    job = [*GPT2, "batch_size=16", "micro_batch_size=16", "checkpoint=none"]
    whole, chunked = (need_mib(*job, f"recipe.chunked_loss={form}") for form in ("false", "true"))
    assert 0.8 * LOGITS < whole - chunked < 1.2 * LOGITS


@pytest.mark.parametrize(("mixup", "fitting"), [(0, 3), (0.2, 2)])
def test_a_microbatch_divides_what_a_rank_has_and_is_even_for_mixed_images(mixup: float, fitting: int) -> None:
    config = compose("recipe=resnet", f"augment.mixup={mixup}")
    assert halved(config, Batching(12, 6, 2), 6) == fitting
