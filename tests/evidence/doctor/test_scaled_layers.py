"""fp8, mxfp8 and nvfp4: linear layers are judged by what these make unavoidable, and what a shared scale loses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evidence.doctor.replay import of_overrides
from evidence.doctor.step import step_of
from mantissa.doctor.cause import find_origin
from mantissa.doctor.diagnosis import CHECKS, HEALTHY, diagnose
from mantissa.doctor.examine import take
from mantissa.doctor.finding import UNDERFLOW
from mantissa.doctor.module_errors import local_errors
from mantissa.formats import FORMATS
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, FORWARD
from mantissa.watch.setup import Aspect, _scaled_layers
from tests.evidence.doctor.planted import TINY
from tests.helpers import trainer_of

MODES = [name for name, row in FORMATS.items() if row.number.scaled]
GPT2 = (*TINY["gpt2"], "steps=20")
LAYERS = [f"gpt2.transformer.h.{block}.{layer}" for block in (0, 1) for layer in ("attn.c_attn", "attn.c_proj")]
LAYERS += [f"gpt2.transformer.h.{block}.mlp.{layer}" for block in (0, 1) for layer in ("c_fc", "c_proj")]


def with_a_huge_channel(mode: str) -> Step:
    """In fp32 and bf16 it changes nothing: its weights are 0."""
    trainer = trainer_of(*GPT2, f"precision={mode}")
    block: Any = trainer.model.get_submodule("gpt2.transformer.h.1")
    with torch.no_grad():
        block.ln_2.weight[5] = 2.0**40
        block.mlp.c_fc.weight[5] = 0.0
    return step_of(trainer)


@pytest.mark.parametrize("mode", MODES)
def test_a_healthy_model_has_no_finding(mode: str) -> None:
    checks = tuple(name for name in CHECKS if name not in ("divergence", "islands"))
    diagnosis = diagnose(of_overrides((*GPT2, f"precision={mode}"), 1)[0], checks, time_budget_s=600)
    assert (diagnosis.verdict, diagnosis.findings, diagnosis.budget.left_out) == (HEALTHY, [], [])
    errors = diagnosis.examined["modules"]
    assert errors.notes == ()
    lost = [row for row in errors.rows if row.kind == UNDERFLOW]
    assert sorted(dict.fromkeys(row.module for row in lost)) == sorted(LAYERS)
    assert {row.direction for row in lost} == {FORWARD, BACKWARD}
    worst = max(errors.rows, key=lambda row: row.ratio)
    assert worst.ratio < 0.8, worst


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_with_a_huge_channel_is_named(mode: str) -> None:
    finding, *others = local_errors(with_a_huge_channel(mode)).findings
    assert (finding.kind, finding.direction, finding.module) == (UNDERFLOW, FORWARD, "gpt2.transformer.h.1.mlp.c_fc")
    assert "input 0, columns " in finding.detail
    assert "of what is not 0 comes out as 0" in finding.detail
    assert others == []


def test_that_layer_in_fp32_is_the_cure() -> None:
    finding = diagnose(take(with_a_huge_channel("nvfp4")), ("modules", "islands"), time_budget_s=600).findings[0]
    assert finding.cure[0].startswith("'precision.modules={gpt2.transformer.h.1.mlp.c_fc:fp32}'"), finding


@pytest.mark.parametrize("mode", MODES)
def test_what_makes_such_a_layer_infinite_is_found(mode: str) -> None:
    step = with_a_huge_channel(mode)
    step.stored["gpt2.transformer.h.1.mlp.c_fc.weight"][0, 0] = torch.inf
    finding = find_origin(step.as_run(), mode)
    assert finding is not None
    assert finding.place.startswith("gpt2.transformer.h.1.mlp.c_fc"), finding


@pytest.mark.parametrize("mode", MODES)
def test_setup_counts_the_layers_of_each_format(mode: str) -> None:
    def found(model: nn.Module) -> Aspect:
        first: Any = SimpleNamespace(model=model)
        return _scaled_layers(first, FORMATS[mode])

    if name := {"fp8": "Float8Linear", "mxfp8": "MXFP8Linear", "nvfp4": "NVFP4Linear"}.get(mode):  # torchao's
        of_torchao: Any = type(name, (nn.Linear,), {})
        assert found(nn.Sequential(of_torchao(8, 8))) == ({"fp8": "none"} | {mode: "1 module"}, [])
    assert found(trainer_of(*GPT2, f"precision={mode}").model) == ({"fp8": "none"} | {mode: "8 modules"}, [])
    rows, (difference,) = found(nn.Sequential(nn.Linear(8, 8)))
    assert rows == {"fp8": "none"}
    assert difference.startswith(f"precision={mode} is asked for, but 1 module (0) are plain nn.Linear: ")
