"""What the loss of some steps shows, and whether fp32 masters are the cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from evidence.doctor.replay import of_overrides
from mantissa.doctor.training import MOST_STEPS, STEPS, divergence, leaves, steps_to_train
from mantissa.finding import DIVERGENCE, FORWARD, UPDATE, Finding
from mantissa.step.step import Step
from tests.mantissa.doctor.planted import TINY, WIDTH, Block, around, mean_square, step_of
from trainer.data.contract import Batch
from trainer.optim.optimizer import Optimizer


def found_in(case: Step) -> list[Finding]:
    return divergence(case, case.following(STEPS)).findings


def case_of(model: Callable[[], nn.Module], mode: str, loss: Callable[[Tensor, Batch], Tensor] = mean_square) -> Step:
    return step_of(model, mode, loss=loss, optimizer=Optimizer(name="AdamW", lr=3e-3))


class Rounded(nn.Module):
    """Rounds its inputs to multiples of 1/4 towards minus infinity, in 16 bits only, from the third step on."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(float(steps)))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        half = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        return x + ((x * 4).floor() / 4 - x).detach() if half and self.steps > 2 else x


def rounded() -> nn.Module:
    return nn.Sequential(around(nn.LayerNorm(WIDTH)), Rounded())


def test_masters_cure_second_moments_of_0() -> None:
    case = of_overrides(["device=cpu", *TINY["bignet"], "precision=fp16_pure"], 1)[0].step
    (finding,) = found_in(case)
    assert (finding.kind, finding.direction, finding.format) == (DIVERGENCE, UPDATE, "fp16_pure")
    assert "on the loss is not finite; rounding explains" in finding.detail
    assert finding.detail.endswith("precision=fp16_master: it stays near that of fp32")
    assert finding.cure == ["precision=fp16_master"]


@pytest.mark.parametrize("mode", ["bf16_pure", "bf16"])
def test_masters_are_not_named_where_they_do_not_help(mode: str) -> None:
    (finding,) = found_in(case_of(rounded, mode))
    assert (finding.kind, finding.direction, finding.module, finding.format) == (DIVERGENCE, UPDATE, "", mode)
    assert finding.cure == []


def test_the_first_loss_is_not_one_of_updates() -> None:
    findings = found_in(case_of(lambda: nn.Sequential(around(nn.LayerNorm(WIDTH)), Rounded(2)), "bf16"))
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
    first = case.as_run()
    assert first.run().nonfinite
    assert found_in(case) == []


def test_an_offset_of_the_loss_is_no_fault_where_its_gradients_are_right() -> None:
    def with_offset(output: Tensor, batch: Batch) -> Tensor:
        loss = mean_square(output.float(), batch)
        return loss + 0.05 * loss.detach() * torch.is_autocast_enabled("cpu")

    case = case_of(lambda: around(nn.LayerNorm(WIDTH)), "bf16", with_offset)
    found = divergence(case, case.following(STEPS))
    assert (found.findings, len(found.notes)) == ([], 1)
    assert "its gradients agree within" in found.notes[0]


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

    assert found_in(case_of(small, "bf16_pure", from_target)) == []
