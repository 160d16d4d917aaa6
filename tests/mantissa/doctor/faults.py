"""The planted faults: tiny models and steps that break in known ways, and what the doctor must say of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mantissa
from mantissa import finding
from mantissa.doctor.diagnosis import CHECKS, Diagnosis
from mantissa.finding import (
    BACKWARD,
    DOMAIN,
    DTYPE,
    ERROR,
    EXCHANGE,
    FORWARD,
    MOMENT,
    OVERFLOW,
    SCALE,
    UNDERFLOW,
    UPDATE,
)
from tests.mantissa.doctor.planted import BATCH, WIDTH, Block, Planted, around, mean_square, noise
from trainer.precision.modes import Precision
from trainer.precision.scaler import StaticScaler

Batch = dict[str, Tensor]
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


def square_norm(eps: float = 1e-5) -> nn.Module:
    """Return RMS norm in the format of its input."""
    return Computes(lambda own, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps))


def large_weight() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight[2, 3] = 1e5
    return layer


def by_norm(own: Any, x: Tensor) -> Tensor:
    """Multiply by one over a norm of 10^-6."""
    small = x * 2e-7
    return small * (1 / torch.linalg.vector_norm(small, dim=-1, keepdim=True))


def with_zero_rows() -> dict[str, Tensor]:
    x = noise()["x"]
    x[::2] = 0
    return {"x": x}


def half_sum(output: Tensor, batch: Batch) -> Tensor:
    return (30 * output).square().sum()


def log_of_zero(output: Tensor, batch: Batch) -> Tensor:
    return -torch.relu(output.float()).log().sum()


def handmade() -> nn.Module:
    """Return a module that uses a layer's weights without calling it, so that what is set for the layer is no use."""
    return Computes(lambda own, x: F.linear(x, own.linear.weight, own.linear.bias), linear=linear())


class CastBack(nn.LayerNorm):
    """Layer norm that casts its input to bf16, whatever it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.bfloat16(), (WIDTH,)) * self.weight.bfloat16()
        return y.to(x.dtype)


# --- the backward pass ---


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


@dataclass(frozen=True)
class Fault:
    """A fault in a loop, and what must be said of it: the kind, the direction, the module and the first format."""

    expected: tuple[str, str, str, str]
    model: Callable[[], nn.Module]
    """Takes a batch's ``x`` and returns a tensor; built after seeding."""
    precision: str = ""
    """Of the loop; empty: the expected format."""
    data: Callable[[], Batch] = noise
    loss: Callable[[Tensor, Batch], Tensor] = mean_square
    """From the model's output and the batch to the loss, summed over the samples."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``examine``."""

    def examined(self) -> Diagnosis:
        """Let the doctor examine the step, but not search for a cure."""
        torch.manual_seed(0)
        model = self.model()
        torch.manual_seed(1)
        data = self.data()
        splits = zip(*(tensor.split(BATCH) for tensor in data.values()), strict=True)
        batches = [dict(zip(data, rows, strict=True)) for rows in splits]

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return self.loss(model(batch["x"]), batch) / len(batch["x"])

        checks = [name for name in CHECKS if name != "islands"]
        optimizer = self.optimizer(model.parameters())
        precision = self.precision or self.expected[3]
        return mantissa.examine(
            model, loss, batches, precision, optimizer, checks=checks, budget_s=600, **self.options
        ).diagnosis


FAULTS = {
    "FFN output above 65504": Fault((OVERFLOW, FORWARD, "1.wo", "fp16"), lambda: around(large_ffn())),
    "a mask that is harmless before a product that is not": Fault(
        (OVERFLOW, FORWARD, "1", "fp16"), lambda: around(Masked())
    ),
    "x² in an RMSNorm": Fault(
        (OVERFLOW, FORWARD, "1.norm", "fp16"),
        lambda: around(Computes(lambda own, x: own.norm(own.linear(x)), linear=linear(700), norm=square_norm())),
    ),
    "a weight above 65504": Fault((OVERFLOW, FORWARD, "1", "fp16"), lambda: around(large_weight())),
    "one layer's gradient times 2**-30": Fault(
        (UNDERFLOW, BACKWARD, "1.layer", "fp16"),
        lambda: around(Computes(lambda own, x: x + _Scaled.apply(own.layer(x), 2.0**-30), layer=linear())),
        options={"scale": 1024.0, "fixed_scale": True},
    ),
    "a big and a tiny branch": Fault((SCALE, BACKWARD, "tiny", "fp16"), two_branches),
    "norm with eps 1e-8 on rows of 0": Fault(
        (UNDERFLOW, FORWARD, "0", "fp16_pure"), lambda: nn.Sequential(square_norm(1e-8), linear()), data=with_zero_rows
    ),
    "mask of -1e9, a row all masked": Fault((OVERFLOW, FORWARD, "1", "fp16"), lambda: around(Attention(mask=-1e9))),
    "a row all -inf": Fault((DOMAIN, FORWARD, "1", "fp32"), lambda: around(Attention(mask=-1.0, filled=True)), "fp16"),
    "log(0) in the loss": Fault((DOMAIN, FORWARD, "", "fp32"), lambda: around(nn.Identity()), "fp16", loss=log_of_zero),
    "division by a norm of 1e-6": Fault((OVERFLOW, FORWARD, "1", "fp16_pure"), lambda: around(Computes(by_norm))),
    "a custom function with inf in its backward": Fault(
        (DOMAIN, BACKWARD, "1", "fp32"), lambda: around(Computes(lambda own, x: _DividesByZero.apply(x, 1.0))), "fp16"
    ),
    "E[x²] - E[x]² with a mean of 100": Fault((ERROR, FORWARD, "1", "bf16"), lambda: around(naive_variance())),
    "the embedding gradient of a token that occurs 10,000 times": Fault(
        (ERROR, BACKWARD, "embed", "bf16_pure"), tokens, data=repeated
    ),
    "Adam's second moment in fp16": Fault(
        (MOMENT, UPDATE, "0.up", "fp16_pure"),
        lambda: nn.Sequential(Block()),
        loss=lambda output, batch: mean_square(output, batch) * 1e-3,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-5),
    ),
    "rotary angles at long context": Fault((ERROR, FORWARD, "rotary", "bf16"), turned, data=sequences),
}
"""Faults in a loop."""

TRAINED = {
    "a static scale that is too large": (
        [(OVERFLOW, BACKWARD, "1.linear", "fp16+scaler")],
        Planted(
            lambda: around(Computes(lambda own, x: x + own.linear(x * 0 + 100), linear=linear(1e-2))),
            Precision(mode="fp16"),
            loss=lambda output, batch: mean_square(output, batch) * 1e-3,
            scaler=StaticScaler(scale=2.0**24),
        ),
    ),
    "loss summed in fp16": (
        [(OVERFLOW, FORWARD, "", "fp16_master"), (DTYPE, FORWARD, "", "fp16_master")],
        Planted(lambda: around(nn.Identity()), Precision(mode="fp16_master"), loss=half_sum),
    ),
    "an fp32 module that casts back to bf16": (
        [(DTYPE, FORWARD, "1", "bf16")],
        Planted(lambda: around(CastBack(WIDTH, bias=False)), Precision(mode="bf16", fp32_modules=["1"])),
    ),
    "an fp32 module whose parent uses its weights": (
        [(DTYPE, FORWARD, "1.linear", "bf16")],
        Planted(lambda: around(handmade()), Precision(mode="bf16", fp32_modules=["1.linear"])),
    ),
    "a compiled block that differs from eager": (
        [(finding.DIFFERENCE, FORWARD, "1", "inductor")],
        Planted(product_and_layer, Precision()),
    ),
    "gradients that overflow only in the fp16 sum of two ranks": (
        [(OVERFLOW, EXCHANGE, "0", "sum of 2 ranks")],
        Planted(
            lambda: nn.Sequential(linear()),
            Precision(mode="fp16_master"),
            lambda: noise(size=0.1),
            large_sum,
            StaticScaler(scale=1.0),
            ranks=2,
        ),
    ),
}
"""Faults in what only the trainer has, and all that must be found."""
