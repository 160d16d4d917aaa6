"""Healthy combinations of recipes and precisions, in which the doctor must find nothing."""

from __future__ import annotations

from collections.abc import Iterator

from evidence.doctor.replay import of_overrides
from mantissa.doctor.diagnosis import Diagnosis, diagnose
from mantissa.finding import DIVERGENCE, LOST, MOMENT, Finding

_TOKENS = ("data=synthetic", "data.vocab_size=90", "batch_size=4")
TINY = {
    "gpt2": ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", *_TOKENS),
    "llama": ("recipe=llama", "recipe.size=nano", "recipe.context=16", *_TOKENS),
    "bert": ("recipe=bert", "recipe.context=24", *_TOKENS),
    "t5": ("recipe=t5", "recipe.context=24", *_TOKENS),
    "resnet": ("recipe=resnet", "recipe.arch=resnet18", "data=digits", "batch_size=4"),
    "bignet": ("recipe=bignet", "recipe.layers=8", "recipe.width=64", "batch_size=16"),
}
MODES = ("fp32", "bf16", "fp16", "bf16_master", "fp16_master", "bf16_sr")
PURE = ("bf16_pure", "fp16_pure")
ALLOWED_IN_PURE = (LOST, MOMENT)
"""What is true of these modes: the optimizer's updates are rounded away, its second moment becomes 0."""
BUDGET_S = 120
"""Of each: the steps of ``divergence`` are left out where they would take longer."""


def combinations() -> Iterator[tuple[str, ...]]:
    """Yield the overrides of every healthy combination."""
    for recipe, overrides in TINY.items():
        for mode in MODES:
            yield (*overrides, f"precision={mode}")
            yield (*overrides, f"precision={mode}", "activation_checkpointing=blocks")
        for mode in PURE:
            yield (*overrides, f"precision={mode}")
        yield (*overrides, "precision=fp32", "compile=default")
        if recipe in ("gpt2", "llama", "bert", "t5"):
            yield (*overrides, "precision=bf16", "recipe.attention=eager")


def examine(overrides: tuple[str, ...], checks: tuple[str, ...]) -> Diagnosis:
    """Examine the first step of a healthy combination."""
    return diagnose(of_overrides(["device=cpu", *overrides], 1), checks, BUDGET_S)


def wrong(diagnosis: Diagnosis) -> list[str]:
    """Return what the doctor reports of a healthy combination and should not."""
    pure = diagnosis.replay.precision in PURE
    return [" ".join(finding.lines()) for finding in diagnosis.findings if not (pure and _true_in_pure(finding))]


def _true_in_pure(finding: Finding) -> bool:
    return finding.kind in ALLOWED_IN_PURE or (finding.kind == DIVERGENCE and finding.cure != [])  # masters cure it
