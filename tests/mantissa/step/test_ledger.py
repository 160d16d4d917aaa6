"""The part of a step's memory that is in 16 bits, of which the ledger's sentence says what autocast can still save."""

from __future__ import annotations

import torch
from torch import nn

from mantissa.step.ledger import MemoryLedger


def test_what_is_in_16_bits_at_the_peak_are_copies_of_weights_and_activations() -> None:
    width, rows = 64, 4096
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(rows, width)
    with MemoryLedger(model, optimizer) as ledger:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        optimizer.step()
    report = ledger.report()
    assert report.at_peak["activations"] > rows * width
    assert report.half_at_peak["activations"] >= report.at_peak["activations"] - 8  # all but the loss and its gradient
    assert report.half_at_peak["autocast_copies"] == report.at_peak["autocast_copies"]
    assert report.half_at_peak["weights"] == report.half_at_peak["gradients"] == 0
