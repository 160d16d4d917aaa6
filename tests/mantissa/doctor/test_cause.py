"""The operator that makes a step not finite; what rules say of it is in the corpus of faults."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import mantissa
from mantissa.doctor.cause import find_origin
from mantissa.doctor.finding import NOT_FINITE, OVERFLOW
from mantissa.doctor.origin import locate
from mantissa.doctor.tape import Tape
from mantissa.step.replay import Replay
from mantissa.step.trace import FORWARD, Trace
from tests.mantissa.doctor.faults import BATCH, WIDTH, around, error, large_ffn, regression, step_of


def test_an_operator_is_found_with_its_place_and_its_way_to_the_loss() -> None:
    replay = Replay.as_run(step_of(lambda: around(large_ffn()), "fp16"))
    origin = locate(replay, "fp16+scaler")
    assert origin is not None
    site = origin.node.site
    assert (site.module, site.direction, site.op) == ("1.wo", FORWARD, "aten.addmm")
    assert (site.dtype, site.shape) == ("float16", (BATCH, WIDTH))
    assert "own.wo(torch.relu(own.wi(x)))" in site.line  # which is no line of the library's
    finding = find_origin(replay, "fp16+scaler")
    assert finding is not None
    assert (finding.kind, finding.format, finding.path) == (OVERFLOW, "fp16+scaler", origin.path)
    assert finding.path[-1] == "loss"


class Peak(nn.Module):
    """A linear layer that notes the largest of its results, in a unit in which fp16 cannot hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        self.peak.copy_((result.detach().abs() * 1e6).amax())
        return result


def test_a_way_that_ends_in_a_buffer_names_it() -> None:
    finding = find_origin(Replay.as_run(step_of(Peak, "fp16")), "fp16")
    assert finding is not None
    assert (finding.kind, finding.op, finding.path[-1]) == (OVERFLOW, "aten.mul", "peak")


class Outside(nn.Module):
    """A linear layer, with a buffer that code outside of torch makes infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.numpy()[0] = math.inf
        return self.layer(x).squeeze(-1)


def test_a_buffer_that_no_operator_makes_infinite_is_one_of_the_forward_pass() -> None:
    model = nn.Sequential(Outside())
    report = mantissa.examine(model, error, regression(), "fp32", checks=["formats"], time_budget_s=600)
    (finding,) = report.findings
    assert (finding.kind, finding.direction, finding.module) == (NOT_FINITE, FORWARD, "0")


def test_results_of_one_operator_are_in_its_order() -> None:
    tape = Tape()
    with Trace(None, tape.visit):
        total = torch.stack([each for _ in range(8) for each in torch.var_mean(torch.full((4,), 3e38) * 2)])
    behind = [(node.number, node.index) for node in tape.behind([total])]
    assert len(behind) == 8 * 3 + 1
    assert behind == sorted(behind)
