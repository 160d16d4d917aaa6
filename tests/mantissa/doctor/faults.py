"""Models and steps with a known fault, and what the doctor must say of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mantissa
from mantissa.doctor.examine import Report
from mantissa.finding import (
    BACKWARD,
    BLOCKED,
    DIFFERENCE,
    DIVERGENCE,
    DOMAIN,
    DTYPE,
    ERROR,
    EXCEPTION,
    FORWARD,
    INPUT,
    LOST,
    MOMENT,
    OVERFLOW,
    RATE,
    SCALE,
    UNDERFLOW,
    UPDATE,
)
from tests.mantissa.doctor.planted import BATCH, WIDTH, Block, Planted, around, mean_square, noise
from trainer.precision.modes import Precision
from trainer.precision.scaler import StaticScaler

Batch = dict[str, Tensor]
REPEATS = 10_000


# --- small networks and data of a loop ---


class Own(nn.Module):
    """A network around one operation of the model's own."""

    def __init__(self, operation: Callable[[nn.Module, Tensor], Tensor] = lambda own, x: x, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, width)
        self.outer = nn.Linear(width, 1)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(F.gelu(self.operation(self, self.inner(x)))).squeeze(-1)
        return y


def regression(rows: int = 16, offset: float = 0.0, batches: int = 12) -> list[Batch]:
    torch.manual_seed(1)
    weights = torch.linspace(-1, 1, 8)
    inputs = [torch.randn(rows, 8) for _ in range(batches)]
    return [{"x": x + offset, "y": (x @ weights).sin()} for x in inputs]


def error(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def scaled(factor: float) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: factor * error(model, batch)


def with_value(batches: list[Batch], step: int, value: float) -> list[Batch]:
    batches[step]["x"][5, 3] = value
    return batches


def with_buffer(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Own(lambda own, x: x * own.get_buffer("gain"))
    model.register_buffer("gain", torch.ones(32, dtype=dtype))
    model.get_buffer("gain")[2] = value
    return model


def averaging(own: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        own.get_buffer("mean").lerp_(x.mean(0).to(torch.bfloat16), 1e-3)
    return x - own.get_buffer("mean")


def averaged() -> nn.Module:
    model = Own(averaging)
    model.register_buffer("mean", torch.ones(32, dtype=torch.bfloat16))
    return model


def beside_sparse() -> nn.Module:
    model = Own(lambda own, x: 1e6 * x / 1e6 + own.get_submodule("items")(torch.arange(len(x))))
    model.add_module("items", nn.Embedding(16, 32, sparse=True))
    return model


def hooked(hook: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Own()
    for parameter in model.parameters():
        parameter.register_hook(hook)
    return model


def clipping() -> nn.Module:
    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    model = Own()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return model


def hooked_module() -> nn.Module:
    model = Own()
    model.outer.register_full_backward_hook(lambda _, given, __: tuple(gradient.half().float() for gradient in given))
    return model


class Items(nn.Module):
    """Takes the number of an item from the first column of its features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(1008, 8)
        self.outer = nn.Linear(8 + 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        y: Tensor = self.outer(torch.cat([self.item(x[:, 0].long()), x[:, 1:]], -1)).squeeze(-1)
        return y.float()


def items() -> list[Batch]:
    torch.manual_seed(1)
    taste = torch.randn(1000).sign()
    numbers = [torch.randint(1000, (256,)) for _ in range(12)]
    return [{"x": torch.cat([each[:, None], torch.randn(256, 3)], 1), "y": taste[each]} for each in numbers]


class Far(nn.Module):
    """A weight at which numbers of fp32 are 1/8 apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor([2.0**20]))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift - 2.0**20 + 0 * x.sum(-1)


class Signed(torch.optim.Optimizer):
    """Gradient descent, or ascent, with an attribute of its own."""

    def __init__(self, parameters: Iterator[nn.Parameter], sign: float) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.sign = sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=self.sign * group["lr"])


class Compressed(torch.optim.Adam):
    """Casts gradients to 16 bits, as if they were sent."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, 1e-2, eps=1e-20)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.copy_(parameter.grad.half())
        super().step()


def with_gain(operation: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    model = Own(operation)
    model.gain = nn.Parameter(torch.ones(32))
    return model


def with_label(value: float) -> list[Batch]:
    batches = regression()
    batches[0]["y"][5] = value
    return batches


class Halved(torch.autograd.Function):
    """Casts what it keeps for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.half())
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0].float() * gradient


def large_bias(model: nn.Module, value: float = 1000.0) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("inner.bias").add_(value)
    return model


def preferences(model: nn.Module, batch: Batch) -> Tensor:
    likely = model(batch["x"]).log_softmax(-1).gather(-1, batch["y"][..., None]).squeeze(-1)
    sums = likely.sum(-1)
    return ((sums[::2] - sums[1::2] - 2.0) ** 2).mean()


def language() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), nn.GELU(), nn.Linear(32, 50))


def sentences() -> list[Batch]:
    torch.manual_seed(1)
    found = [torch.randint(50, (8, 200)) for _ in range(8)]
    return [{"x": x, "y": (x * 7 + 1) % 50} for x in found]


def hours(batches: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    found = []
    for _ in range(batches):
        t = torch.randint(480_000, 481_000, (32, 1)).float()
        found.append({"x": t, "y": torch.sin(t * 2 * torch.pi / 24).squeeze(-1)})
    return found


def beside_masks(x: Tensor, y: Tensor) -> Batch:
    return {"known": torch.ones_like(x, dtype=torch.bool), "class": y.long(), "x": x, "y": y}


def years() -> nn.Module:
    """Return layers whose first one has learned to take the mean year away."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    with torch.no_grad():
        model[0].weight.mul_(4)
        model[0].bias.copy_(-model[0].weight[:, 0] * 2024.5)
    return model


def fractional_years(batches: int = 8) -> list[Batch]:
    torch.manual_seed(1)
    found = [2024 + torch.rand(64, 1) for _ in range(batches)]
    return [{"x": year, "y": torch.sin(2 * torch.pi * year)} for year in found]


class Waves(nn.Module):
    """Features of the hour of the day, from hours since 1970."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frequency = nn.Linear(1, 4, bias=False).requires_grad_(False)
        self.out = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1))
        with torch.no_grad():
            self.frequency.weight.copy_(2 * torch.pi / torch.tensor([[24.0], [12.0], [168.0], [24.1]]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.sin(self.frequency(x))).squeeze(-1)
        return y


# --- models of one fault ---


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


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Return the same numbers, whose gradient is multiplied by a factor."""
    result: Tensor = _Scaled.apply(x, factor)
    return result


def two_branches() -> nn.Module:
    """Return the sum of two branches. The gradients of one are 2**46 times as large as those of the other."""
    return Computes(
        lambda own, x: _Scaled.apply(own.big(x), 2.0**22) + _Scaled.apply(own.tiny(x), 2.0**-24),
        big=linear(),
        tiny=linear(),
    )


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


# --- the corpus ---

Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def sgd(rate: float) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, rate)


def adam(rate: float = 1e-3, eps: float = 1e-8) -> Optimizer:
    return lambda parameters: torch.optim.Adam(parameters, rate, eps=eps)


def adamw(rate: float = 1e-3) -> Optimizer:
    return lambda parameters: torch.optim.AdamW(parameters, rate)


def rows_of(data: Callable[[], Batch]) -> Callable[[], list[Batch]]:
    """Batches of 8 rows of tensors."""

    def batches() -> list[Batch]:
        torch.manual_seed(1)
        whole = data()
        splits = zip(*(tensor.split(BATCH) for tensor in whole.values()), strict=True)
        return [dict(zip(whole, rows, strict=True)) for rows in splits]

    return batches


def of_output(loss: Callable[[Tensor, Batch], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """The mean of a loss of the model's output that is a sum over the samples."""
    return lambda model, batch: loss(model(batch["x"]), batch) / len(batch["x"])


@dataclass
class Fault:
    """A step of a loop with a fault, and what must be said of it."""

    kind: str
    place: str
    precision: str
    model: Callable[[], nn.Module] = field(default=lambda: Own())
    batches: Callable[[], list[Batch]] = field(default=lambda: regression())
    loss: Callable[[nn.Module, Batch], Tensor] = field(default=lambda model, batch: error(model, batch))
    optimizer: Optimizer = field(default_factory=adamw)
    options: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    """A part of the line that is named."""
    cure: str = ""
    """A part of a cure."""
    direction: str = ""
    """Empty: any."""
    format: str = ""
    """The first one that shows it; empty: any."""

    def examined(self) -> Report:
        torch.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer(each for each in model.parameters() if each.requires_grad)
        options = {"time_budget_s": 600} | self.options
        return mantissa.examine(model, self.loss, self.batches(), self.precision, optimizer, **options)


def planted(
    expected: tuple[str, str, str, str],
    model: Callable[[], nn.Module],
    precision: str = "",
    data: Callable[[], Batch] = noise,
    loss: Callable[[Tensor, Batch], Tensor] = mean_square,
    optimizer: Optimizer = torch.optim.AdamW,
    **options: Any,
) -> Fault:
    """A fault in a model of a batch's ``x``: the kind, the direction, the place and the first format."""
    kind, direction, place, format = expected
    where = {"direction": direction, "format": format, "options": options}
    return Fault(kind, place, precision or format, model, rows_of(data), of_output(loss), optimizer, **where)


WHOLE = "(the model itself, or the loss)"
FAULTS = {
    "FFN output above 65504": planted((OVERFLOW, FORWARD, "1.wo", "fp16"), lambda: around(large_ffn())),
    "a mask that is harmless before a product that is not": planted(
        (OVERFLOW, FORWARD, "1", "fp16"), lambda: around(Masked())
    ),
    "a weight above 65504": planted((OVERFLOW, FORWARD, "1", "fp16"), lambda: around(large_weight())),
    "one layer's gradient times 2**-30": planted(
        (UNDERFLOW, BACKWARD, "1.layer", "fp16"),
        lambda: around(Computes(lambda own, x: x + _Scaled.apply(own.layer(x), 2.0**-30), layer=linear())),
        scale=1024.0,
        fixed_scale=True,
    ),
    "a big and a tiny branch": planted((SCALE, BACKWARD, "tiny", "fp16"), two_branches),
    "norm with eps 1e-8 on rows of 0": planted(
        (UNDERFLOW, FORWARD, "0", "fp16_pure"), lambda: nn.Sequential(square_norm(1e-8), linear()), data=with_zero_rows
    ),
    "mask of -1e9, a row all masked": planted((OVERFLOW, FORWARD, "1", "fp16"), lambda: around(Attention(mask=-1e9))),
    "a row all -inf": planted(
        (DOMAIN, FORWARD, "1", "fp32"), lambda: around(Attention(mask=-1.0, filled=True)), "fp16"
    ),
    "log(0) in the loss": planted(
        (DOMAIN, FORWARD, WHOLE, "fp32"), lambda: around(nn.Identity()), "fp16", loss=log_of_zero
    ),
    "division by a norm of 1e-6": planted((OVERFLOW, FORWARD, "1", "fp16_pure"), lambda: around(Computes(by_norm))),
    "E[x²] - E[x]² with a mean of 100": planted((ERROR, FORWARD, "1", "bf16"), lambda: around(naive_variance())),
    "the embedding gradient of a token that occurs 10,000 times": planted(
        (ERROR, BACKWARD, "embed", "bf16_pure"), tokens, data=repeated
    ),
    "Adam's second moment in fp16": planted(
        (MOMENT, UPDATE, "0.up", "fp16_pure"),
        lambda: nn.Sequential(Block()),
        loss=lambda output, batch: mean_square(output, batch) * 1e-3,
        optimizer=adam(1e-5),
    ),
    "a rate that explodes, and a factor that Adam divides by": Fault(
        RATE, WHOLE, "fp32", loss=scaled(1024.0), optimizer=adam(100.0)
    ),
    "an update that makes weights infinite: eps is 0 in fp16, and so are small second moments": Fault(
        DIVERGENCE,
        "inner.bias",
        "fp16_pure",
        lambda: Own().half(),
        loss=scaled(3),
        cure="fp32 weights under torch.autocast(device, dtype=torch.float16)",
        direction=UPDATE,
    ),
    "one sample is infinite": Fault(
        INPUT,
        "batch['x'], sample 5",
        "bf16",
        batches=lambda: with_value(regression(), 0, float("inf")),
        cure="leave out sample 5",
    ),
    "a sample of the third batch is NaN": Fault(
        INPUT,
        "batch['x'], sample 5",
        "fp32",
        batches=lambda: with_value(regression(), 2, float("nan")),
        cure="leave out sample 5",
    ),
    "a buffer is infinite": Fault(
        INPUT, "gain", "bf16", lambda: with_buffer(float("inf")), line="own.get_buffer", cure="finite values in gain"
    ),
    "the largest sample overflows": Fault(
        OVERFLOW, "inner", "fp16", batches=lambda: with_value(regression(), 0, 3e6), cure="autocast"
    ),
    "a feature of all samples overflows": Fault(
        OVERFLOW,
        "batch['x']",
        "fp16",
        batches=lambda: [
            beside_masks(batch["x"] + 1.7e9 * (torch.arange(8) == 4), batch["y"]) for batch in regression()
        ],
        cure="standardize batch['x']",
    ),
    "exponents that fp32 does not hold": Fault(
        OVERFLOW, WHOLE, "fp32", lambda: Own(lambda own, x: (x + 95).exp().log() - 95), line="exp()"
    ),
    "weights in fp16 under a scaler": Fault(
        DTYPE,
        "inner",
        "fp16",
        lambda: Own().half(),
        cure="fp32 weights under torch.autocast(device, dtype=torch.float16)",
    ),
    "a product overflows": Fault(
        OVERFLOW, WHOLE, "fp16", lambda: Own(lambda own, x: 1e6 * x / 1e6), line="1e6 * x", cure="fp32_ops(['mul'])"
    ),
    "a product beside a sparse gradient overflows": Fault(
        OVERFLOW, WHOLE, "fp16", beside_sparse, optimizer=sgd(0.1), line="1e6 * x", cure="fp32_ops(['mul'])"
    ),
    "a cast in a custom function overflows": Fault(
        OVERFLOW, WHOLE, "fp32", lambda: Own(lambda own, x: Halved.apply(1e6 * x) / 1e12), line="x.half()"
    ),
    "a cast in an fp32 run": Fault(
        DTYPE, WHOLE, "fp32", lambda: Own(lambda own, x: x.bfloat16().float()), line="x.bfloat16()"
    ),
    "the gradient of a root at 0": Fault(
        DOMAIN, WHOLE, "fp32", lambda: Own(lambda own, x: x + (0 * x).sqrt()), line="(0 * x).sqrt()"
    ),
    "a constant that does not fit": Fault(
        EXCEPTION,
        WHOLE,
        "fp16",
        lambda: Own(lambda own, x: x.masked_fill(x > 9, -1e9)),
        line="masked_fill",
        cure="fp32_ops(['masked_fill'])",
    ),
    "dtypes that do not match": Fault(
        EXCEPTION,
        WHOLE,
        "bf16",
        lambda: Own(lambda own, x: torch.zeros(16, 32).index_add(0, torch.arange(16), x)),
        line="index_add",
    ),
    "rounding without a straight-through estimator": Fault(
        BLOCKED, WHOLE, "bf16", lambda: Own(lambda own, x: torch.round(8 * x) / 8), line="torch.round"
    ),
    "a reentrant checkpoint of what needs no gradient": Fault(
        BLOCKED,
        "inner.0",
        "bf16",
        lambda: nn.ModuleDict({"inner": nn.Sequential(nn.Linear(8, 8)), "outer": nn.Linear(8, 1)}),
        loss=lambda model, batch: F.mse_loss(
            model["outer"](checkpoint(model["inner"], batch["x"], use_reentrant=True)).squeeze(-1), batch["y"]
        ),
        line="use_reentrant",
    ),
    "a hook clips scaled gradients": Fault(
        SCALE,
        WHOLE,
        "fp16",
        lambda: hooked(lambda gradient: gradient.clamp(-0.01, 0.01)),
        line="gradient.clamp",
        cure="scaler.unscale_",
    ),
    "a hook clips accumulated gradients that are scaled": Fault(
        SCALE, WHOLE, "fp16", clipping, line="def clip", cure="scaler.unscale_"
    ),
    "a hook casts gradients": Fault(
        UNDERFLOW,
        WHOLE,
        "fp32",
        lambda: hooked(lambda gradient: gradient.half().float()),
        loss=scaled(1e-9),
        optimizer=adam(eps=1e-20),
        line="gradient.half()",
        cure="no cast",
    ),
    "a hook of a module casts gradients": Fault(
        UNDERFLOW,
        "outer",
        "fp32",
        hooked_module,
        loss=scaled(1e-9),
        optimizer=adam(eps=1e-20),
        line="gradient.half()",
        cure="no cast",
    ),
    "an optimizer that casts gradients": Fault(
        DIVERGENCE,
        "the optimizer's step",
        "fp32",
        loss=scaled(1e-8),
        optimizer=Compressed,
        line="parameter.grad.half()",
        cure="no cast",
    ),
    "gradients that are 0 for ever": Fault(
        BLOCKED, "inner", "bf16", loss=lambda model, batch: F.relu(error(model, batch) - 1e4)
    ),
    "a fill value": Fault(
        INPUT,
        "batch['x'], sample 5",
        "bf16",
        batches=lambda: with_value(regression(), 0, 9.97e36),
        cure="leave out batch['x'], sample 5",
    ),
    "fill values in some samples": Fault(
        INPUT,
        "batch['x'], samples 2, 5",
        "fp32",
        batches=lambda: [
            {**each, "x": each["x"].index_fill(0, torch.tensor([2, 5]), 9.97e36)} for each in regression()
        ],
        cure="leave out batch['x'], samples 2, 5",
    ),
    "an optimizer that goes up the gradient": Fault(
        RATE, WHOLE, "fp32", optimizer=lambda parameters: Signed(parameters, -1.0)
    ),
    "a weight outside of autograd": Fault(
        BLOCKED, "gain", "bf16", lambda: with_gain(lambda own, x: own.get_parameter("gain").data * x), line="data * x"
    ),
    "an absurd label": Fault(
        INPUT,
        "batch['y'], sample 5",
        "fp32",
        batches=lambda: with_label(-9999.0),
        optimizer=sgd(0.1),
        cure="leave out batch['y'], sample 5",
    ),
    "a factor that nothing divides by": Fault(
        SCALE, WHOLE, "fp16", loss=scaled(1024.0), optimizer=sgd(0.1), line="factor * error", cure="no factor"
    ),
    "no scaler": Fault(
        UNDERFLOW,
        "inner",
        "fp16",
        loss=scaled(1e-6),
        options={"scale": 1.0, "fixed_scale": True},
        cure="init_scale=65536",
    ),
    "a static scale that is too large": Fault(
        OVERFLOW, WHOLE, "fp16", options={"scale": 2.0**26, "fixed_scale": True}, cure="GradScaler(init_scale="
    ),
    "gradients below eps": Fault(UNDERFLOW, WHOLE, "fp32", loss=scaled(1e-20)),
    "gradients below eps at a low rate": Fault(UNDERFLOW, WHOLE, "bf16", loss=scaled(1e-16), optimizer=adam(1e-5)),
    "gradients near eps": Fault(SCALE, WHOLE, "bf16", loss=scaled(1e-9), optimizer=adam(1e-3), cure="no factor"),
    "a factor that leaves gradients below eps": Fault(
        UNDERFLOW, WHOLE, "bf16", loss=scaled(1e-12), optimizer=adam(1e-2), line="factor * error", cure="no factor"
    ),
    "gradients that are below eps for no factor": Fault(
        UNDERFLOW,
        WHOLE,
        "bf16",
        loss=lambda model, batch: (1e-6 * error(model, batch).sqrt()) ** 2,
        optimizer=adam(1e-2),
        cure="multiply the loss",
    ),
    "a learning rate that explodes": Fault(RATE, WHOLE, "bf16", optimizer=sgd(1e6), cure="a learning rate of"),
    "updates below the spacing of fp32": Fault(
        LOST,
        "shift",
        "fp32",
        Far,
        loss=lambda model, batch: (model(batch["x"]) - 5).square().mean(),
        optimizer=adam(0.03),
    ),
    "an average in 16 bits": Fault(LOST, "mean", "bf16", averaged),
    "weights in 16 bits": Fault(
        LOST, "inner", "bf16_pure", lambda: large_bias(Own(), 1.0), optimizer=adamw(1e-4), cure="fp32 weights"
    ),
    "numbers of items that are cast with the features": Fault(
        ERROR, WHOLE, "bf16", Items, batches=items, optimizer=adamw(2e-2), line="bfloat16()"
    ),
    "an offset before a difference": Fault(
        DIVERGENCE,
        "inner",
        "bf16",
        lambda: large_bias(Own(lambda own, x: x - x.mean(-1, True))),
        cure="keep_fp32(model, ['inner'])",
    ),
    "positions in 16 bits": Fault(
        ERROR,
        WHOLE,
        "bf16",
        lambda: Own(lambda own, x: x[torch.arange(len(x), dtype=torch.bfloat16).long().clamp(max=len(x) - 1)]),
        batches=lambda: regression(1024),
        line="dtype=torch.bfloat16",
        cure="fp32_ops(['arange'])",
    ),
    "differences of long sums": Fault(
        DIVERGENCE,
        WHOLE,
        "bf16",
        language,
        batches=sentences,
        loss=preferences,
        optimizer=adamw(1e-2),
        line="log_softmax",
        cure="fp32_ops(",
    ),
    "years beside layers that hide what is lost": Fault(
        INPUT,
        "batch['x']",
        "bf16",
        years,
        batches=fractional_years,
        optimizer=adamw(3e-3),
        loss=lambda model, batch: F.mse_loss(model(batch["x"]).float(), batch["y"]),
        cure="keep_fp32(model, ['0'])",
    ),
    "data far from 0, whose loss is large in any format": Fault(
        INPUT,
        "batch['x']",
        "bf16",
        lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1), nn.Flatten(0)),
        batches=lambda: [{**batch, "x": 2000 + batch["x"]} for batch in regression()],
        cure="keep_fp32(model, ['0'])",
    ),
    "hours since 1970": Fault(
        INPUT,
        "batch['x']",
        "bf16",
        Waves,
        batches=hours,
        optimizer=adamw(1e-2),
        cure="keep_fp32(model, ['frequency'])",
    ),
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
    "a compiled model that differs from eager": (
        [(DIFFERENCE, FORWARD, "", "inductor")],
        # Without a bias, inductor calls torch's product: a kernel of its own takes it many seconds to make.
        Planted(lambda: nn.Linear(WIDTH, WIDTH, bias=False), Precision()),
    ),
}
"""Faults in what only the trainer has, and all that must be found."""
