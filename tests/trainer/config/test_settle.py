"""What each ``auto`` becomes, and by which fact: the hardware, the data, the memory, or the record of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from recipes.data.images.arrays import Digits
from recipes.data.images.augment import ImageAugment, Light
from tests.helpers import CPU, GPT2, GPU, needs_chunks
from trainer.config import settle as module
from trainer.config.compose import compose as composed
from trainer.config.init_from import InitFrom
from trainer.config.registration import flatten
from trainer.config.schema import Config
from trainer.config.settle import plan_of, settle
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.parallel.world import World
from trainer.recipe import Decision

BIGNET = ("recipe=bignet", "recipe.width=16", "recipe.layers=2", "data.samples=96")
RESNET = ("recipe=resnet", "data=digits")
CHANGE = (*BIGNET, "steps=200", "precision=bf16", "precision.then=fp32")
LORA = (*GPT2, "recipe.lora.rank=2")
LARGE_GPU = replace(GPU, memory_bytes=80 * 10**9)
LOGITS = 12 * 4 * 16 * 64
"""Bytes of GPT-2's logits, log-probabilities and gradients, for a microbatch of 4 samples."""


def compose(*overrides: str) -> Config:
    return composed(overrides)


class Two(World):
    """The first of two processes."""

    size = 2


TABLE: dict[str, tuple[tuple[str, ...], Hardware, dict[str, Any], dict[str, Any]]] = {
    # name: overrides, hardware, record of an earlier run; what the options become
    "the model, by the device": (("recipe=resnet", "data=digits"), CPU, {}, {"recipe.arch": "resnet18"}),
    "the model, on a GPU": (RESNET, GPU, {}, {"recipe.arch": "resnet50", "batch_size": 512, "micro_batch_size": 512}),
    "the same steps of a small model on a GPU": (
        ("recipe=gpt2", "recipe.size=nano"), GPU, {}, {"steps": 200, "batch_size": 16, "micro_batch_size": 16}
    ),
    "of images": ((*RESNET, "recipe.arch=resnet18"), GPU, {}, {"steps": 200, "batch_size": 64, "micro_batch_size": 64}),
    "of vectors": (BIGNET, GPU, {}, {"steps": 60, "batch_size": 512}),
    "a batch in microbatches of that size": (
        ("recipe=gpt2", "recipe.size=mini", "batch_size=64"), GPU, {}, {"micro_batch_size": 32}
    ),
    "published models, minutes of text": (
        ("recipe=gpt2",), GPU, {}, {"recipe.size": "124M", "steps": 300, "batch_size": 32, "micro_batch_size": 32}
    ),
    "larger microbatches, by the memory": (
        ("recipe=gpt2", "batch_size=128"), LARGE_GPU, {}, {"micro_batch_size": 64}
    ),
    "the published batch, by the experiment": (
        ("experiment=gpt2_124m",), LARGE_GPU, {}, {"batch_size": 480, "micro_batch_size": 60}
    ),
    "sizes, by the recipe": (BIGNET, CPU, {}, {"batch_size": 512, "micro_batch_size": 512}),
    "what is typed stays": ((*BIGNET, "steps=7", "batch_size=6"), CPU, {}, {"steps": 7, "batch_size": 6}),
    "the microbatch, by the batch": ((*BIGNET, "batch_size=6"), CPU, {}, {"micro_batch_size": 6}),
    "the largest microbatch that divides": ((*GPT2, "batch_size=100"), CPU, {}, {"micro_batch_size": 10}),
    "the microbatch of a prime batch": ((*GPT2, "batch_size=17"), CPU, {}, {"micro_batch_size": 1}),
    "steps, by the data": ((*BIGNET, "epochs=2.5", "batch_size=32"), CPU, {}, {"steps": 8, "epochs": None}),
    "evaluations, by the steps": ((*BIGNET, "steps=400"), CPU, {}, {"eval_every": 40}),
    "evaluations of few steps": ((*BIGNET, "steps=100"), CPU, {}, {"eval_every": 25}),
    "evaluations of fewer": ((*BIGNET, "steps=9"), CPU, {}, {"eval_every": 9}),
    "typed evaluations stay": ((*BIGNET, "steps=40", "eval_every=7"), CPU, {}, {"eval_every": 7}),
    "evaluations, by the epochs": ((*BIGNET, "epochs=2"), CPU, {}, {"eval_every": "epoch", "eval_samples": 12}),
    "evaluated samples, by the batch": ((*BIGNET, "batch_size=2"), CPU, {}, {"eval_samples": 20}),
    "augmentation, by the data": (RESNET, CPU, {}, {"augment": "none"}),
    "augmentation, by the record": (RESNET, CPU, {"augment": "imagenet"}, {"augment": "imagenet"}),
    "no augmentation of text": (GPT2, CPU, {}, {"augment": "none"}),
    "workers, by the data": (RESNET, CPU, {}, {"loader.workers": 0}),
    "workers, by the record": (RESNET, CPU, {"loader.workers": 3}, {"loader.workers": 3}),
    "typed workers stay": ((*RESNET, "loader.workers=1"), CPU, {"loader.workers": 3}, {"loader.workers": 1}),
    "a whole loss on a CPU": (GPT2, CPU, {}, {"recipe.chunked_loss": False}),
    "a rate, by the adapters": (LORA, CPU, {}, {"optimizer.lr": 2e-4, "recipe.lora.target": ["c_attn"]}),
    "a typed rate stays": ((*LORA, "optimizer.lr=0.5"), CPU, {}, {"optimizer.lr": 0.5}),
    "the microbatch, by the record": (
        (*BIGNET, "batch_size=64"), CPU, {"micro_batch_size": 16, "batch_size": 64}, {"micro_batch_size": 16}
    ),
    "a microbatch that does not divide": (
        (*BIGNET, "batch_size=64"), CPU, {"micro_batch_size": 3}, {"micro_batch_size": 64}
    ),
    "a microbatch of images that are mixed in pairs": (
        (*RESNET, "batch_size=6", "augment.mixup=0.2"), CPU, {"micro_batch_size": 3}, {"micro_batch_size": 6}
    ),
    "a typed microbatch": (
        (*BIGNET, "batch_size=64", "micro_batch_size=32"), CPU, {"micro_batch_size": 16}, {"micro_batch_size": 32}
    ),
    "the precision, by the record": (
        (*BIGNET, "precision=auto"), CPU, {"precision.mode": "bf16"}, {"precision.mode": "bf16"}
    ),
    "a typed precision": ((*BIGNET, "precision=fp32"), CPU, {"precision.mode": "bf16"}, {"precision.mode": "fp32"}),
    "other sizes are not taken from it": (BIGNET, CPU, {"batch_size": 5}, {"batch_size": 512}),
    "rules stay auto": (
        BIGNET, CPU, {}, {"schedule.warmup_steps": "auto", "checkpoint.every": "auto", "precision.kernels": "auto"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_auto_becomes(name: str) -> None:
    overrides, hardware, recorded, expected = TABLE[name]
    plan = plan_of(compose(*overrides), hardware, recorded=recorded)
    if hardware is CPU:  # on the GPU no data is opened
        plan = settle(plan)
    flat, automatic = flatten(plan.config), {choice.key: choice.value for choice in plan.decisions}
    flat["precision"] = flat["precision.mode"]
    assert {key: flat[key] for key in expected} == expected
    assert {key: flat[key] for key in automatic if key in flat} == automatic
    typed = {override.partition("=")[0] for override in overrides}
    assert not automatic.keys() & expected.keys() & typed


@pytest.mark.parametrize(("batch_size", "world", "lowered"), [(16, None, False), (100, None, True), (16, Two(), True)])
def test_the_reason_of_a_microbatch_is_the_recipes_own_where_it_is_that(
    batch_size: int, world: World | None, lowered: bool
) -> None:
    """GPT-2's is 16 here."""
    decisions = plan_of(compose(*GPT2, f"batch_size={batch_size}"), CPU, world).decisions
    (why,) = [decision.why for decision in decisions if decision.key == "micro_batch_size"]
    assert ("lowered to divide the batch" in why) == lowered


def test_the_sources_options_count_as_typed_and_a_continued_run_has_those_of_its_record() -> None:
    config = compose(*LORA)
    source = InitFrom(torch.__file__, {}, 3, True, {"recipe.size": "nano"})  # type: ignore[arg-type]
    begun = replace(config, init_from="outputs/first", source=source)
    assert Decision("recipe.size", "nano", f"as in {source.path}") in plan_of(begun, CPU).decisions
    record = {"recipe": "gpt2", "recipe.size": "mini", "recipe.positions": 1, "data": "synthetic"}
    continued = plan_of(replace(begun, typed=frozenset()), CPU, recorded=record).config
    assert (continued.recipe.size, continued.source) == ("mini", None)
    assert plan_of(begun, CPU, recorded=record).config.recipe.size == "nano"  # typed


def test_a_fitted_microbatch_takes_the_place_of_auto_alone() -> None:
    fitted = Decision("micro_batch_size", 8, "forecast to fit")
    plan = plan_of(compose(*BIGNET, "batch_size=16"), CPU, fitted=fitted)
    assert (plan.batching.micro_batch_size, fitted in plan.decisions) == (8, True)
    after = plan_of(compose(*BIGNET, "batch_size=16"), CPU, fitted=fitted._replace(why=""))
    assert (after.config.micro_batch_size, [each for each in after.decisions if each.key == fitted.key]) == (8, [])
    typed = plan_of(compose(*BIGNET, "batch_size=16", "micro_batch_size=4"), CPU, fitted=fitted)
    assert typed.config.micro_batch_size == 4


def test_the_microbatches_of_all_ranks_make_the_batch() -> None:
    plan = plan_of(compose(*BIGNET, "batch_size=12"), CPU, Two())
    assert (plan.batching.ranks, plan.batching.micro_batch_size, plan.batching.accumulation) == (2, 6, 1)
    with pytest.raises(UserError, match="2 processes") as refused:
        plan_of(compose(*BIGNET, "batch_size=7"), CPU, Two())
    assert refused.value.shared


@needs_chunks
@pytest.mark.parametrize(
    ("hardware", "typed", "recorded", "free", "chunked"),
    [
        (GPU, "auto", {}, LOGITS, False),
        (GPU, "auto", {}, LOGITS - 1, True),
        (GPU, "false", {}, 0, False),
        (CPU, "auto", {}, 0, False),
        (CPU, "auto", {"recipe.chunked_loss": True}, 2**40, True),
        (GPU, "auto", {"recipe.chunked_loss": False}, 0, False),
    ],
)
def test_the_loss_is_in_chunks_by_the_free_memory_or_as_at_the_start_of_the_run(
    hardware: Hardware, typed: str, recorded: dict[str, Any], free: int, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda device: free)
    config = compose(*GPT2, "batch_size=8", "micro_batch_size=4", f"recipe.chunked_loss={typed}")
    settled = settle(plan_of(config, hardware, recorded=recorded))
    assert flatten(settled.config)["recipe.chunked_loss"] is chunked
    shown = [choice.value for choice in settled.decisions if choice.key == "recipe.chunked_loss"]
    assert shown == [True] * (chunked and not recorded)


def test_settling_opens_the_data_once_and_changes_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    images = Digits.images
    monkeypatch.setattr(Digits, "images", lambda *given: opened.append(given) or images(*given))
    config = compose(*RESNET, "epochs=1", "augment=light")
    before = flatten(config)
    plan = plan_of(config, CPU)
    settled = settle(plan)
    assert len(opened) == 1
    assert flatten(config) == before
    assert settled.datasets.train.augment == settled.config.augment == Light()  # type: ignore[attr-defined]
    assert plan.datasets is not None
    assert plan.datasets.train.augment == ImageAugment()  # type: ignore[attr-defined]
    again = settle(plan_of(settled.config, CPU, datasets=settled.datasets))  # what is settled stays so
    assert flatten(again.config) == flatten(settled.config)
    assert (len(opened), again.decisions) == (1, ())


def test_a_forecast_is_that_of_one_rank_without_compilation() -> None:
    plan = plan_of(compose(*BIGNET, "batch_size=12", "compile=default", "parallel=ddp"), CPU, Two())
    settled = settle(plan)
    one = module.alone(settled, 3)
    assert (one.batching.batch_size, one.batching.micro_batch_size, one.batching.ranks) == (6, 3, 1)
    assert (one.config.compile.mode, one.config.parallel.kind, one.config.micro_batch_size) == ("off", "single", 3)


@pytest.mark.parametrize(
    ("typed", "recorded", "step"),
    [
        ("precision.until=0.8", {}, 160),
        ("precision.until=7", {}, 7),
        ("precision.until=0.8 steps=400 resume=auto", {"precision.until": 160}, 160),
        ("precision.until=0.5 steps=200 resume=same", {"precision.until": 160}, 100),
        ("precision.until=7 resume=auto", {"precision.until": 160}, 7),
        ("precision.until=160 steps=90", {"precision.until": 160}, 160),
    ],
    ids=["share", "step", "continued", "of the same run", "another step", "fewer steps"],
)
def test_the_last_step_in_the_first_format_is_a_number_that_a_resume_keeps(
    typed: str, recorded: dict[str, Any], step: int
) -> None:
    plan = plan_of(compose(*CHANGE, *typed.split()), CPU, recorded=recorded)
    assert plan.config.precision.until == step
    shown = [choice.value for choice in plan.decisions if choice.key == "precision.until"]
    assert shown == [step] * ("until=0" in typed)
