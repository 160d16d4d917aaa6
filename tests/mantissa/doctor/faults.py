"""The planted faults: 28 tiny models and steps that break in known ways, and what the doctor must say of each."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.finding import (
    BACKWARD,
    DIFFERENCE,
    DOMAIN,
    DTYPE,
    ERROR,
    EXCHANGE,
    FORWARD,
    LOST,
    MOMENT,
    OVERFLOW,
    SCALE,
    UNDERFLOW,
    UPDATE,
)
from tests.mantissa.doctor.planted import WIDTH, Block, Expected, Fault, around, mean_square, noise
from trainer.data.contract import Batch
from trainer.optim.optimizer import Optimizer
from trainer.parallel.compile import Compile
from trainer.precision.modes import Precision
from trainer.precision.scaler import Scaler, StaticScaler

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
    x = noise()["x"]
    x[::2] = 0
    return {"x": x}


def classes() -> dict[str, Tensor]:
    return noise() | {"y": torch.randint(WIDTH, (64,))}


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.float(), batch["y"], reduction="sum")


def half_sum(output: Tensor, batch: Batch) -> Tensor:
    return (30 * output).square().sum()


def log_of_zero(output: Tensor, batch: Batch) -> Tensor:
    return -torch.relu(output.float()).log().sum()


def _expected(kind: str, module: str, rung: str) -> Expected:
    return Expected(kind, FORWARD, module, rung)


class LargeInput(nn.Module):
    """A linear layer with inputs of 100: its weight gradient is 1000 times the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.mul_(1e-2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x * 0 + 100)
        return x + y


class RootOfPositive(nn.Module):
    """The square roots of positive numbers, 0 elsewhere, the way that has no gradient at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).float().abs() * (x > 0)
        return torch.where(h > 0, torch.sqrt(h), 0.0)


class _DividesByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / torch.zeros((), device=grads[0].device)


class Custom(nn.Module):
    """A function whose backward divides by 0."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _DividesByZero.apply(x)
        return y


def small(output: Tensor, batch: Batch) -> Tensor:
    return mean_square(output, batch) * 1e-3


def large_sum(output: Tensor, batch: Batch) -> Tensor:
    return output.float().sum() * 8e4


class CastBack(nn.Module):
    """Layer norm that casts its input to bf16, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.bfloat16(), (WIDTH,)) * self.weight.bfloat16()
        return y.to(x.dtype)


class Sine(nn.Module):
    """A linear layer and a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(3 * self.linear(x))


def _miscompile(graph: Any) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.ops.aten.cos.default


def miscompiling() -> AbstractContextManager[Any]:
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(post_grad_custom_pre_pass=_miscompile)
    return patched


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class Faint(nn.Module):
    """A residual layer whose gradient is far smaller than that of all others."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + _Scaled.apply(self.layer(x), 2.0**-30)
        return result


class TwoBranches(nn.Module):
    """The sum of two branches. The gradients of one are 2**46 times as large as those of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.tiny = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Scaled.apply(self.big(x), 2.0**12) + _Scaled.apply(self.tiny(x), 2.0**-34)
        return result


def _small_loss(output: Tensor, batch: Batch) -> Tensor:
    return mean_square(output, batch) * 1e-6


LONG = 4096
"""Terms of a sum, positions of a context."""
REPEATS = 10_000


class NaiveVariance(nn.Module):
    """Divides the features by a standard deviation that is computed as E[x²] - E[x]²."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.up.bias, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2
        result: Tensor = x + (h - h.mean(-1, keepdim=True)) / (variance.abs() + 1e-2).sqrt()
        return result


class RunningSum(nn.Module):
    """Adds up one term for each position, in the dtype of the terms."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        nn.init.constant_(self.gate.bias, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        terms = self.gate(x)[..., 0].sigmoid()
        total = torch.zeros_like(terms[:, 0])
        for term in terms.unbind(1):
            total = total + term
        result: Tensor = x.mean(1) * (total / terms.shape[1])[:, None]
        return result


class Tokens(nn.Module):
    """The mean embedding of many tokens, most of them the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(self.embed(x.long()[:, 0]).mean(1))
        return result


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position, computed in bf16."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        powers = torch.arange(0, WIDTH, 2) / WIDTH
        self.register_buffer("frequencies", 10_000.0**-powers, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).to(torch.bfloat16)
        angles = positions[:, None] * self.frequencies.to(torch.bfloat16)
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
        )


def _sequences(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, WIDTH)}


def _repeated() -> dict[str, Tensor]:
    tokens = torch.zeros(16, 1, REPEATS)
    tokens[:, :, :100] = torch.randint(1, 8, (16, 1, 100)).float()
    return {"x": tokens}


class Turned(nn.Module):
    """A layer before the rotation, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.rotary = Rotary()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.rotary(self.before(x)))


def faint(output: Tensor, batch: Batch) -> Tensor:
    return mean_square(output, batch) * 1e-3


def small_weights() -> nn.Module:
    model = around(nn.LayerNorm(WIDTH))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if name.startswith("1.") else 0.01)
    return model


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
        18, "division by a norm of 1e-6", _expected(OVERFLOW, "1", "fp16_master"), lambda: around(ByNorm()), FP16_MASTER
    ),
    Fault(
        9,
        "static scale 2²⁴: a weight gradient overflows",
        Expected(OVERFLOW, BACKWARD, "1.linear", "fp16+scaler"),
        lambda: around(LargeInput()),
        Precision(mode="fp16"),
        loss=small,
        scaler=StaticScaler(scale=2.0**24),
    ),
    Fault(
        28,
        "gradients that overflow only in the fp16 sum of two ranks",
        Expected(OVERFLOW, EXCHANGE, "0", "sum of 2 ranks"),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)),
        Precision(mode="fp16_master"),
        lambda: noise(size=0.1),
        large_sum,
        StaticScaler(scale=1.0),
        ranks=2,
    ),
    Fault(
        17,
        "where(x > 0, sqrt(x), 0) at 0",
        Expected(DOMAIN, BACKWARD, "1", "fp32"),
        lambda: around(RootOfPositive()),
        Precision(mode="fp16"),
    ),
    Fault(
        19,
        "a custom function with inf in its backward",
        Expected(DOMAIN, BACKWARD, "1", "fp32"),
        lambda: around(Custom()),
        Precision(mode="fp16"),
    ),
    Fault(
        22,
        "an fp32 module that casts back to bf16",
        Expected(DTYPE, FORWARD, "1", "bf16"),
        lambda: around(CastBack()),
        Precision(mode="bf16", fp32_modules=["1"]),
    ),
    Fault(
        27,
        "a compiled block that differs from eager",
        Expected(DIFFERENCE, FORWARD, "1", "inductor"),
        lambda: nn.Sequential(Block(), Sine()),
        Precision(),
        compile=Compile(mode="default"),
        planting=miscompiling,
    ),
    Fault(
        10,
        "no loss scale, and a loss of 1e-6",
        Expected(UNDERFLOW, BACKWARD, ("0.up", "0.down", "1", "2.up", "2.down"), "fp16"),
        lambda: around(nn.Linear(WIDTH, WIDTH)),
        Precision(mode="fp16"),
        loss=_small_loss,
        scaler=Scaler(force=True),
    ),
    Fault(
        11,
        "one layer's gradient times 2**-30",
        Expected(UNDERFLOW, BACKWARD, "1.layer", "fp16"),
        lambda: around(Faint()),
        Precision(mode="fp16"),
        scaler=StaticScaler(scale=1024),
    ),
    Fault(
        12, "a big and a tiny branch", Expected(SCALE, BACKWARD, "tiny", "fp16"), TwoBranches, Precision(mode="fp16")
    ),
    Fault(
        20,
        "E[x²] - E[x]² with a mean of 100",
        Expected(ERROR, FORWARD, "1", "bf16"),
        lambda: around(NaiveVariance()),
        Precision(mode="bf16"),
    ),
    Fault(
        21,
        "a running sum of 4096 terms",
        Expected(ERROR, FORWARD, "0", "bf16"),
        lambda: nn.Sequential(RunningSum(), Block()),
        Precision(mode="bf16"),
        data=lambda: _sequences(16, LONG),
    ),
    Fault(
        23,
        "the embedding gradient of a token that occurs 10,000 times",
        Expected(ERROR, BACKWARD, "embed", "bf16_master"),
        Tokens,
        Precision(mode="bf16_master"),
        data=_repeated,
    ),
    Fault(
        26,
        "rotary angles at long context",
        Expected(ERROR, FORWARD, "rotary", "bf16"),
        Turned,
        Precision(mode="bf16"),
        data=lambda: _sequences(16, LONG),
    ),
    Fault(
        24,
        "AdamW with lr 1e-4 on 16-bit norm weights at 1.0",
        Expected(LOST, UPDATE, "1", "bf16_pure"),
        small_weights,
        Precision(mode="bf16_pure"),
        optimizer=Optimizer(name="AdamW", lr=1e-4),
    ),
    Fault(
        25,
        "Adam's second moment in fp16",
        Expected(MOMENT, UPDATE, ("0.down", "0.up"), "fp16_pure", (LOST,)),
        lambda: nn.Sequential(Block()),
        Precision(mode="fp16_pure"),
        loss=faint,
        optimizer=Optimizer(name="Adam", lr=1e-5),
    ),
]
FAULTS.sort(key=lambda fault: fault.number)
