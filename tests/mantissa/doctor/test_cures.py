"""What is a cure, and what is none: loss scales that lose gradients, formats with other losses, islands and no more."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mantissa
from mantissa.doctor.budget import Budget
from mantissa.doctor.cause import find_origin
from mantissa.doctor.course import Course
from mantissa.doctor.cures import Trial, operators_of
from mantissa.doctor.diagnosis import diagnose
from mantissa.doctor.examine import Report, take
from mantissa.doctor.finding import OVERFLOW, Finding
from mantissa.doctor.sweep import at_its_scale
from mantissa.formats import FORMATS
from mantissa.step.loop import LoopStep
from mantissa.step.replay import Replay
from mantissa.step.trace import FORWARD
from tests.mantissa.doctor.faults import (
    NARROW,
    WIDTH,
    Batch,
    Block,
    Computes,
    Net,
    Own,
    Scaled,
    around,
    error,
    large_ffn,
    noise,
    regression,
    scaled,
    small_gradient,
    step_of,
    two_branches,
)


def between(factor: float) -> nn.Module:
    """Return a residual layer that multiplies the gradient by a factor, and divides it again."""
    layer = nn.Linear(NARROW, NARROW)
    return Computes(lambda own, x: own.layer(x) + Scaled.apply(Scaled.apply(x, 1 / factor), factor), layer=layer)


LOSSES: dict[str, tuple[Callable[[], nn.Module], float, float]] = {
    "a gradient that is large only inside of a module": (lambda: Net([between(1e9)]), 1.0, 65536.0),
    "the same, a little larger than a scale can be": (lambda: Net([between(1e4)]), 1.0, 65536.0),
    "a loss in another unit": (lambda: Net([nn.Linear(NARROW, NARROW)]), 1e20, 65536.0),
    "a loss in a smaller one": (lambda: Net([nn.Linear(NARROW, NARROW)]), 1e-6, 1.0),
    "two branches": (lambda: Net([two_branches(NARROW)]), 1.0, 65536.0),
    "one layer's gradient": (lambda: Net([small_gradient(2.0**-29, NARROW)]), 1.0, 1024.0),
}


@pytest.mark.parametrize(("name", "fixed"), [*((name, True) for name in LOSSES), ("two branches", False)])
def test_no_scale_is_a_cure_that_loses_gradients(name: str, fixed: bool) -> None:
    build, factor, scale = LOSSES[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    step = LoopStep.copied(model, scaled(factor), regression(), FORMATS["fp16"], optimizer, scale, fixed)
    taken = replace(take(step, backs_off=fixed), failed=not fixed)  # as a run is examined that failed there
    diagnosis = diagnose(taken, ("formats", "range", "modules", "islands"), 600)
    text = str(Report(diagnosis))
    held = diagnosis.range
    assert held is not None
    assert held.lowest is not None
    assert held.highest is not None
    cures = [cure for finding in diagnosis.findings for cure in finding.cure]
    scales = [float(number) for cure in cures for number in re.findall(r"init_scale=([\d.e+-]+)", cure)]
    assert all(2.0**held.lowest <= scale <= 2.0**held.highest for scale in scales), text
    assert cures, text


class Outside(torch.autograd.Function):
    """Gradients above 50 become infinite, and no torch operator makes them so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        numbers = changed.numpy()
        numbers[abs(numbers.astype("float32")) > 50] = math.inf
        return changed


ENDED: dict[str, Callable[[], nn.Module]] = {
    # Gradients of modules and weights fit into fp16 at this scale, and one between two lines does not.
    "inside of a module": lambda: Computes(
        lambda own, x: own.head(torch.relu(own.layer(x) / 1000) * 1000),
        layer=nn.Linear(NARROW, NARROW),
        head=nn.Linear(NARROW, 1),
    ),
    "outside of torch": lambda: Computes(
        lambda own, x: own.head(x) + (Outside.apply(own.factor).half() * x.half()).sum(1, keepdim=True),
        factor=nn.Parameter(torch.ones(NARROW)),
        head=nn.Linear(NARROW, 1),
    ),
}


@pytest.mark.parametrize("checks", [("formats", "range", "islands"), ("formats", "islands")])
@pytest.mark.parametrize("name", ENDED)
def test_what_cures_a_run_that_its_scale_ended_is_finite_at_that_scale_or_lowers_it(
    name: str, checks: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model = ENDED[name]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    batches = [{"x": torch.randn(8, NARROW), "y": torch.randn(8, 1)} for _ in range(8)]
    step = LoopStep.copied(model, error, batches, FORMATS["fp16"], optimizer, 65536.0)
    diagnosis = diagnose(replace(take(step, backs_off=False), failed=True), checks, 600)
    text = str(Report(diagnosis))
    as_run = diagnosis.sweep.as_run
    assert as_run is not None
    assert (diagnosis.verdict, as_run.status, as_run.scale < 65536) == ("FOUND", "ok", True), text
    for fault in diagnosis.faults:
        for cure in fault.held:
            assert not Replay.as_run(cure.step).run().nonfinite, text


@pytest.mark.parametrize(("scale", "verdict"), [(65536.0, "FOUND"), (None, "NOT REPRODUCED")])
def test_what_failed_is_examined_at_the_scale_that_is_given(scale: float | None, verdict: str) -> None:
    """Where none is given, 65536 is a guess, from which the scaler goes on to a lower one."""
    model = ENDED["inside of a module"]()
    batches, optimizer = [{"x": torch.randn(8, NARROW), "y": torch.randn(8, 1)}], torch.optim.SGD(model.parameters())
    options: dict[str, Any] = {"scale": scale, "failed": True, "checks": ("formats", "range")}
    report = mantissa.examine(model, error, batches, "fp16", optimizer, **options)
    assert report.verdict == verdict, str(report)


def overflowing_twice() -> nn.Module:
    """Two layers. Each overflows in fp16, also without the other."""
    return nn.Sequential(Block(), large_ffn(), nn.LayerNorm(WIDTH), large_ffn(), Block())


def sized(size: float) -> nn.Module:
    """Return a module that multiplies by a size in 16 bits, and divides by it again."""
    return Computes(
        lambda own, x: size * torch.tanh(x).half() / size if torch.is_autocast_enabled("cpu") else torch.tanh(x)
    )


def with_zeros() -> Batch:
    """Numbers of which one is 0 in the first step."""
    x = noise()["x"]
    x[:8, 0] = 0
    return {"x": x}


ISLANDS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "one layer": (lambda: around(large_ffn()), ["1.wo"]),
    "two layers": (overflowing_twice, ["1.wo", "3.wo"]),
    # Finite in this step, and within a factor of 2 of what fp16 holds.
    "a layer near the largest number": (
        lambda: nn.Sequential(Block(), sized(4e5), nn.LayerNorm(WIDTH), sized(6e4), Block()),
        ["1", "3"],
    ),
    # In this step the input of the second layer is 0, in the next ones it is not.
    "a layer that overflows in the next steps": (
        lambda: Computes(
            lambda own, x: own.one(x) + own.two(x * x[:, :1].abs().sign()), one=large_ffn(), two=large_ffn()
        ),
        ["one.wo", "two.wo"],
    ),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_islands_are_as_few_as_cure_the_step_and_have_a_price(name: str) -> None:
    build, modules = ISLANDS[name]
    result = diagnose(take(step_of(build, "fp16", with_zeros)), ("formats", "islands"), 600)
    islands = result.islands
    assert islands is not None, str(Report(result))
    assert (islands.modules, islands.minimal) == (modules, True)
    assert re.search(r"\]\)  \([+-][\d.]+ (B|KiB|MiB)\)$", str(islands)), str(islands)
    assert not Replay.as_run(islands.step).run_with_backoff().nonfinite


def test_islands_are_told_where_there_was_no_time_to_leave_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    over: list[bool] = []
    monkeypatch.setattr(Budget, "left", lambda self: 0.0 if over else 600.0)
    monkeypatch.setattr("mantissa.doctor.cures._needed", lambda names, cured: over.append(True) or names)
    build, modules = ISLANDS["two layers"]
    result = diagnose(take(step_of(build, "fp16", with_zeros)), ("formats", "islands"), 600)
    assert result.islands is not None, str(Report(result))
    assert (set(result.islands.modules) >= set(modules), result.islands.minimal) == (True, False)
    assert "not minimal: out of time" in str(Report(result))


class Demanding(nn.Module):
    """Takes nothing but 16 bits where it is called in autocast."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            assert x.dtype.itemsize == 2
        return x.float() * 1e-6


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("aten.linalg_vector_norm", ["vector_norm"]),
        ("aten._scaled_dot_product_flash_attention_for_cpu", ["scaled_dot_product_attention"]),
        ("aten.nll_loss_forward", []),
    ],
)
def test_an_operator_is_a_cure_by_a_name_that_torch_has(operator: str, names: list[str]) -> None:
    step = step_of(lambda: around(nn.LayerNorm(WIDTH)), "fp16")
    cures = operators_of(step, Finding(OVERFLOW, FORWARD, "", "fp16", operator))
    assert [cure.step.fp32_ops for cure in cures] == ([names] if names else [])


def test_the_check_of_a_cure_sees_the_results_that_it_changes() -> None:
    model = Own(lambda own, x: x + (0 * x).sqrt())
    step = LoopStep.copied(model, error, regression(), FORMATS["fp32"], torch.optim.AdamW(model.parameters()))
    finding, budget = find_origin(Replay.as_run(step), "fp32"), Budget(600, step)
    assert finding is not None
    trial = Trial(finding, frozenset(), at_its_scale, step, Course(step, budget), budget)
    assert trial.first(finding.candidates)


def test_a_cure_with_which_the_model_raises_is_none_and_others_are_tried() -> None:
    large = Computes(lambda own, x: own.layer(x) * 1e6, layer=nn.Linear(WIDTH, WIDTH))
    step = step_of(lambda: around(nn.Sequential(large, Demanding())), "fp16")
    report = Report(diagnose(take(step), ("formats", "islands"), 600))
    modules, other = report.findings[0].cure
    assert "['1.0', '1.1']" in modules, str(report)  # of which 1.1 raises where 1.0 alone is in fp32
    assert "torch.bfloat16" in other, str(report)
    assert report.diagnosis.budget.crashes == {}


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda weights: torch.optim.AdamW(weights, 1e-3, weight_decay=0.1), True),
        (lambda weights: torch.optim.AdamW(weights, 1e-1, weight_decay=0.1), False),  # 0.01 of a weight
        (lambda weights: torch.optim.Adam(weights, 1e-3, weight_decay=0.1), False),  # it is added to the gradient
        (lambda weights: torch.optim.SGD(weights, 1e-3, weight_decay=0.1), False),
        (lambda weights: torch.optim.AdamW(weights, 1e-3, weight_decay=0.0), False),
        (lambda weights: torch.optim.NAdam(weights, 1e-3, weight_decay=0.1, decoupled_weight_decay=True), True),
    ],
)
@pytest.mark.parametrize("precision", ["bf16_pure", "bf16"])
def test_weight_decay_that_16_bits_round_away_is_said(optimizer: Any, said: bool, precision: str) -> None:
    model = Net([])
    given = optimizer(model.parameters())
    report = mantissa.examine(model, error, regression(), precision, given, checks=["updates"])
    assert ("weight decay changes nothing" in str(report)) == (said and precision == "bf16_pure"), str(report)
    assert report.diagnosis.budget.crashes == {}
