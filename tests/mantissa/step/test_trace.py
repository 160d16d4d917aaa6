"""Which dtypes modules compute in, found in a forward pass that changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mantissa.step.trace import LOSS, DtypeRecorder


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(2, 2).bfloat16()
        self.unused = nn.Linear(2, 2)
        self.moves = nn.Flatten()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rounded = self.moves(x).to(torch.bfloat16).clone()
        return {"wide": (self.narrow(rounded) * 2).float() + x, "count": (x > 0).sum()}


def test_own_operators_are_those_that_compute_and_belong_to_no_child() -> None:
    model = Parts()
    recorder = DtypeRecorder(model)
    with recorder:
        model(torch.ones(1, 2))["wide"].sum()
    rows = {row.pop("module"): row for row in recorder.modules()}
    assert rows == {
        "": {"type": "Parts", "weights": "", "compute": "bfloat16, float32", "output": "float32"},
        "narrow": {"type": "Linear", "weights": "bfloat16", "compute": "bfloat16", "output": "bfloat16"},
        "unused": {"type": "Linear", "weights": "float32", "compute": "", "output": ""},
        LOSS: {"type": "", "weights": "", "compute": "float32", "output": ""},
    }
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
