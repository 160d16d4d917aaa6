from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.optim.update import Clip, ClipNorm, Update
from trainer.precision.scaler import LossScale

CPU = torch.device("cpu")


def given(gradient: Tensor, clip: Clip, on_device: bool) -> tuple[nn.Parameter, Update]:
    """A weight of zeros with a gradient, and its update, which may not read anything back if it is as on a GPU."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    update = Update(torch.optim.SGD([weight], lr=1.0, fused=True), [weight], LossScale(CPU), clip)
    if on_device:  # fused optimizers take the flag on a CPU, too

        def never(flag: Tensor) -> bool:
            raise AssertionError("the host waited")

        update._takes_flag, update.read = True, never
    return weight, update


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_found_among_any_numbers(value: float, dtype: torch.dtype, on_device: bool) -> None:
    gradient = torch.ones(10, 10).to(dtype)
    gradient[3, 4] = value
    weight, update = given(gradient, ClipNorm(1.0), on_device)
    result = update.step()
    assert result.skipped
    assert not result.grad_norm.isfinite()
    assert not weight.any()


def test_a_gradient_below_the_limit_is_not_scaled() -> None:
    """What is above it is compared with a bare loop in tests/parity."""
    weight, update = given(torch.full((2, 2), 0.5), ClipNorm(1e6), on_device=False)
    update.step()
    assert torch.equal(weight.detach(), torch.full((2, 2), -0.5))


def test_a_finite_norm_is_bitwise_that_of_torch_without_a_host_read() -> None:
    gradient = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)) * 1e-3
    _, update = given(gradient.clone(), Clip(), on_device=True)
    assert torch.equal(update.step().grad_norm, torch.nn.utils.get_total_norm([gradient]))
