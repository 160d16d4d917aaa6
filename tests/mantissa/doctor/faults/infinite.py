"""Planted faults that are not finite in the forward pass: numbers 1 to 8, 13 to 16 and 18 of docs/doctor.md."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.finding import DOMAIN, DTYPE, FORWARD, OVERFLOW, UNDERFLOW
from tests.mantissa.doctor.faults.planted import WIDTH, Expected, Fault, around, noise
from trainer.data.contract import Batch
from trainer.precision.modes import Precision

FP16 = Precision(mode="fp16")
FP16_MASTER = Precision(mode="fp16_master")
"""Weights and all operators in fp16: autocast would take some of them in fp32."""


class LargeFFN(nn.Module):
    """A feed-forward network whose second product is above 65504, scaled back in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.wi.weight.mul_(1000)
            self.wo.weight.mul_(1000)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wo(torch.relu(self.wi(x)))
        return x + y.float() * 1e-4


class Attention(nn.Module):
    """Eager attention over the numbers of a sample as tokens, with large queries and keys or a mask."""

    def __init__(self, size: float = 1.0, mask: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(1, 3 * WIDTH)
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH].mul_(size)
        self.mask: Tensor
        rows = torch.zeros(WIDTH, WIDTH)
        rows[3] = mask  # a row without any key
        self.register_buffer("mask", rows)
        self.masks = mask != 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.unsqueeze(-1)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        if self.masks:
            scores = scores + self.mask.to(scores.dtype)
        y: Tensor = torch.softmax(scores, dim=-1) @ v
        return y.mean(-1) + x


class InfiniteMask(Attention):
    """Attention whose mask is filled with -inf, in one row everywhere."""

    def __init__(self) -> None:
        super().__init__(mask=-1.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.unsqueeze(-1)).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)).masked_fill(self.mask < 0, -math.inf)
        y: Tensor = torch.softmax(scores, dim=-1) @ v
        return y.mean(-1) + x


class Exponential(nn.Module):
    """A softmax that does not subtract the maximum."""

    def forward(self, x: Tensor) -> Tensor:
        e = torch.exp(x + 12)
        return e / e.sum(-1, keepdim=True)


class SquareNorm(nn.Module):
    """RMS norm in the format of its input."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)


class NormOfLarge(nn.Module):
    """A linear layer with outputs of some 400, and RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), SquareNorm()
        with torch.no_grad():
            self.linear.weight.mul_(700)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


class LargeLogits(nn.Module):
    """A linear layer whose outputs are multiplied by 10^4."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.mul_(20)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * 1e4
        return y


def large_weight() -> nn.Module:
    """Return a linear layer with a weight of 10^5."""
    linear = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        linear.weight[2, 3] = 1e5
    return linear


class HalfBatchNorm(nn.Module):
    """Batch norm that computes its statistics in the format of its input."""

    def forward(self, x: Tensor) -> Tensor:
        centred = 500 * x - (500 * x).mean(0)
        return centred / (centred * centred).mean(0).sqrt()


class ByNorm(nn.Module):
    """Multiplies by one over a norm of 10^-6."""

    def forward(self, x: Tensor) -> Tensor:
        small = x * 2e-7
        return small * (1 / torch.linalg.vector_norm(small, dim=-1, keepdim=True))


def with_zero_rows() -> dict[str, Tensor]:
    """Return samples; every second one is all zeros."""
    x = noise()["x"]
    x[::2] = 0
    return {"x": x}


def classes() -> dict[str, Tensor]:
    """Return samples with a class each."""
    return noise() | {"y": torch.randint(WIDTH, (64,))}


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy, summed, in fp32."""
    return F.cross_entropy(output.float(), batch["y"], reduction="sum")


def half_sum(output: Tensor, batch: Batch) -> Tensor:
    """Return the sum of squares in the format of the output."""
    return (30 * output).square().sum()


def log_of_zero(output: Tensor, batch: Batch) -> Tensor:
    """Return a sum of negative logarithms. Some of the numbers are 0."""
    return -torch.relu(output.float()).log().sum()


def _expected(kind: str, module: str, rung: str) -> Expected:
    return Expected(kind, FORWARD, module, rung)


FAULTS = [
    Fault(1, "FFN output above 65504", _expected(OVERFLOW, "1.wo", "fp16"), lambda: around(LargeFFN()), FP16),
    Fault(2, "QKᵀ not scaled", _expected(OVERFLOW, "1", "fp16"), lambda: around(Attention(200.0)), FP16),
    Fault(
        3,
        "exp without subtracting the maximum",
        _expected(OVERFLOW, "1", "fp16_master"),
        lambda: around(Exponential()),
        FP16_MASTER,
    ),
    Fault(4, "x² in an RMSNorm", _expected(OVERFLOW, "1.norm", "fp16"), lambda: around(NormOfLarge()), FP16),
    Fault(
        5,
        "logits × 10⁴",
        _expected(OVERFLOW, "1", "fp16"),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), LargeLogits()),
        FP16,
        classes,
        cross_entropy,
    ),
    Fault(6, "a weight above 65504", _expected(OVERFLOW, "1", "fp16"), lambda: around(large_weight()), FP16),
    Fault(
        7,
        "loss summed in fp16",
        Expected(OVERFLOW, FORWARD, "", "fp16_master", (DTYPE,)),
        lambda: around(nn.Identity()),
        FP16_MASTER,
        loss=half_sum,
    ),
    Fault(
        8,
        "batch statistics in fp16, large inputs",
        _expected(OVERFLOW, "1", "fp16_master"),
        lambda: around(HalfBatchNorm()),
        FP16_MASTER,
    ),
    Fault(
        13,
        "norm with eps 1e-8 on rows of 0",
        _expected(UNDERFLOW, "0", "fp16_master"),
        lambda: nn.Sequential(SquareNorm(1e-8), nn.Linear(WIDTH, WIDTH)),
        FP16_MASTER,
        with_zero_rows,
    ),
    Fault(
        14,
        "mask of -1e9, a row all masked",
        _expected(OVERFLOW, "1", "fp16"),
        lambda: around(Attention(mask=-1e9)),
        FP16,
    ),
    Fault(15, "a row all -inf", _expected(DOMAIN, "1", "fp32"), lambda: around(InfiniteMask()), FP16),
    Fault(
        16, "log(0) in the loss", _expected(DOMAIN, "", "fp32"), lambda: around(nn.Identity()), FP16, loss=log_of_zero
    ),
    Fault(
        18,
        "division by a norm of 1e-6",
        _expected(OVERFLOW, "1", "fp16_master"),
        lambda: around(ByNorm()),
        FP16_MASTER,
    ),
]
