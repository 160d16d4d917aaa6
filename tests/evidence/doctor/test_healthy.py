"""Nothing is found in healthy models."""

from __future__ import annotations

import pytest

from evidence.doctor.replay import of_overrides
from mantissa.doctor.diagnosis import CHECKS, HEALTHY, diagnose
from mantissa.doctor.finding import DIVERGENCE, LOST, MOMENT, Finding
from mantissa.step.trace import BACKWARD, FORWARD
from tests.evidence.doctor.planted import TINY

MODES = ("fp32", "bf16", "fp16", "bf16_master", "fp16_master", "bf16_pure", "fp16_pure")
COMBINATIONS = {
    "gpt2": ("fp32", "bf16", "fp16_pure"),
    "llama": ("fp16", "bf16_master"),
    "bert": ("bf16", "fp16"),  # torch sums the gradient of a layer norm's bias in fp16 where it is stored so
    "t5": ("bf16", "fp16"),
    "resnet": ("bf16", "fp16_master"),
    "bignet": ("bf16_pure",),
}
"""Modes in which each recipe is examined."""
TRAINED_ON = ("gpt2-bf16", "resnet-fp16_master")
"""Combinations that are compared over some steps, too."""


def overrides_of(recipe: str, mode: str) -> tuple[str, ...]:
    """A combination: every second one with activation checkpointing or eager attention besides."""
    other = []
    if (MODES.index(mode) + list(TINY).index(recipe)) % 2 and not mode.endswith("_pure"):
        eager = mode in ("fp32", "fp16", "fp16_master") and recipe not in ("resnet", "bignet")
        other = ["recipe.attention=eager" if eager else "activation_checkpointing=blocks"]
    return ("device=cpu", *TINY[recipe], f"precision={mode}", *other)


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
    replay, _ = of_overrides([*overrides_of("bignet", "fp32"), "compile=default"], 1)
    diagnosis = diagnose(replay, ("formats",), time_budget_s=600)
    assert (diagnosis.verdict, diagnosis.notes) == (HEALTHY, [])
    assert [(trial.name, trial.status) for trial in diagnosis.formats] == [
        ("fp64", "ok"),
        ("fp32", "ok"),
        ("inductor", "ok"),
    ]
