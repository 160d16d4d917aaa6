"""fp8, mxfp8 and nvfp4: linear layers are judged by what these make unavoidable, and what a shared scale loses."""

from __future__ import annotations

import shlex
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
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, FORWARD
from mantissa.watch.setup import Aspect, _scaled_layers
from tests.evidence.doctor.planted import TINY
from tests.helpers import trainer_of
from trainer.precision import scaled

MODES = [name for name, row in FORMATS.items() if row.number.scaled]
GPT2 = (*TINY["gpt2"], "steps=20")
LAYERS = [f"gpt2.transformer.h.{block}.{layer}" for block in (0, 1) for layer in ("attn.c_attn", "attn.c_proj")]
LAYERS += [f"gpt2.transformer.h.{block}.mlp.{layer}" for block in (0, 1) for layer in ("c_fc", "c_proj")]


def with_a_huge_channel(mode: str, *others: str) -> Step:
    """In fp32 and bf16 it changes nothing: its weights are 0."""
    trainer = trainer_of(*GPT2, f"precision={mode}", *others)
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


@pytest.mark.parametrize(("mode", "modules"), [("nvfp4", "h.0:bf16"), ("bf16", "h.1:nvfp4")])
def test_formats_of_modules_are_examined_and_stay_in_the_cure(mode: str, modules: str) -> None:
    typed = f"precision.modules={{{modules}}}"
    checks = tuple(name for name in CHECKS if name not in ("divergence", "islands"))
    healthy = diagnose(of_overrides((*GPT2, f"precision={mode}", typed), 1)[0], checks, time_budget_s=600)
    assert (healthy.verdict, healthy.findings, healthy.budget.left_out) == (HEALTHY, [], [])
    lost = {row.module for row in healthy.examined["modules"].rows if row.kind == UNDERFLOW}
    assert lost == {name for name in LAYERS if ".h.1." in name}
    # What is printed trains: it has the formats of before, and the island.
    finding = diagnose(take(with_a_huge_channel(mode, typed)), ("modules", "islands"), time_budget_s=600).findings[0]
    (cure,) = shlex.split(finding.cure[0].partition("  ")[0])
    assert cure == f"precision.modules={{{modules},gpt2.transformer.h.1.mlp.c_fc:fp32}}"
    assert len(scaled.converted(trainer_of(*GPT2, f"precision={mode}", cure).model)) == 3


def test_another_format_has_only_what_it_can_have() -> None:
    typed = ("precision=nvfp4", "precision.modules={h.0:bf16,ln_f:fp32}", "precision.gradients=bf16")
    step = step_of(trainer_of(*GPT2, *typed))
    formats = {
        mode: Replay.in_format(step, FORMATS[mode]).built.config.precision for mode in ("fp32", "fp16", "bf16", "nvfp4")
    }
    assert {mode: found.modules for mode, found in formats.items()} == {
        "fp32": {},
        "fp16": {"ln_f": "fp32"},
        "bf16": {"h.0": "bf16", "ln_f": "fp32"},
        "nvfp4": {"h.0": "bf16", "ln_f": "fp32"},
    }
    assert [found.gradients for found in formats.values()] == [None, None, None, "bf16"]
    assert step.remedies.format(FORMATS["fp16"]) == "precision=fp16 'precision.modules={ln_f:fp32}'"


def test_what_makes_such_a_layer_infinite_is_found() -> None:
    step = with_a_huge_channel("nvfp4")
    step.stored["gpt2.transformer.h.1.mlp.c_fc.weight"][0, 0] = torch.inf
    finding = find_origin(Replay.as_run(step), "nvfp4")
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
