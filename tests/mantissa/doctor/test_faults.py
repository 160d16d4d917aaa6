"""Every planted fault is named exactly: module, direction, kind and format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mantissa.doctor.diagnosis import FOUND
from mantissa.finding import FORWARD, OVERFLOW
from tests.mantissa.doctor.faults import FAULTS, FP16, Attention
from tests.mantissa.doctor.planted import Expected, Fault, around


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_a_planted_fault_is_named(fault: Fault) -> None:
    diagnosis = fault.examined()
    assert not fault.wrong(diagnosis)
    assert (diagnosis.verdict, diagnosis.exit_code, diagnosis.budget.left_out) == (FOUND, 7, [])


class Masked(Attention):
    """Large queries and keys, and a mask that becomes -inf in fp16 before they are multiplied, in a part of a row."""

    def __init__(self) -> None:
        super().__init__(size=200.0, mask=-1e9)
        self.mask[3, 5:] = 0

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask.half()  # the first operator that is not finite, and harmless
        q, k, v = self.qkv(x.unsqueeze(-1)).chunk(3, dim=-1)
        y: Tensor = torch.softmax(q @ k.transpose(1, 2) + mask, dim=-1) @ v
        return y.mean(-1) + x


def test_of_several_first_operators_the_one_that_harms_is_named() -> None:
    expected = Expected(OVERFLOW, FORWARD, "1", "fp16")
    fault = Fault(0, "a mask and a product", expected, lambda: around(Masked()), FP16)
    (finding,) = fault.examined().findings
    assert (finding.kind, finding.module, finding.op) == (OVERFLOW, "1", "aten.bmm")
