"""Products of rounded matrices, and their gradients, against fp64; what else differs is fp32 sums and bf16 results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.precision import ocp
from trainer.precision import nvfp4
from trainer.precision.scaled import Product

ROWS, IN, OUT = 96, 160, 64  # multiples of 32, all different: a block along the wrong dimension fits, and shows


def drawn(spread: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, gradient of the output, bf16.

    Rows and columns differ in size, by exp(``spread``), but those over which a product sums have inverse sizes in its
    factors. So what a block loses of its small values is as large in the result as the rest.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.randn(number, generator=generator).mul(spread).exp() for number in (ROWS, IN, OUT)]
    rows, columns, out = sizes

    def matrix(left: Tensor, right: Tensor) -> Tensor:
        return (torch.randn(len(left), len(right), generator=generator) * left.outer(right)).bfloat16()

    return matrix(rows, columns), matrix(out, 1 / columns), matrix(1 / rows, 1 / out)


def exact(tensor: Tensor) -> ocp.Array:
    return tensor.detach().double().numpy()


def assert_product(found: Tensor, one: ocp.Array, other: ocp.Array) -> None:
    """Assert that a bf16 result is one × other but for sums in fp32 and one rounding to bf16.

    Products of rounded operands are exact in fp32; a sum of n of them, in any order, is off by at most
    n u / (1 - n u) of the sum of their sizes, u = 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms",
    2002, section 4.2), and a rounding to bf16 by 2^-8 of the result. Two more u are for scales of tensors.
    """
    unit, terms = 2.0**-24, one.shape[1] * 2.0**-24
    of_sum = terms / (1 - terms) * (np.abs(one) @ np.abs(other))
    result = one @ other
    of_result = (1 + 2.0**-8) * (1 + unit) ** 2 - 1
    assert found.dtype == torch.bfloat16
    assert (np.abs(exact(found) - result) <= of_sum + of_result * (np.abs(result) + of_sum)).all()


def trained(product: Product, x: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the gradients of x and weight."""
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    y = product(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, upstream)


def mxfp8(values: ocp.Array) -> ocp.Array:
    return np.prod(ocp.mxfp8(values), 0)


# --- nvfp4 ---


def nvfp4_values(values: ocp.Array, rows: int = 1) -> ocp.Array:
    quotients, scales, tensor_scale = ocp.nvfp4_quotients(values, rows)
    return ocp.nearest(quotients, ocp.E2M1) * scales * tensor_scale


class Call(NamedTuple):
    values: ocp.Array
    square: bool
    stochastic: bool
    result: ocp.Array


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the layer rounds, in turn, and to which values."""
    found, quantize = list[Call](), nvfp4.quantize

    def recorded(values: Tensor, square: bool = False, stochastic: bool = False) -> tuple[Tensor, Tensor]:
        rounded, scale = quantize(values, square, stochastic)
        found.append(Call(exact(values), square, stochastic, exact(rounded) * scale.item()))
        return rounded, scale

    monkeypatch.setattr(nvfp4, "quantize", recorded)
    return found


def test_nvfp4_multiplies_what_the_recipe_says(calls: list[Call]) -> None:
    """Forward: x in 1 × 16 blocks, the weight in 16 × 16 ones. Backward: gradients stochastically, the same weight;
    and for the weight's gradient both factors transformed along the rows. Another operand, block or rounding shows.
    """
    x, weight, upstream = drawn(1)
    torch.manual_seed(9)
    y, of_x, of_weight = trained(nvfp4.product, x, weight, upstream)
    a, b, c = exact(x), exact(weight), exact(upstream)
    assert_product(y, nvfp4_values(a), nvfp4_values(b, 16).T)

    weights, inputs, gradients, turned_gradients, turned_inputs = calls
    assert np.array_equal(weights.values, b)
    assert np.array_equal(inputs.values, a)
    assert np.array_equal(gradients.values, c)
    assert [call.square for call in calls] == [True, False, False, False, False]
    assert [call.stochastic for call in calls] == [False, False, True, True, False]
    assert_product(of_x, gradients.result, nvfp4_values(b, 16))
    assert_product(of_weight, turned_gradients.result, turned_inputs.result.T)
    assert np.array_equal(turned_inputs.result, nvfp4_values(turned_inputs.values))
    for turned, original in ((turned_gradients.values, c.T), (turned_inputs.values, a.T)):
        lengths = [np.linalg.norm(each.reshape(-1, 16), axis=1) for each in (turned, original)]
        assert np.allclose(*lengths, rtol=1e-6)  # an orthogonal matrix turns each 16 numbers along the rows
    assert np.allclose(turned_gradients.values @ turned_inputs.values.T, c.T @ a, rtol=1e-4)  # the same in both


def test_the_transform_spreads_a_number_and_is_undone_by_itself() -> None:
    """A matrix that is not orthogonal would scale gradients; one without random signs would gather equal numbers."""
    matrix = exact(nvfp4._transformed(torch.eye(16)))
    assert np.array_equal(np.abs(matrix), np.full((16, 16), 0.25))
    assert np.array_equal(matrix @ matrix.T, np.eye(16))
    equal = exact(nvfp4._transformed(torch.ones(16, 1)))
    assert np.abs(equal).max() <= 2  # 4 where all signs are the same
    blocks = exact(nvfp4._transformed(torch.eye(48)))
    assert np.array_equal(blocks, np.kron(np.eye(3), matrix))
