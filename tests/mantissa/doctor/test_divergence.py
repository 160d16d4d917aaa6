"""What the loss of some steps shows, and whether fp32 masters are the cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.doctor.budget import Budget
from mantissa.doctor.course import MOST_STEPS, STEPS, leaves, steps_to_train
from mantissa.doctor.finding import DIVERGENCE, UPDATE, Examined
from mantissa.doctor.training import divergence
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import FORWARD
from tests.mantissa.doctor.faults import WIDTH, Batch, Block, Computes, adamw, around, mean_square, step_of


def examined(step: Step) -> Examined:
    return divergence(step, Budget(600, step))


def case_of(model: Callable[[], nn.Module], mode: str, loss: Callable[[Tensor, Batch], Tensor] = mean_square) -> Step:
    return step_of(model, mode, loss=loss, optimizer=adamw(3e-3))


def rounded(steps: int = 0) -> nn.Module:
    """Return layers whose outputs are multiples of 1/4, rounded down, in 16 bits only, from the third step on."""

    def function(own: Any, x: Tensor) -> Tensor:
        own.steps += 1
        half = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        return x + ((x * 4).floor() / 4 - x).detach() if half and own.steps > 2 else x

    return nn.Sequential(around(nn.LayerNorm(WIDTH)), Computes(function, steps=torch.tensor(float(steps))))


@pytest.mark.parametrize("mode", ["bf16_pure", "bf16"])
def test_fp32_weights_are_no_cure_where_they_do_not_help(mode: str) -> None:
    examination = examined(case_of(rounded, mode))
    (finding,) = examination.findings
    assert (finding.kind, finding.direction, finding.module, finding.format) == (DIVERGENCE, UPDATE, "", mode)
    assert examination.again is not None
    assert [cure for cure in finding.candidates if not examination.again(cure.step).findings] == []


def test_tf32_may_differ_by_the_spread_of_its_rounding_alone() -> None:
    """What rounds as a GPU rounds the inputs of products in tf32, but far more: only numbers in fp32."""
    coarse = Computes(lambda _, x: x + ((x * 2).round() / 2 - x).detach() if x.dtype == torch.float32 else x)
    (finding,) = examined(case_of(lambda: nn.Sequential(around(nn.LayerNorm(WIDTH)), coarse), "tf32")).findings
    assert finding.kind == DIVERGENCE
    assert "rounding explains at most" in finding.detail


def test_the_first_loss_is_not_one_of_updates() -> None:
    step = step_of(lambda: rounded(2), optimizer=adamw(1e-3))
    findings = examined(step).findings
    assert [(finding.kind, finding.direction) for finding in findings] == [(DIVERGENCE, FORWARD)]


def test_the_size_of_a_step_and_no_clock_decides_how_many_are_trained() -> None:
    case = case_of(small, "bf16")
    assert steps_to_train(case) == MOST_STEPS
    case = case.with_microbatches([{"x": torch.empty(10**6, WIDTH, device="meta")}])
    assert steps_to_train(case) == STEPS
    assert steps_to_train(replace(case, different=3)) == 3


def test_a_format_is_not_at_fault_where_fp32_is_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    middle, limit = torch.tensor([1, 1, nan, nan, inf, 1.0]), torch.tensor([0.1, 0.1, nan, nan, nan, nan])
    assert leaves(torch.full((6,), nan), middle, limit) is None
    assert leaves(torch.ones(6), middle, limit) is None
    finite = torch.ones(6), torch.full((6,), 0.1)
    assert leaves(torch.full((6,), nan), *finite) == 0
    assert leaves(torch.tensor([1, 1, 2, 2, 1, 2]), *finite) is None
    assert leaves(torch.tensor([1, 1, nan, 2, 0, 1]), *finite) == 2


def test_a_skipped_step_is_taken_again_with_the_same_random_numbers() -> None:
    """Otherwise dropout, not rounding, makes the loss another one than in fp32, where nothing is skipped."""
    case = case_of(lambda: around(nn.Dropout(0.5)), "fp16").at_scale(2.0**30)
    first = Replay.as_run(case)
    assert first.run().nonfinite
    assert examined(case).findings == ()


@pytest.mark.parametrize(("share", "faults", "notes"), [(0.016, 0, 1), (0.05, 1, 0)])
def test_a_small_offset_of_the_loss_is_no_fault_where_its_gradients_are_right(
    share: float, faults: int, notes: int
) -> None:
    def with_offset(output: Tensor, batch: Batch) -> Tensor:
        loss = mean_square(output.float(), batch)
        return loss + share * loss.detach() * torch.is_autocast_enabled("cpu")

    case = case_of(lambda: around(nn.LayerNorm(WIDTH)), "bf16", with_offset)
    examination = examined(case)
    assert (len(examination.findings), len(examination.notes)) == (faults, notes)


def small() -> nn.Module:
    """Return a block that changes its inputs so little that rounding its weights shows nothing."""
    model = nn.Sequential(Block())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)
    return model


def test_rounded_inputs_are_no_divergence() -> None:
    def from_target(output: Tensor, batch: Batch) -> Tensor:
        return mean_square(output.float() - 3 * batch["x"].float(), batch)

    assert examined(case_of(small, "bf16_pure", from_target)).findings == ()
