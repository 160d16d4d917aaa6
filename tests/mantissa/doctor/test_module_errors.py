from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.doctor.calls import as_called, record
from mantissa.doctor.module_errors import local_errors, rounded
from mantissa.formats import FP16, TF32
from mantissa.step import islands
from mantissa.step.trace import BACKWARD, FORWARD
from tests.mantissa.doctor.faults import WIDTH, Computes, around, mean_square, step_of


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is 5 % too large in 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * (1.05 if gradients[0].dtype.itemsize == 2 else 1)


class Residual(nn.Module):
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.norm(x))
        if self.in_place:
            y += x
            return y
        return x + WrongGradient.apply(y)


@pytest.mark.parametrize(("mode", "factor"), [("bf16", 1), ("fp16", 1e-6)])  # which needs a loss scale
def test_a_wrong_gradient_in_a_container_is_found_there_and_nowhere_else(mode: str, factor: float) -> None:
    step = step_of(lambda: around(Residual()), mode, loss=lambda output, batch: factor * mean_square(output, batch))
    (finding,) = local_errors(step).findings
    assert (finding.kind, finding.direction, finding.module) == ("error", "backward", "1")
    assert finding.detail.startswith("gradient of layer's result 0: e 0.05, ")


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("draw", ["rand_like", "randn_like", "bernoulli"])
def test_random_numbers_are_the_same_in_every_precision(draw: str, mode: str) -> None:
    twice = Computes(lambda _, x: x * torch.rand_like(x) + getattr(torch, draw)(torch.full_like(x, 0.9)))
    errors = local_errors(step_of(lambda: around(twice), mode))
    assert (errors.findings, errors.notes) == ((), ())


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_changes_in_place_are_followed(mode: str) -> None:
    errors = local_errors(
        step_of(lambda: nn.Sequential(Residual(True), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), mode)
    )
    assert (errors.findings, errors.notes) == ((), ())
    assert {"0", "0.layer", "1", "2"} <= {row.module for row in errors.rows}


def test_a_call_that_cannot_be_repeated_is_named() -> None:
    errors = local_errors(step_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Computes(lambda _, x: x.mul_(2)))))
    assert errors.findings == ()
    assert len(errors.left_out) == 1
    assert errors.left_out[0].startswith("errors of 1 (it cannot be called alone (RuntimeError: ")


def test_a_layer_whose_shared_scales_cannot_be_told_apart_has_its_errors() -> None:
    scaled: Any = type("MXFP8Linear", (nn.Linear,), {})  # torchao's, of a width that no 16 columns divide
    errors = local_errors(step_of(lambda: nn.Sequential(nn.Linear(WIDTH, 8), scaled(8, WIDTH))))
    assert {row.direction for row in errors.rows if row.module == "1"} == {FORWARD, BACKWARD}
    assert errors.left_out[0].startswith("errors of 1 (it cannot be called alone (RuntimeError: ")


def test_a_call_leaves_an_fp32_module_that_is_entered() -> None:
    _, reference, (*_, call) = record(step_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))))
    islands.entered = True
    try:
        with as_called(reference, call):
            assert not islands.entered
        assert islands.entered
    finally:
        islands.entered = False


def test_numbers_are_rounded_as_in_the_format() -> None:
    x = torch.tensor([1 + 2**-11 + 2**-20, 1 + 2**-11, 1 + 3 * 2**-11, 1e6, -torch.inf], dtype=torch.float64)
    tf32 = rounded(x, TF32)
    assert tf32.tolist() == [1 + 2**-10, 1, 1 + 2**-9, 999936, -torch.inf]
    assert rounded(x, FP16).tolist() == [1 + 2**-10, 1, 1 + 2**-9, 65504, -torch.inf]
