"""Nothing is found in healthy models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evidence.doctor.replay import of_overrides
from evidence.doctor.step import step_of as step_of_trainer
from evidence.runs import merge_overrides
from mantissa.doctor.cause import find_origin
from mantissa.doctor.diagnosis import CHECKS, HEALTHY, diagnose
from mantissa.doctor.finding import DIVERGENCE, LOST, MOMENT, OVERFLOW, Finding
from mantissa.formats import FORMATS
from mantissa.step.step import Replay
from mantissa.step.trace import BACKWARD, FORWARD, Op, Trace
from mantissa.tensors import finite
from recipes.bert import Bert
from tests.evidence.doctor.planted import TINY, step_of
from tests.helpers import trainer_of
from tests.mantissa.doctor.faults import around
from trainer.data.contract import Batch
from trainer.recipe import LossOutput
from trainer.trainer import Trainer

MODES = ("fp32", "bf16", "fp16", "bf16_master", "fp16_master", "bf16_pure", "fp16_pure")
COMBINATIONS = {
    "gpt2": ("fp32", "bf16", "fp16", "fp16_pure"),
    "llama": ("fp16", "bf16_master", "bf16_pure"),
    "bert": ("fp32", "bf16", "fp16"),  # torch sums the gradient of a layer norm's bias in fp16 where it is stored so
    "t5": ("bf16", "fp16", "bf16_master"),
    "resnet": ("fp32", "bf16", "fp16_master"),
    "bignet": ("fp16", "bf16_pure", "fp16_pure"),
}
"""Modes in which each recipe is examined."""
TRAINED_ON = ("gpt2-bf16", "resnet-fp16_master")
"""Combinations that are compared over some steps, too."""
SMALLER = {
    "llama": ("recipe.layers=1", "recipe.width=32", "recipe.heads=4", "recipe.kv_heads=2", "recipe.ffn=64"),
    "gpt2": ("recipe.size=tiny",),
    "resnet": ("recipe.arch=tiny_regnet",),
    "bignet": ("recipe.layers=4", "recipe.width=16"),
}


def overrides_of(recipe: str, mode: str) -> tuple[str, ...]:
    """A combination: every second one with activation checkpointing or eager attention besides."""
    other = []
    if (MODES.index(mode) + list(TINY).index(recipe)) % 2 and not mode.endswith("_pure"):
        eager = mode in ("fp32", "fp16", "fp16_master") and recipe not in ("resnet", "bignet")
        other = ["recipe.attention=eager" if eager else "activation_checkpointing=blocks"]
    whole = [each for each in TINY[recipe] if (recipe, each) != ("llama", "recipe.size=nano")]
    return ("device=cpu", *merge_overrides(whole, SMALLER.get(recipe, ())), f"precision={mode}", *other)


def allowed(finding: Finding, mode: str) -> bool:
    """What is true of the pure modes: updates are rounded away, second moments become 0, and masters cure it."""
    true = finding.kind in (LOST, MOMENT) or (finding.kind == DIVERGENCE and finding.cure != ())
    return mode.endswith("_pure") and true


@pytest.mark.parametrize(("recipe", "mode"), [(recipe, mode) for recipe in TINY for mode in COMBINATIONS[recipe]])
def test_nothing_is_found(recipe: str, mode: str) -> None:
    left_out = {"islands"} | ({"divergence"} if f"{recipe}-{mode}" not in TRAINED_ON else set())
    checks = tuple(name for name in CHECKS if name not in left_out)
    diagnosis = diagnose(of_overrides(overrides_of(recipe, mode), 1)[0], checks, time_budget_s=600)
    assert [finding for finding in diagnosis.findings if not allowed(finding, mode)] == []
    assert diagnosis.budget.left_out == []
    if diagnosis.verdict == HEALTHY:
        errors, gradients = diagnosis.examined["modules"], diagnosis.range
        assert errors.notes == ()
        assert max(row.ratio for row in errors.rows) < 0.8
        assert {row.direction for row in errors.rows} == {FORWARD, BACKWARD}
        assert gradients is not None
        if mode.startswith("fp16"):
            assert gradients.lowest is not None
            assert gradients.highest is not None
            assert gradients.lowest <= gradients.highest
            assert gradients.text() == f"scale: 2^{gradients.lowest} … 2^{gradients.highest} holds all gradients"


def test_nothing_is_found_in_a_compiled_model() -> None:
    replay, _ = of_overrides([*overrides_of("bignet", "fp32"), "recipe.layers=2", "compile=default"], 1)
    diagnosis = diagnose(replay, ("formats",), time_budget_s=600)
    assert (diagnosis.verdict, diagnosis.notes) == (HEALTHY, [])
    assert [(trial.name, trial.status) for trial in diagnosis.formats] == [
        ("fp64", "ok"),
        ("fp32", "ok"),
        ("inductor", "ok"),
    ]


def started(trainer: Trainer, mode: str) -> Replay:
    return step_of_trainer(trainer).replay(FORMATS[mode])


def not_finite(trainer: Replay) -> list[str]:
    """Return the operators whose results are not finite, in order: a simpler doctor would blame the first one."""
    names: list[str] = []

    def note(op: Op) -> None:
        if not all(map(finite, op.results)):
            names.append(op.name)

    with Trace(None, note):
        trainer.run()
    return names


def first(operators: list[str]) -> str:
    """Of those that compute: new memory may hold anything."""
    return next(operator for operator in operators if "empty" not in operator)


def test_the_log_of_0_in_t5s_relative_positions_is_harmless() -> None:
    trainer = started(trainer_of(*TINY["t5"]), "bf16")
    assert first(not_finite(trainer)) == "aten.log"
    assert find_origin(trainer, "bf16") is None


def test_an_overflow_is_found_behind_the_log_of_0() -> None:
    whole = trainer_of(*TINY["t5"])
    with torch.no_grad():
        whole.model.get_parameter("encoder.block.0.layer.1.DenseReluDense.wo.weight").mul_(1e6)
    trainer = started(whole, "fp16")
    assert first(not_finite(trainer)) == "aten.log"
    finding = find_origin(trainer, "fp16")
    assert finding is not None
    assert (finding.kind, finding.direction, finding.module) == (
        OVERFLOW,
        FORWARD,
        "encoder.block.0.layer.1.DenseReluDense.wo",
    )


def test_a_mask_that_becomes_infinite_in_bf16_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(recipe: Bert, model: Any, batch: Batch) -> LossOutput:
        mask = torch.zeros(batch["tokens"].shape)
        mask[:, -4:] = torch.finfo(torch.float32).min  # what is added to the scores of padding
        logits = model(input_ids=batch["tokens"], attention_mask=mask[:, None, None]).logits
        return LossOutput(logits[:, 0].float().logsumexp(-1).sum(), {})

    monkeypatch.setattr(Bert, "loss", loss)
    trainer = started(trainer_of(*TINY["bert"], "recipe.attention=sdpa"), "bf16")
    assert first(not_finite(trainer)) == "aten._to_copy"
    assert find_origin(trainer, "bf16") is None


class Uninitialised(nn.Module):
    """Copies its input through new memory."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(x)


def test_new_memory_that_holds_nan_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = step_of(lambda: around(Uninitialised())).replay(FORMATS["bf16"])
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    torch.use_deterministic_algorithms(True)
    try:
        assert not_finite(trainer)[0].startswith("aten.empty")
        assert find_origin(trainer, "bf16") is None
    finally:
        torch.use_deterministic_algorithms(False)
