"""Which dtypes the modules of a run compute in, as its precision.json says."""

from __future__ import annotations

import pytest

from tests.helpers import GPT2, trainer_of
from trainer.run.record import observed
from trainer.trainer import Trainer

TYPES = ("Conv1D", "LayerNorm", "Embedding")


def table(trainer: Trainer) -> dict[str, tuple[str, str, str, str]]:
    """Type, weights, compute and output of each module."""
    rows = observed(trainer)[0]["modules"]
    return {row["module"]: (row["type"], row["weights"], row["compute"], row["output"]) for row in rows}


@pytest.mark.parametrize(
    ("mode", "weights", "product", "norm"),
    [
        ("fp32", "float32", "float32", "float32"),
        ("bf16", "float32", "bfloat16", "float32"),
        ("bf16_master", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_gpt2(mode: str, weights: str, product: str, norm: str) -> None:
    found = table(trainer_of(*GPT2, f"precision={mode}"))
    seen = {(kind, held, compute, output) for kind, held, compute, output in found.values() if kind in TYPES}
    assert seen == {
        ("Conv1D", weights, product, product),
        ("LayerNorm", weights, norm, norm),
        ("Embedding", weights, norm, norm),
    }
    assert found["gpt2.transformer.h.0.attn"][1:3] == ("", product)
    assert found["gpt2.lm_head"][3] == "float32"  # the loss


@pytest.mark.parametrize(("mode", "result"), [("bf16", "float32"), ("bf16_pure", "bfloat16")])
def test_an_fp32_island(mode: str, result: str) -> None:
    found = table(trainer_of(*GPT2, f"precision={mode}", "precision.modules={h.1.mlp:fp32}"))
    for name in ("c_fc", "c_proj"):
        assert found[f"gpt2.transformer.h.0.mlp.{name}"][2] == "bfloat16"
        assert found[f"gpt2.transformer.h.1.mlp.{name}"][:3] == ("Conv1D", "float32", "float32")
    inner = {name: output for name, (*_, output) in found.items() if name.startswith("gpt2.transformer.h.1.mlp.")}
    assert set(inner.values()) == {"float32"}
    assert found["gpt2.transformer.h.1"][3] == result
