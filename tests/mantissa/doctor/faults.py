"""Models and steps with a known fault, and what the doctor must say of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mantissa
from mantissa.doctor.examine import Report
from mantissa.doctor.finding import (
    DIVERGENCE,
    DOMAIN,
    DTYPE,
    ERROR,
    EXCEPTION,
    INPUT,
    LOST,
    MOMENT,
    NOT_FINITE,
    OVERFLOW,
    RATE,
    SCALE,
    UNDERFLOW,
    UPDATE,
)
from mantissa.formats import FORMATS
from mantissa.step.loop import LoopStep
from mantissa.step.trace import BACKWARD, FORWARD

Batch = dict[str, Tensor]
BATCH, WIDTH = 8, 32
REPEATS = 10_000


# --- a model of a batch's x ---


def noise(*shape: int, size: float = 1.0) -> dict[str, Tensor]:
    """Return normal inputs of this size, 64 samples of ``shape`` (default: one vector of WIDTH)."""
    return {"x": size * torch.randn(64, *(shape or (WIDTH,)))}


def mean_square(output: Tensor, batch: Batch) -> Tensor:
    """Return the mean square of each sample, summed, in fp32."""
    return output.float().flatten(1).square().mean(1).sum()


class Block(nn.Module):
    """A residual layer: Linear, GELU, Linear."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


def around(layer: nn.Module, width: int = WIDTH) -> nn.Sequential:
    """Return a model of a block, the layer, a block: ``layer`` is submodule 1."""
    return nn.Sequential(Block(width), layer, Block(width))


class Computes(nn.Module):
    """A function of this module and its input, with modules, parameters and buffers of these names."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


# --- small networks and data of a loop ---


class Own(Computes):
    """A network around one operation of the model's own."""

    inner: nn.Linear
    outer: nn.Linear

    def __init__(
        self, function: Callable[[Any, Tensor], Any] = lambda own, x: x, width: int = 32, **parts: nn.Module | Tensor
    ) -> None:
        torch.manual_seed(0)
        super().__init__(function, inner=nn.Linear(8, width), outer=nn.Linear(width, 1), **parts)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(F.gelu(self.function(self, self.inner(x)))).squeeze(-1)
        return y


def regression(rows: int = 16, offset: float = 0.0, batches: int = 12) -> list[Batch]:
    torch.manual_seed(1)
    weights = torch.linspace(-1, 1, 8)
    inputs = [torch.randn(rows, 8) for _ in range(batches)]
    return [{"x": x + offset, "y": (x @ weights).sin()} for x in inputs]


def error(model: nn.Module, batch: Batch) -> Tensor:
    output, target = model(batch["x"]), batch["y"]
    dtype = torch.promote_types(output.dtype, target.dtype)  # torch 2.11's has no backward of two
    return F.mse_loss(output.to(dtype), target.to(dtype))


def scaled(factor: float) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: factor * error(model, batch)


def with_value(batches: list[Batch], step: int, value: float) -> list[Batch]:
    batches[step]["x"][5, 3] = value
    return batches


def infinite_buffer(name: str) -> nn.Module:
    values = torch.ones(32)
    values[2] = math.inf
    return Own(lambda own, x: x * own.get_buffer(name), **{name: values})


def gain() -> nn.Parameter:
    return nn.Parameter(torch.ones(32))


def hooked(hook: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Own()
    for parameter in model.parameters():
        parameter.register_hook(hook)
    return model


def items() -> list[Batch]:
    torch.manual_seed(1)
    taste = torch.randn(1000).sign()
    numbers = [torch.randint(1000, (256,)) for _ in range(12)]
    return [{"x": torch.cat([each[:, None], torch.randn(256, 3)], 1), "y": taste[each]} for each in numbers]


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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.copy_(parameter.grad.half())
        super().step()


def with_label(value: float) -> list[Batch]:
    batches = regression()
    batches[0]["y"][5] = value
    return batches


def large_bias(model: nn.Module, value: float = 1000.0) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("inner.bias").add_(value)
    return model


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


# --- models of one fault ---


def biased(value: float, layer: Any) -> nn.Module:
    """Return a layer whose biases are all this number."""
    nn.init.constant_(layer.bias, value)
    made: nn.Module = layer
    return made


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


# --- the backward pass ---


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def two_branches(width: int = WIDTH) -> nn.Module:
    """Return the sum of two branches. The gradients of one are 2**46 times as large as those of the other."""
    return Computes(
        lambda own, x: Scaled.apply(own.big(x), 2.0**22) + Scaled.apply(own.tiny(x), 2.0**-24),
        big=nn.Linear(width, width),
        tiny=nn.Linear(width, width),
    )


def small_gradient(factor: float, width: int = WIDTH) -> nn.Module:
    """Return a residual layer whose gradient is multiplied by a factor."""
    return Computes(lambda own, x: x + Scaled.apply(own.layer(x), factor), layer=nn.Linear(width, width))


# --- errors and updates ---


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


# --- blocks that repeat a fault, and faults of a line ---

NARROW = 16


class Net(nn.Module):
    """Blocks between two linear layers, in a list or a dict."""

    def __init__(self, blocks: list[nn.Module] | dict[str, nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, NARROW)
        self.blocks: Any = nn.ModuleDict(blocks) if isinstance(blocks, dict) else nn.ModuleList(blocks)
        self.last = nn.Linear(NARROW, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        y: Tensor = self.last(torch.tanh(x)).squeeze(-1)
        return y if y.ndim == 1 else y.mean(-1)


class NaiveNorm(nn.Module):
    """Divide by a standard deviation that is computed as E[x²] - E[x]², far from 0."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 100
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return (x - x.mean(-1, keepdim=True)) / (variance.abs() + 1e-2).sqrt()


class Fused(nn.Module):
    """Attention by torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(NARROW, 3 * NARROW), nn.Linear(NARROW, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))
        return y


def normed(width: int = NARROW) -> nn.Module:
    layers = {"up": nn.Linear(width, width), "norm": NaiveNorm(), "act": nn.GELU()}
    return Computes(lambda own, x: x + own.act(own.norm(own.up(x))), **layers)


def centered() -> nn.Module:
    """Remove the mean of a convolution with a large bias."""

    def function(own: Any, x: Tensor) -> Tensor:
        y = own.conv(x[:, None])[:, 0]
        result: Tensor = x + own.act(y - y.mean(-1, keepdim=True))
        return result

    return Computes(function, conv=biased(300.0, nn.Conv1d(1, 1, 3, padding=1)), act=nn.GELU())


def lines(length: int) -> list[Batch]:
    torch.manual_seed(1)
    inputs = [torch.randn(2, length, 8) for _ in range(4)]
    return [{"x": x, "y": x.mean((1, 2))} for x in inputs]


def focal(model: nn.Module, batch: Batch) -> Tensor:
    """A focal loss whose probabilities are exactly 1 in bf16."""
    p, wanted = torch.sigmoid(9 + 4 * model(batch["x"])), (batch["y"] > 0).float()
    return -(wanted * (1 - p) ** 2 * torch.log(p) + (1 - wanted) * p**2 * torch.log(1 - p)).mean()


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    likely = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    count = len(batch["x"])
    return F.ctc_loss(likely, batch["y"], torch.full((count,), likely.shape[0]), batch["lengths"])


def speech(bad: list[int]) -> list[Batch]:
    """Targets that are longer than the input in some samples."""
    torch.manual_seed(1)
    found = []
    for _ in range(4):
        lengths = torch.full((16,), 3)
        lengths[bad] = 9
        found.append({"x": torch.randn(16, 8, 8), "y": torch.randint(1, 5, (16, 9)), "lengths": lengths})
    return found


def masked(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["mask"]), batch["y"])


def by_temperature(own: Any, x: Tensor) -> Tensor:
    """Divide by a learned number in the format of what it divides."""
    y = 1e-9 * own.layer(x).float().tanh()
    temperature = own.temperature.to(torch.get_autocast_dtype("cpu"))
    return (y / temperature).squeeze(-1)


def lifted(own: Any, x: Tensor) -> Tensor:
    """Return x, rounded as numbers near 100 are."""
    large = x.float() + 100
    large = large.bfloat16()
    exact = large.float()
    return exact - 100


def tempered(own: Any, x: Tensor) -> Tensor:
    """Return the rows' means by attention, of which the last rows are padding, at a learned temperature."""
    padding = torch.where(torch.arange(16) < 12, 0.0, -math.inf)
    scores = x @ x.T + padding
    weights = (scores / own.heat).softmax(-1)
    return weights @ x


def squashed(own: Any, x: Tensor) -> Tensor:
    """Return what is finite, whatever ``squashed`` returns."""
    result: Tensor = own.squashed(1e4 * x)
    return result


def steep() -> nn.Module:
    """Return a layer whose results fp16 does not hold, and what makes them numbers from -1 to 1."""
    linear = nn.Linear(32, 32)
    with torch.no_grad():
        linear.weight.mul_(20)
    return nn.Sequential(linear, Computes(lambda own, x: torch.tanh(x * 1e-5)))


class Choice(nn.Module):
    """One of eight experts for each sample, by scores that are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Parameter(1e-3 * torch.randn(32, 8)), nn.Parameter(torch.randn(8, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        likely = (x @ self.gate + 1).softmax(-1)
        weights, chosen = likely.topk(1, -1)
        results = torch.einsum("bd,edf->bef", x, self.experts)
        result: Tensor = results.gather(1, chosen[..., None].expand(-1, -1, 32))
        return (result * weights[..., None]).sum(1)


def dice(model: nn.Module, batch: Batch) -> Tensor:
    """Sums of more than 65504, in the format of the model's output."""
    p = torch.sigmoid(model(batch["x"][:, :1]).expand(-1, 80_000))
    total = torch.einsum("bi,bi->b", p, p)
    return (2 * total / (total + 1)).square().mean()


def averages(own: Any, x: Tensor) -> Tensor:
    for name in ("mean", "square"):
        own.get_buffer(name).lerp_((x.detach() ** (1 + (name == "square"))).mean(0).bfloat16(), 1e-3)
    result: Tensor = x - own.get_buffer("mean")
    return result


def root_norm(own: Any, x: Tensor) -> Tensor:
    """Normalize by a variance that is rounded to less than 0 in fp16, and to anything in bf16."""
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x * x).mean(1, keepdim=True) - mean * mean + 1e-5)


def far_norm() -> nn.Module:
    torch.manual_seed(16)
    return nn.Sequential(biased(100.0, nn.Linear(8, 32)), Computes(root_norm), nn.Linear(32, 1), nn.Flatten(0))


class Halved(torch.autograd.Function):
    """Casts what it keeps for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.half())
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0].float() * gradient


class FromOutside(torch.autograd.Function):
    """The identity, whose gradient torch does not compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(np.full(gradient.shape, np.inf, dtype=np.float32))


def with_zero_rows() -> dict[str, Tensor]:
    x = noise()["x"]
    x[::2] = 0
    return {"x": x}


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
    no_cure: str | None = None
    """A part of no cure; empty: there is none."""
    direction: str = ""
    """Empty: any."""
    format: str = ""
    """The first one that shows it; empty: any."""
    besides: tuple[str, ...] = ()
    """Kinds of what else is found."""

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
    besides: tuple[str, ...] = (),
    line: str = "",
    cure: str = "",
    no_cure: str | None = None,
    **options: Any,
) -> Fault:
    """A fault in a model of a batch's ``x``: the kind, the direction, the place and the first format."""
    kind, direction, place, format = expected
    step = (precision or format, model, rows_of(data), of_output(loss), optimizer, options)
    return Fault(kind, place, *step, line, cure, no_cure, direction, format, besides)


def step_of(
    model: Callable[[], nn.Module],
    mode: str = "bf16",
    data: Callable[[], Batch] = noise,
    loss: Callable[[Tensor, Batch], Tensor] = mean_square,
    optimizer: Optimizer = torch.optim.AdamW,
    accumulate: int = 1,
) -> LoopStep:
    """The first step of a model of a batch's ``x``."""
    torch.manual_seed(0)
    built = model()
    batches = rows_of(data)()
    format = FORMATS[mode]
    return LoopStep.copied(
        built, of_output(loss), batches, format, optimizer(built.parameters()), accumulate=accumulate
    )


WHOLE = "(the model itself, or the loss)"
FAULTS = {
    "FFN output above 65504": planted((OVERFLOW, FORWARD, "1.wo", "fp16"), lambda: around(large_ffn())),
    "a mask that is harmless before a product that is not": planted(
        (OVERFLOW, FORWARD, "1", "fp16"), lambda: around(Masked()), line="q @ k"
    ),
    "a weight above 65504": planted((OVERFLOW, FORWARD, "1", "fp16"), lambda: around(large_weight())),
    "one layer's gradient times 2**-30": planted(
        (UNDERFLOW, BACKWARD, "1.layer", "fp16"),
        lambda: around(small_gradient(2.0**-30)),
        scale=1024.0,
        fixed_scale=True,
    ),
    "a big and a tiny branch": planted((SCALE, BACKWARD, "tiny", "fp16"), two_branches),
    "norm with eps 1e-8 on rows of 0": planted(
        (UNDERFLOW, FORWARD, "0", "fp16_pure"), lambda: nn.Sequential(square_norm(1e-8), linear()), data=with_zero_rows
    ),
    "a row all -inf": planted(
        (DOMAIN, FORWARD, "1", "fp32"), lambda: around(Attention(mask=-1.0, filled=True)), "fp16"
    ),
    "the embedding gradient of a token that occurs 10,000 times": planted(
        (ERROR, BACKWARD, "embed", "bf16_pure"), tokens, data=repeated, besides=(LOST,)
    ),
    "Adam's second moment in fp16": planted(
        (MOMENT, UPDATE, "0.up", "fp16_pure"),
        lambda: nn.Sequential(Block()),
        loss=lambda output, batch: mean_square(output, batch) * 1e-3,
        optimizer=adam(1e-5),
        besides=(MOMENT,),
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
    "the factor of the loss is infinite": Fault(
        INPUT,
        "batch['weight']",
        "bf16",
        batches=lambda: [batch | {"weight": torch.tensor(float("inf"))} for batch in regression()],
        loss=lambda model, batch: error(model, batch) * batch["weight"],
        cure="finite values in batch['weight']",
    ),
    "a buffer is infinite": Fault(
        INPUT, "gain", "bf16", lambda: infinite_buffer("gain"), line="own.get_buffer", cure="finite values in gain"
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
        besides=(DTYPE,),
    ),
    "a product overflows": Fault(
        OVERFLOW, WHOLE, "fp16", lambda: Own(lambda own, x: 1e6 * x / 1e6), line="1e6 * x", cure="fp32_ops(['mul'])"
    ),
    "a cast in a custom function overflows": Fault(
        OVERFLOW,
        WHOLE,
        "fp32",
        lambda: Own(lambda own, x: Halved.apply(1e6 * x) / 1e12),
        line="x.half()",
        cure="no cast to 16 bits in this line",
    ),
    "an overflow that a tanh hides": Fault(
        OVERFLOW, "squashed.0", "fp16", lambda: Own(squashed, squashed=steep()), optimizer=sgd(1e-2)
    ),
    "a cast in an fp32 run": Fault(
        DTYPE, WHOLE, "fp32", lambda: Own(lambda own, x: x.bfloat16().float()), line="x.bfloat16()"
    ),
    "the gradient of a root at 0": Fault(
        DOMAIN, WHOLE, "fp32", lambda: Own(lambda own, x: x + (0 * x).sqrt()), line="(0 * x).sqrt()", cure="an eps"
    ),
    "a mask of -inf that is divided": Fault(
        DOMAIN,
        WHOLE,
        "fp32",
        lambda: Own(tempered, heat=nn.Parameter(torch.ones(()))),
        line="own.heat",
        cure="in the place of -inf",
    ),
    "a constant that does not fit": Fault(
        EXCEPTION,
        WHOLE,
        "fp16",
        lambda: Own(lambda own, x: x.masked_fill(x > 9, -1e9)),
        line="masked_fill",
        cure="fp32_ops(['masked_fill'])",
    ),
    "features that the loss casts to another dtype than weights": Fault(
        EXCEPTION,
        "inner",
        "fp32",
        loss=lambda model, batch: F.mse_loss(model(batch["x"].half()), batch["y"]),
        line="self.inner(x)",
        cure="no cast to 16 bits in this line: ",
    ),
    "a hook clips scaled gradients": Fault(
        SCALE,
        WHOLE,
        "fp16",
        lambda: hooked(lambda gradient: gradient.clamp(-0.01, 0.01)),
        line="gradient.clamp",
        cure="scaler.unscale_",
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
    "an optimizer that casts gradients": Fault(
        DIVERGENCE,
        "the optimizer's step",
        "fp32",
        loss=scaled(1e-8),
        optimizer=lambda parameters: Compressed(parameters, 1e-2, eps=1e-20),
        line="parameter.grad.half()",
        cure="no cast",
    ),
    "a fill value": Fault(
        INPUT,
        "batch['x'], sample 5",
        "bf16",
        batches=lambda: with_value(regression(), 0, 9.97e36),
        cure="leave out batch['x'], sample 5",
    ),
    "an optimizer that goes up the gradient": Fault(
        RATE, WHOLE, "fp32", optimizer=lambda parameters: Signed(parameters, -1.0)
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
        besides=(UNDERFLOW,),
    ),
    "a static scale that is too large": Fault(
        OVERFLOW, WHOLE, "fp16", options={"scale": 2.0**26, "fixed_scale": True}, cure="GradScaler(init_scale="
    ),
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
        lambda: Computes(
            lambda own, x: own.shift - 2.0**20 + 0 * x.sum(-1), shift=nn.Parameter(torch.tensor([2.0**20]))
        ),
        loss=lambda model, batch: (model(batch["x"]) - 5).square().mean(),
        optimizer=adam(0.03),
    ),
    "weights in 16 bits": Fault(
        LOST,
        "inner",
        "bf16_pure",
        lambda: large_bias(Own(), 1.0),
        optimizer=adamw(1e-4),
        cure="fp32 weights",
        besides=(LOST,),
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
    "code outside of torch": Fault(
        NOT_FINITE, WHOLE, "bf16", lambda: Own(lambda own, x: x * FromOutside.apply(own.gain), gain=gain())
    ),
    "averages in 16 bits": Fault(
        LOST,
        "mean, square",
        "bf16",
        lambda: Own(averages, **{name: torch.ones(32, dtype=torch.bfloat16) for name in ("mean", "square")}),
    ),
    "a focal loss": Fault(DOMAIN, WHOLE, "bf16", lambda: Net([]), loss=focal, cure="fp32_ops(['sigmoid'])"),
    "a target that is too long": Fault(
        DOMAIN, WHOLE, "fp32", lambda: nn.Linear(8, 5), lambda: speech([11]), ctc, cure="leave out sample 11"
    ),
    "targets that are all left out": Fault(
        DOMAIN,
        "batch['y']",
        "fp32",
        lambda: nn.Linear(8, 5),
        lambda: [batch | {"y": torch.full((16,), -100)} for batch in regression()],
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        cure="targets in batch['y']",
    ),
    "a learned temperature": Fault(
        UNDERFLOW,
        WHOLE,
        "fp16",
        lambda: Computes(by_temperature, layer=nn.Linear(8, 1), temperature=nn.Parameter(torch.tensor(1e-9))),
        cure="no cast to 16 bits in this line",
    ),
    "a cast before the line that is wrong by it": Fault(
        ERROR, WHOLE, "bf16", lambda: Own(lifted), line="- 100", cure="no cast to 16 bits in this line: "
    ),
    "a choice between what is nearly equal": Fault(
        ERROR,
        "1",
        "bf16",
        lambda: nn.Sequential(nn.Linear(8, 32), Choice(), nn.Linear(32, 1), nn.Flatten(0)),
        line="topk",
    ),
    "an operator that torch spells otherwise": Fault(
        OVERFLOW, WHOLE, "fp16", lambda: biased(3.0, nn.Linear(1, 1)), loss=dice, optimizer=sgd(1e-3), cure="['einsum']"
    ),
    "a norm that is rounded to less than 0": Fault(
        DOMAIN, "1", "fp16", far_norm, cure="keep_fp32(model, ['1'])", no_cure="bfloat16"
    ),
    "an overflow before a rate that explodes": planted(
        (OVERFLOW, FORWARD, "1.wo", "fp16"), lambda: around(large_ffn()), optimizer=sgd(1e30), no_cure=""
    ),
    "a norm in each block of a dict": Fault(
        ERROR,
        "blocks.a.norm",
        "bf16",
        lambda: Net({name: normed() for name in "abc"}),
        cure="keep_fp32(model, ['blocks.a.norm', 'blocks.b.norm', 'blocks.c.norm'])",
        besides=(ERROR, ERROR),
    ),
    "convolutions that no module's error shows": Fault(
        ERROR,
        "blocks.2.conv, blocks.1.conv, blocks.0.conv",
        "bf16",
        lambda: Net([centered() for _ in range(3)]),
        cure="keep_fp32(model, ['blocks.2.conv', 'blocks.1.conv', 'blocks.0.conv'])",
    ),
}
"""Faults in a loop."""
