"""What the loss of some steps shows, and the updates that are the cause where weights are kept in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from evidence.doctor import healthy
from evidence.doctor.faults.planted import WIDTH, Expected, Fault, around
from evidence.doctor.ladder.divergence import STEPS, divergence
from evidence.doctor.step.case import Case
from evidence.doctor.step.finding import DIVERGENCE, LOST, MOMENT, UPDATE, Finding
from evidence.doctor.step.replay import following, of_overrides
from trainer.optim.optimizer import Optimizer
from trainer.precision.modes import Precision


def found_in(case: Case) -> list[Finding]:
    findings, losses = divergence(case, following(case, STEPS))
    assert [len(values) for values in losses.values()] == [STEPS] * 4
    return findings


def case_of(model: Callable[[], nn.Module], mode: str) -> Case:
    optimizer = Optimizer(name="AdamW", lr=3e-3)
    return Fault(0, "", Expected("", "", "", ""), model, Precision(mode=mode), optimizer=optimizer).replay().case


class Rounded(nn.Module):
    """Rounds its inputs towards minus infinity, to multiples of 1/4, in 16 bits only."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        return x + ((x * 4).floor() / 4 - x).detach() if half else x


def rounded() -> nn.Module:
    return nn.Sequential(around(nn.LayerNorm(WIDTH)), Rounded())


def plain() -> nn.Module:
    return around(nn.LayerNorm(WIDTH))


def large_weights() -> nn.Module:
    """Return layers whose weights are 1, of which bf16 holds no updates of 3e-3."""
    model = around(nn.LayerNorm(WIDTH))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign())
    return model


def test_second_moments_of_0_are_named_when_they_make_the_updates_too_large() -> None:
    case = of_overrides(["device=cpu", *healthy.TINY["bignet"], "precision=fp16_pure"], 1).case
    findings = found_in(case)
    assert {(each.kind, each.direction, each.rung) for each in findings} == {(MOMENT, UPDATE, "fp16_pure")}
    assert findings[0].module in dict(case.prototype.named_modules())
    assert "on the loss is not finite, and with precision=fp16_master it stays near" in findings[0].detail


def test_lost_updates_are_named_when_they_make_the_updates_too_small() -> None:
    findings = found_in(case_of(large_weights, "bf16_pure"))
    assert {(each.kind, each.direction, each.rung) for each in findings} == {(LOST, UPDATE, "bf16_pure")}
    assert "and with precision=bf16_master it stays near" in findings[0].detail


def test_updates_are_not_named_when_masters_do_not_help() -> None:
    for mode in ("bf16_pure", "bf16"):
        (finding,) = found_in(case_of(rounded, mode))
        assert (finding.kind, finding.direction, finding.module, finding.rung) == (DIVERGENCE, UPDATE, "", mode)
        assert "rounding explains" in finding.detail


def test_nothing_is_found_where_rounding_is_all() -> None:
    assert found_in(case_of(plain, "bf16")) == []


def test_a_skipped_step_is_taken_again_with_the_same_random_numbers() -> None:
    """Otherwise dropout, not rounding, makes the loss another one than in fp32, where nothing is skipped."""
    case = case_of(lambda: around(nn.Dropout(0.5)), "fp16")
    case.scale = 2.0**30
    first = case.trainer(case.config.precision, own=True, scale=case.scale)
    assert first.train_step(case.microbatches).skipped
    assert found_in(case) == []
