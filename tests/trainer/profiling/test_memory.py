from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mantissa.step.ledger import STEADY, Ledger, MemoryLedger

WIDE, HIDDEN, OUT, BATCH = 64, 128, 32, 1024
W1, W2 = 4 * WIDE * HIDDEN, 4 * HIDDEN * OUT  # bytes of the two weight matrices in fp32


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDE, HIDDEN, bias=False), nn.Linear(HIDDEN, OUT, bias=False))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: list[Tensor], bf16: bool) -> None:
    for x in microbatches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(x).sum()
        loss.backward()
        del loss
    optimizer.step()
    optimizer.zero_grad()


def record(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, bf16: bool = False) -> Ledger:
    with MemoryLedger(model, optimizer) as ledger:
        train_step(model, optimizer, [x], bf16)
    return ledger.report()


def test_every_byte_of_two_linears_in_fp32() -> None:
    model, x = two_linears(), torch.randn(BATCH, WIDE)
    optimizer = adamw(model)
    train_step(model, optimizer, [x], bf16=False)
    ledger = record(model, optimizer, x)
    state = 2 * (W1 + W2) + 4 * 2  # with AdamW's step counter of each parameter
    steady = {name: ledger.highest[name] for name in STEADY}
    assert steady == {"weights": W1 + W2, "buffers": 0, "gradients": W1 + W2, "optimizer": state}
    # The peak is in the second layer's backward: its input is still saved, the gradients of that input and of
    # the weight have just been made. The loss and its gradient, made before autograd runs, are 4 bytes each.
    assert ledger.peak_phase == "backward"
    assert ledger.at_peak == {
        "weights": W1 + W2,
        "buffers": 0,
        "gradients": W2,
        "optimizer": state,
        "autocast_copies": 0,
        "inputs": 4 * BATCH * WIDE,
        "activations": 4 * BATCH * HIDDEN + 8,
        "temporary": 4 * BATCH * HIDDEN,
    }
    assert ledger.peak_bytes == sum(ledger.at_peak.values())
    assert ledger.highest["activations"] == 4 * BATCH * (HIDDEN + OUT) + 4


@pytest.mark.parametrize(("batch", "bf16", "mib"), [(512, False, 154.8), (8192, True, 445)])
def test_bignet_agrees_with_torchs_own_tracker(batch: int, bf16: bool, mib: float) -> None:
    tracker_module = pytest.importorskip("torch.distributed._tools.mem_tracker")
    with FakeTensorMode():  # the real sizes, but nothing is allocated
        model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(20)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(batch, 1000)
        ledger = record(model, optimizer, x, bf16)
        tracker = tracker_module.MemTracker()
        tracker.track_external(model, optimizer, x)
        with tracker:
            train_step(model, optimizer, [x], bf16=bf16)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    assert ledger.peak_bytes == snapshot["Total"]
    # The published figures leave out the batch itself.
    assert (ledger.peak_bytes - ledger.at_peak["inputs"]) / 2**20 == pytest.approx(mib, abs=2.2)
