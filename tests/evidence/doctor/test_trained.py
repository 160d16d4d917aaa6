"""Faults in what only the trainer has: its loss sum, its scaler, its fp32 modules, its compiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evidence.doctor.replay import of_overrides
from evidence.doctor.step import step_of as step_of_trainer
from mantissa.doctor import compiled
from mantissa.doctor.budget import Budget
from mantissa.doctor.diagnosis import CHECKS, FOUND, diagnose
from mantissa.doctor.examine import take
from mantissa.doctor.finding import DIFFERENCE, DTYPE, OVERFLOW
from mantissa.doctor.module_errors import local_errors
from mantissa.doctor.sweep import DIFFERS
from mantissa.step.replay import Gradients, Replay
from mantissa.step.step import Step
from mantissa.step.trace import FORWARD
from tests.evidence.doctor.planted import TINY, Planted, step_of, step_of_run
from tests.mantissa.doctor.faults import WIDTH, Batch, Computes, around, linear
from trainer.precision.modes import Precision


def half_sum(output: Tensor, batch: Batch) -> Tensor:
    return (30 * output).square().sum()


def handmade() -> nn.Module:
    """Return a module that uses a layer's weights without calling it, so that what is set for the layer is no use."""
    return Computes(lambda own, x: F.linear(x, own.linear.weight, own.linear.bias), linear=linear())


class CastBack(nn.LayerNorm):
    """Layer norm that casts its input to bf16, whatever it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.bfloat16(), (WIDTH,)) * self.weight.bfloat16()
        return y.to(x.dtype)


def _miscompile(graph: Any) -> None:
    """Multiply by the weights of a layer as they are, not transposed."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
        if node.args[0].meta["val"].shape == (WIDTH, WIDTH):
            node.replace_all_uses_with(node.args[0])


def miscompiling() -> AbstractContextManager[Any]:
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(post_grad_custom_pre_pass=_miscompile)
    return patched


TRAINED = {
    "loss summed in fp16": (
        [(OVERFLOW, FORWARD, "", "fp16_master"), (DTYPE, FORWARD, "", "fp16_master")],
        Planted(lambda: around(nn.Identity()), Precision(mode="fp16_master"), loss=half_sum),
    ),
    "an fp32 module that casts back to bf16": (
        [(DTYPE, FORWARD, "1", "bf16")],
        Planted(lambda: around(CastBack(WIDTH, bias=False)), Precision(mode="bf16", modules={"1": "fp32"})),
    ),
    "an fp32 module whose parent uses its weights": (
        [(DTYPE, FORWARD, "1.linear", "bf16")],
        Planted(lambda: around(handmade()), Precision(mode="bf16", modules={"1.linear": "fp32"})),
    ),
    "a compiled model that differs from eager": (
        [(DIFFERENCE, FORWARD, "", "inductor")],
        # Without a bias, inductor calls torch's product: a kernel of its own takes it many seconds to make.
        Planted(lambda: nn.Linear(WIDTH, WIDTH, bias=False), Precision()),
    ),
}
"""Faults in what only the trainer has, and all that must be found."""


@pytest.mark.parametrize("name", TRAINED)
def test_a_fault_in_the_trainer_is_named(name: str) -> None:
    expected, planted = TRAINED[name]
    compiles = "compiled" in name
    with miscompiling() if compiles else nullcontext():
        taken = take(step_of_trainer(planted.trainer()))
        taken = replace(taken, step=replace(taken.step, compiles=compiles))
        diagnosis = diagnose(taken, tuple(check for check in CHECKS if check != "islands"), time_budget_s=600)
    found = [(finding.kind, finding.direction, finding.module, finding.format) for finding in diagnosis.findings]
    assert (diagnosis.verdict, found, diagnosis.budget.left_out) == (FOUND, expected, [])
    if diagnosis.findings[-1].kind in (DTYPE, DIFFERENCE) and len(found) == 1:
        assert diagnosis.findings[0].cure, diagnosis.findings[0]


def test_gradients_of_compiled_code_that_are_nan_are_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Step) -> Gradients:
        return {name: gradient * float("nan") for name, gradient in Replay.as_run(step).true_gradients().items()}

    monkeypatch.setattr(compiled, "_compiled", broken)
    step = replace(step_of(lambda: nn.Linear(WIDTH, WIDTH)), compiles=True)
    examined = compiled.compiled(step, Budget(600, step))
    assert [trial.status for trial in examined.rows] == [DIFFERS]
    assert [finding.kind for finding in examined.findings] == [DIFFERENCE]


def test_masters_cure_second_moments_of_0() -> None:
    taken, _ = of_overrides(["device=cpu", *TINY["bignet"], "precision=fp16_pure"], 1)
    finding = diagnose(taken, ("formats", "divergence"), time_budget_s=600).findings[0]
    assert finding.format == "fp16_pure"
    assert finding.cure == ("precision=fp16_master",)


def test_a_module_inside_of_an_fp32_module_is_evaluated_in_fp32() -> None:
    case = step_of_run(*TINY["bert"], "precision=bf16_master", "precision.modules={*.self:fp32}")
    assert local_errors(case).findings == ()
