"""AdamW whose state is narrower than its weights: against exact arithmetic, and in the trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mantissa
from tests.helpers import BIGNET, compose, fit, same_bits, trainer_of
from trainer.errors import UserError
from trainer.optim import low_state
from trainer.optim.low_state import AdamWBf16
from trainer.optim.optimizer import Optimizer

CPU = torch.device("cpu")
BF16 = "optimizer.state=bf16"


def steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, count: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(weight.shape, generator=generator).mul_(size) for _ in range(count)]
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return gradients


def optimizer_of(weight: nn.Parameter, fused: bool = True, **options: Any) -> torch.optim.Optimizer:
    made = Optimizer("AdamW", lr=1e-2, weight_decay=0.1, fused=fused, state="bf16", options=options)
    return made.build(nn.ParameterDict({"weight": weight}), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("piece", [200, 2**22])
def test_steps_are_adamws_in_fp64_on_moments_rounded_to_bf16(
    fused: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_state, "_MOST", piece)
    layout = torch.channels_last
    first = torch.randn(40, 5, 3, 2, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(first.to(memory_format=layout))
    expected = weight.detach().double()
    optimizer = optimizer_of(weight, fused, betas=[0.9, 0.95], eps=1e-6)
    optimizer.param_groups[0] |= {"lr": 2e-2, "weight_decay": 0.3}  # of the group, as rules and schedules set them
    mean = square = torch.zeros_like(expected)
    for number, gradient in enumerate(steps(weight, optimizer_of(nn.Parameter(weight.detach().clone())), 5), 1):
        weight.grad = gradient.to(memory_format=layout)
        optimizer.step()
        state = optimizer.state[weight]
        mean = 0.9 * mean + 0.1 * gradient.double()
        square = 0.95 * square + 0.05 * gradient.double() ** 2
        expected = expected * (1 - 2e-2 * 0.3)
        expected -= 2e-2 * mean / (1 - 0.9**number) / ((square / (1 - 0.95**number)).sqrt() + 1e-6)
        assert torch.allclose(weight.detach().double(), expected, rtol=1e-6, atol=1e-7)
        assert state["step"].item() == number
        # Nearest, but where fp32 ends on the other side of a middle; and one of the two neighbours.
        nearest = (state["exp_avg"] == mean.bfloat16()).double().mean()
        assert nearest > 0.99
        assert ((state["exp_avg_sq"].double() - square).abs() <= square * 2.0**-7).all()
        mean, square = state["exp_avg"].double(), state["exp_avg_sq"].double()


def test_the_second_moment_follows_gradients_that_become_smaller() -> None:
    """Rounded to nearest it would stay where it is."""
    weight = nn.Parameter(torch.zeros(2000))
    optimizer = optimizer_of(weight)
    steps(weight, optimizer, 200)
    before = optimizer.state[weight]["exp_avg_sq"].double().mean().item()
    steps(weight, optimizer, 1000, size=1e-3)
    ratio = optimizer.state[weight]["exp_avg_sq"].double().mean().item() / before
    assert ratio == pytest.approx(0.999**1000, rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master", "bf16_sr"])
def test_a_run_has_half_the_state(precision: str) -> None:
    trainer = trainer_of(*BIGNET, f"precision={precision}", "steps=4", BF16)
    fit(trainer, 2)
    held = [each for state in trainer.optimizer.state.values() for key, each in state.items() if key != "step"]
    assert {each.dtype for each in held} == {torch.bfloat16}
    assert sum(each.nbytes for each in held) == 4 * sum(each.numel() for each in trainer.model.parameters())


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    """Also where the kernel gets the flag, as on CUDA."""
    trainer = trainer_of(*BIGNET, "steps=4", "precision=fp16", "scaler.init=1024", BF16)
    fit(trainer, 2)
    for takes_flag in (False, True):
        trainer.update._takes_flag = takes_flag
        before = {key: value.clone() for key, value in trainer.state_dict()["optimizer"].items()}
        trainer.gradients(next(trainer.batches()))
        next(trainer.model.parameters()).grad[0] = math.inf  # type: ignore[index]
        assert trainer.update.step(trainer.step).skipped
        assert same_bits(before, trainer.state_dict()["optimizer"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("optimizer.state=int4", "optimizer.state=int4 is unknown .auto, bf16"),
        ("precision=bf16_pure", "but precision=bf16_pure has 16-bit state already; set optimizer.state=auto"),
        (
            "optimizer.options.amsgrad=true",
            "optimizer.options.amsgrad has no effect: optimizer.state=bf16 has betas and eps alone; set ",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose(*BIGNET, BF16, f"+{options}" if "amsgrad" in options else options)


def test_a_watch_does_not_warn_of_state_that_is_meant_to_be_narrow() -> None:
    net = nn.Linear(8, 4)
    optimizer = AdamWBf16(net.parameters())
    watch = mantissa.Watch(net, optimizer, precision="fp32", say=lambda text: None)
    loss = net(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    watch.step(loss)
    assert watch.setup is not None
    assert watch.setup.differences == []
    assert watch.setup.effective["optimizer state"] == "bfloat16 (AdamWBf16)"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_another_dtype_have_state_of_it(dtype: torch.dtype) -> None:
    """As in a replay of the doctor's."""
    one, other = (nn.Parameter(torch.ones(6, 5, dtype=dtype)) for _ in range(2))
    for weight, cls in ((one, AdamWBf16), (other, torch.optim.AdamW)):
        optimizer = cls([weight], fused=True)
        for number in range(3):
            weight.grad = torch.full_like(weight, 0.1 * number)
            optimizer.step()
    assert same_bits(one.detach(), other.detach())
