"""Two takes of a step are aligned, and the first operator with other results is named, whichever take comes first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from evidence.diff.operators import Place, Take, Taking, difference, first_place, same
from mantissa.step.trace import BACKWARD, FORWARD, LOSS
from tests.evidence.diff.parts import WIDTH, Model
from trainer.precision.modes import Precision

CPU = torch.device("cpu")
PLAIN = Precision()


def takes(change: str = "", precision: Precision = PLAIN, seed: int = 1) -> tuple[nn.Module, Taking]:
    """A model, and a step of it over two microbatches."""
    torch.manual_seed(0)
    model = Model(change)
    precision.convert(model, CPU, lambda model: list(model.blocks))
    inputs = torch.randn(32, WIDTH), torch.randn(16, WIDTH)

    def taking(take: Take) -> None:
        torch.manual_seed(seed)
        model.zero_grad()
        with take:
            for x in inputs:
                with precision.autocast(CPU):
                    loss = model(x).float().square().sum()
                take.value(FORWARD, LOSS, "the loss", loss)
                loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            take.value(BACKWARD, name, "its gradient", parameter.grad)

    return model, taking


def place(a: tuple[nn.Module, Taking], b: tuple[nn.Module, Taking]) -> Place | None:
    return first_place((a[1], b[1]), (a[0], b[0]))


def mixed(mode: str, **modules: str) -> Precision:
    return Precision(mode=mode, modules={name.replace("__", "."): each for name, each in modules.items()})


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        ("operator", (FORWARD, "blocks.1", "aten.mul"), "alone runs it"),
        ("cast", (FORWARD, "blocks.1", "aten._to_copy"), "casts there"),
        ("value", (FORWARD, "blocks.1", "aten.add"), "its inputs are equal"),
        ("backward", (BACKWARD, "blocks.1", "aten.mul"), "its inputs are equal"),
    ],
)
def test_a_change_is_found_where_it_is(change: str, where: tuple[str, str, str], why: str) -> None:
    plain, other = takes(), takes(change)
    for a, b in ((plain, other), (other, plain)):
        found = place(a, b)
        assert found is not None
        assert (found.direction, found.module, found.op) == where
        assert why in found.why
        assert found.difference is not None
        assert 0 < found.difference.relative < 0.02
        assert found.difference.of == 32 * WIDTH  # of the first microbatch
    assert place(plain, takes()) is None


def test_dropout_with_another_generator_is_told_from_a_fault() -> None:
    found = place(takes(), takes(seed=2))
    assert found is not None
    assert (found.direction, found.module) == (FORWARD, "blocks.0.dropout")
    assert "random numbers" in found.why


@pytest.mark.parametrize(
    ("a", "b", "module", "formats"),
    [
        (mixed("bf16"), PLAIN, "blocks.0.layer", "bf16 against fp32"),
        (PLAIN, mixed("fp16"), "blocks.0.layer", "fp32 against fp16"),
        (mixed("bf16", blocks__1__layer="fp32"), mixed("bf16"), "blocks.1.layer", "fp32 against bf16"),
        (mixed("nvfp4"), mixed("bf16"), "blocks.0.layer", "nvfp4 against bf16"),
        (mixed("nvfp4", blocks__1="bf16"), mixed("nvfp4"), "blocks.1.layer", "bf16 against nvfp4"),
    ],
    ids=["bf16", "fp16", "a layer lifted to fp32", "nvfp4", "a block lifted to bf16"],
)
def test_formats_part_at_the_first_layer_that_has_another_one(
    a: Precision, b: Precision, module: str, formats: str
) -> None:
    found = place(takes(precision=a), takes(precision=b))
    assert found is not None
    assert (found.direction, found.module) == (FORWARD, module)
    assert found.difference is not None
    assert found.difference.formats == formats
    assert 0 < found.difference.relative < 0.3  # of the layer's result, and not of sums without their scales


def test_another_format_of_the_gradients_alone_has_the_size_of_a_gradient() -> None:
    """And not that of quantised operands beside whole ones."""
    a, b = Precision(mode="nvfp4"), Precision(mode="nvfp4", gradients="bf16")
    for found in (place(takes(precision=a), takes(precision=b)), place(takes(precision=b), takes(precision=a))):
        assert found is not None
        assert (found.direction, found.module) == (BACKWARD, "blocks.2.layer")
        assert found.difference is not None
        assert 0 < found.difference.relative < 0.5
        assert "blocks.2.layer.weight" in found.why


def test_numbers_are_compared_whatever_holds_them() -> None:
    x = torch.tensor([1.0, math.nan, -2.0])
    assert same(x, x.bfloat16())
    assert same(x, x.double())
    assert not same(x, torch.tensor([1.0, 0.0, -2.0]))
    assert not same(x, x[:2])
    found = difference(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 4.0, 0.5]).bfloat16())
    assert (found.largest, found.elements, found.of) == (0.5, 1, 3)
    assert found.relative == pytest.approx(0.5 / 25.25**0.5)
    assert found.formats == "fp32 against bf16"


class Twice(nn.Module):
    """One layer that is called twice, the second time by its own weights alone."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x) * self.factor)  # type: ignore[no-any-return]


def test_what_a_call_is_given_is_no_fault_of_the_module() -> None:
    found = place(*(_twice(factor) for factor in (1.0, 1.5)))
    assert found is not None
    assert (found.direction, found.module, found.op) == (FORWARD, "", "aten.mul")


def _twice(factor: float) -> tuple[nn.Module, Taking]:
    torch.manual_seed(0)
    model, x = Twice(factor), torch.randn(4, WIDTH)

    def taking(take: Take) -> None:
        with take:
            model(x).sum().backward()

    return model, taking
