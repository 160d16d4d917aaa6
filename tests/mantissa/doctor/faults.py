"""The planted faults: 28 tiny models and steps that break in known ways, and what the doctor must say of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa import finding
from mantissa.finding import BACKWARD, DOMAIN, DTYPE, ERROR, FORWARD, LOST, OVERFLOW, UNDERFLOW, UPDATE
from tests.mantissa.doctor.planted import WIDTH, Block, Expected, Fault, around, mean_square, noise
from trainer.data.contract import Batch
from trainer.optim.optimizer import Optimizer
from trainer.precision.modes import Precision
from trainer.precision.scaler import Scaler, StaticScaler

FP16, BF16 = Precision(mode="fp16"), Precision(mode="bf16")
FP16_MASTER = Precision(mode="fp16_master")
"""Weights and all operators in fp16: autocast would take some of them in fp32."""
LONG = 4096
"""Terms of a sum, positions of a context."""
REPEATS = 10_000


class Computes(nn.Module):
    """A function of this module and its input, with layers of these names."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def linear(times: float = 1.0) -> nn.Linear:
    """Return a layer whose weights are as many times as large as usual."""
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight.mul_(times)
    return layer


# --- the forward pass ---


def large_ffn() -> nn.Module:
    """Return a feed-forward network whose second product is above 65504, scaled back in fp32."""
    return Computes(lambda own, x: x + own.wo(torch.relu(own.wi(x))).float() * 1e-4, wi=linear(1000), wo=linear(1000))


class Attention(nn.Module):
    """Eager attention over the numbers of a sample as tokens, with large queries and keys or a mask."""

    def __init__(self, size: float = 1.0, mask: float = 0.0, filled: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(1, 3 * WIDTH)
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH].mul_(size)
        self.mask: Tensor
        rows = torch.zeros(WIDTH, WIDTH)
        rows[3] = mask  # a row without any key
        self.register_buffer("mask", rows)
        self.filled = filled

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.unsqueeze(-1)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        masked = scores.masked_fill(self.mask < 0, -math.inf) if self.filled else scores + self.mask.to(scores.dtype)
        y: Tensor = torch.softmax(masked, dim=-1) @ v
        return y.mean(-1) + x


def exponential(own: Any, x: Tensor) -> Tensor:
    """A softmax that does not subtract the maximum."""
    e = torch.exp(x + 12)
    return e / e.sum(-1, keepdim=True)


def square_norm(eps: float = 1e-5) -> nn.Module:
    """Return RMS norm in the format of its input."""
    return Computes(lambda own, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps))


def large_weight() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight[2, 3] = 1e5
    return layer


def half_batch_norm(own: Any, x: Tensor) -> Tensor:
    """Batch norm that computes its statistics in the format of its input."""
    centred = 500 * x - (500 * x).mean(0)
    return centred / (centred * centred).mean(0).sqrt()


def by_norm(own: Any, x: Tensor) -> Tensor:
    """Multiply by one over a norm of 10^-6."""
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


class CastBack(nn.LayerNorm):
    """Layer norm that casts its input to bf16, whatever it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.bfloat16(), (WIDTH,)) * self.weight.bfloat16()
        return y.to(x.dtype)


# --- the backward pass ---


def root_of_positive(own: Any, x: Tensor) -> Tensor:
    """The square roots of positive numbers, 0 elsewhere, the way that has no gradient at 0."""
    h = own.linear(x).float().abs() * (x > 0)
    return torch.where(h > 0, torch.sqrt(h), 0.0)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class _DividesByZero(_Scaled):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / torch.zeros((), device=gradients[0].device), None


def two_branches() -> nn.Module:
    """Return the sum of two branches. The gradients of one are 2**46 times as large as those of the other."""
    return Computes(
        lambda own, x: _Scaled.apply(own.big(x), 2.0**22) + _Scaled.apply(own.tiny(x), 2.0**-24),
        big=linear(),
        tiny=linear(),
    )


def times(factor: float) -> Callable[[Tensor, Batch], Tensor]:
    return lambda output, batch: mean_square(output, batch) * factor


def large_sum(output: Tensor, batch: Batch) -> Tensor:
    return output.float().sum() * 8e4


# --- the compiler ---


def _miscompile(graph: Any) -> None:
    """Multiply by the weights of a layer as they are, not transposed."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
        if node.args[0].meta["val"].shape == (WIDTH, WIDTH):
            node.replace_all_uses_with(node.args[0])


def miscompiling() -> AbstractContextManager[Any]:
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(post_grad_custom_pre_pass=_miscompile)
    return patched


def product_and_layer() -> nn.Module:
    """Return two products, for which inductor calls torch's: a kernel of its own takes it many seconds to make."""
    product = Computes(lambda own, x: x @ own.weight)
    product.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
    return nn.Sequential(product, nn.Linear(WIDTH, WIDTH, bias=False))


# --- errors and updates ---


def naive_variance() -> nn.Module:
    """Divide the features by a standard deviation that is computed as E[x²] - E[x]²."""

    def function(own: Any, x: Tensor) -> Tensor:
        h = own.up(x)
        variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2
        result: Tensor = x + (h - h.mean(-1, keepdim=True)) / (variance.abs() + 1e-2).sqrt()
        return result

    up = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(up.bias, 100.0)
    return Computes(function, up=up)


def running_sum() -> nn.Module:
    """Add up one term for each position, in the dtype of the terms."""

    def function(own: Any, x: Tensor) -> Tensor:
        terms = own.gate(x)[..., 0].sigmoid()
        total = torch.zeros_like(terms[:, 0])
        for term in terms.unbind(1):
            total = total + term
        result: Tensor = x.mean(1) * (total / terms.shape[1])[:, None]
        return result

    gate = nn.Linear(WIDTH, 1)
    nn.init.constant_(gate.bias, 1.0)
    return Computes(function, gate=gate)


def tokens() -> nn.Module:
    """Return the mean embedding of many tokens, most of them the same one."""
    return Computes(
        lambda own, x: own.block(own.embed(x.long()[:, 0]).mean(1)), embed=nn.Embedding(8, WIDTH), block=Block()
    )


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


def turned() -> nn.Module:
    """Return a layer before the rotation, and one after it."""
    return Computes(
        lambda own, x: own.after(own.rotary(own.before(x))), before=linear(), rotary=Rotary(), after=linear()
    )


def sequences() -> dict[str, Tensor]:
    return {"x": torch.randn(16, LONG, WIDTH)}


def repeated() -> dict[str, Tensor]:
    found = torch.zeros(16, 1, REPEATS)
    found[:, :, :100] = torch.randint(1, 8, (16, 1, 100)).float()
    return {"x": found}


def small_weights() -> nn.Module:
    model = around(nn.LayerNorm(WIDTH))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if name.startswith("1.") else 0.01)
    return model


def _forward(kind: str, module: str, format: str, *also: str) -> Expected:
    return Expected(kind, FORWARD, module, format, also)


def _backward(kind: str, module: str | tuple[str, ...], format: str) -> Expected:
    return Expected(kind, BACKWARD, module, format)


FAULTS = [
    Fault(1, "FFN output above 65504", _forward(OVERFLOW, "1.wo", "fp16"), lambda: around(large_ffn()), FP16),
    Fault(2, "QKᵀ not scaled", _forward(OVERFLOW, "1", "fp16"), lambda: around(Attention(200.0)), FP16),
    Fault(
        3,
        "exp without subtracting the maximum",
        _forward(OVERFLOW, "1", "fp16_master"),
        lambda: around(Computes(exponential)),
        FP16_MASTER,
    ),
    Fault(
        4,
        "x² in an RMSNorm",
        _forward(OVERFLOW, "1.norm", "fp16"),
        lambda: around(Computes(lambda own, x: own.norm(own.linear(x)), linear=linear(700), norm=square_norm())),
        FP16,
    ),
    Fault(
        5,
        "logits × 10⁴",
        _forward(OVERFLOW, "1", "fp16"),
        lambda: nn.Sequential(linear(), Computes(lambda own, x: own.linear(x) * 1e4, linear=linear(20))),
        FP16,
        classes,
        cross_entropy,
    ),
    Fault(6, "a weight above 65504", _forward(OVERFLOW, "1", "fp16"), lambda: around(large_weight()), FP16),
    Fault(
        7,
        "loss summed in fp16",
        _forward(OVERFLOW, "", "fp16_master", DTYPE),
        lambda: around(nn.Identity()),
        FP16_MASTER,
        loss=half_sum,
    ),
    Fault(
        8,
        "batch statistics in fp16, large inputs",
        _forward(OVERFLOW, "1", "fp16_master"),
        lambda: around(Computes(half_batch_norm)),
        FP16_MASTER,
    ),
    Fault(
        9,
        "static scale 2²⁴: a weight gradient overflows",
        _backward(OVERFLOW, "1.linear", "fp16+scaler"),
        lambda: around(Computes(lambda own, x: x + own.linear(x * 0 + 100), linear=linear(1e-2))),
        FP16,
        loss=times(1e-3),
        scaler=StaticScaler(scale=2.0**24),
    ),
    Fault(
        10,
        "no loss scale, and a loss of 1e-6",
        _backward(UNDERFLOW, ("0.up", "0.down", "1", "2.up", "2.down"), "fp16"),
        lambda: around(linear()),
        FP16,
        loss=times(1e-6),
        scaler=Scaler(force=True),
    ),
    Fault(
        11,
        "one layer's gradient times 2**-30",
        _backward(UNDERFLOW, "1.layer", "fp16"),
        lambda: around(Computes(lambda own, x: x + _Scaled.apply(own.layer(x), 2.0**-30), layer=linear())),
        FP16,
        scaler=StaticScaler(scale=1024),
    ),
    Fault(12, "a big and a tiny branch", _backward(finding.SCALE, "tiny", "fp16"), two_branches, FP16),
    Fault(
        13,
        "norm with eps 1e-8 on rows of 0",
        _forward(UNDERFLOW, "0", "fp16_master"),
        lambda: nn.Sequential(square_norm(1e-8), linear()),
        FP16_MASTER,
        with_zero_rows,
    ),
    Fault(
        14,
        "mask of -1e9, a row all masked",
        _forward(OVERFLOW, "1", "fp16"),
        lambda: around(Attention(mask=-1e9)),
        FP16,
    ),
    Fault(15, "a row all -inf", _forward(DOMAIN, "1", "fp32"), lambda: around(Attention(mask=-1.0, filled=True)), FP16),
    Fault(
        16, "log(0) in the loss", _forward(DOMAIN, "", "fp32"), lambda: around(nn.Identity()), FP16, loss=log_of_zero
    ),
    Fault(
        17,
        "where(x > 0, sqrt(x), 0) at 0",
        _backward(DOMAIN, "1", "fp32"),
        lambda: around(Computes(root_of_positive, linear=linear())),
        FP16,
    ),
    Fault(
        18,
        "division by a norm of 1e-6",
        _forward(OVERFLOW, "1", "fp16_master"),
        lambda: around(Computes(by_norm)),
        FP16_MASTER,
    ),
    Fault(
        19,
        "a custom function with inf in its backward",
        _backward(DOMAIN, "1", "fp32"),
        lambda: around(Computes(lambda own, x: _DividesByZero.apply(x, 1.0))),
        FP16,
    ),
    Fault(
        20,
        "E[x²] - E[x]² with a mean of 100",
        _forward(ERROR, "1", "bf16"),
        lambda: around(naive_variance()),
        BF16,
    ),
    Fault(
        21,
        "a running sum of 4096 terms",
        _forward(ERROR, "0", "bf16"),
        lambda: nn.Sequential(running_sum(), Block()),
        BF16,
        data=sequences,
    ),
    Fault(
        22,
        "an fp32 module that casts back to bf16",
        _forward(DTYPE, "1", "bf16"),
        lambda: around(CastBack(WIDTH, bias=False)),
        Precision(mode="bf16", fp32_modules=["1"]),
    ),
    Fault(
        23,
        "the embedding gradient of a token that occurs 10,000 times",
        _backward(ERROR, "embed", "bf16_master"),
        tokens,
        Precision(mode="bf16_master"),
        data=repeated,
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
        Expected(finding.MOMENT, UPDATE, ("0.down", "0.up"), "fp16_pure", (LOST,)),
        lambda: nn.Sequential(Block()),
        Precision(mode="fp16_pure"),
        loss=times(1e-3),
        optimizer=Optimizer(name="Adam", lr=1e-5),
    ),
    Fault(26, "rotary angles at long context", _forward(ERROR, "rotary", "bf16"), turned, BF16, data=sequences),
    Fault(
        27,
        "a compiled block that differs from eager",
        _forward(finding.DIFFERENCE, "1", "inductor"),
        product_and_layer,
        Precision(),
        compiles=True,
        planting=miscompiling,
    ),
    Fault(
        28,
        "gradients that overflow only in the fp16 sum of two ranks",
        Expected(OVERFLOW, finding.EXCHANGE, "0", "sum of 2 ranks"),
        lambda: nn.Sequential(linear()),
        FP16_MASTER,
        lambda: noise(size=0.1),
        large_sum,
        StaticScaler(scale=1.0),
        ranks=2,
    ),
]
