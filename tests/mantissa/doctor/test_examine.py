"""Kinds of faults in models and loops that are no recipe: what is named, with its line and a cure that was tried."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mantissa
from mantissa.__main__ import main
from mantissa.doctor.diagnosis import FOUND, HEALTHY
from mantissa.errors import FormatError, UsageError
from mantissa.finding import (
    BLOCKED,
    DIVERGENCE,
    DOMAIN,
    DTYPE,
    ERROR,
    EXCEPTION,
    INPUT,
    LOST,
    MOMENT,
    OVERFLOW,
    RATE,
    SCALE,
    UNDERFLOW,
    UPDATE,
)
from mantissa.tensors import random_state
from tests.helpers import same_bits

Batch = dict[str, Tensor]


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


def tokens() -> list[Batch]:
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


def sgd(rate: float) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, rate)


def adamw(rate: float = 1e-3) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, rate)


@dataclass
class Case:
    """A fault, and what is said of it: a kind, a place, a part of the line, and a part of a cure."""

    kind: str
    place: str
    line: str
    cure: str
    precision: str
    model: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]] = regression
    loss: Callable[[nn.Module, Batch], Tensor] = error
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = field(default_factory=adamw)
    options: dict[str, Any] = field(default_factory=dict)

    def examined(self) -> mantissa.examination.Report:  # type: ignore[name-defined]
        model = self.model()
        optimizer = self.optimizer(each for each in model.parameters() if each.requires_grad)
        return mantissa.examine(model, self.loss, self.batches(), self.precision, optimizer, **self.options)


EVERYWHERE = "(the model itself, or the loss)"
CASES = {
    "one sample is infinite": Case(
        INPUT,
        "batch['x'], sample 5",
        "",
        "leave out sample 5",
        "bf16",
        Own,
        lambda: with_value(regression(), 0, float("inf")),
    ),
    "a sample of the third batch is NaN": Case(
        INPUT,
        "batch['x'], sample 5",
        "",
        "leave out sample 5",
        "fp32",
        Own,
        lambda: with_value(regression(), 2, float("nan")),
    ),
    "a buffer is infinite": Case(
        INPUT, "gain", "own.get_buffer", "finite values in gain", "bf16", lambda: with_buffer(float("inf"))
    ),
    "the largest sample overflows": Case(
        OVERFLOW, "inner", "", "autocast", "fp16", Own, lambda: with_value(regression(), 0, 3e6)
    ),
    "a product overflows": Case(
        OVERFLOW, EVERYWHERE, "1e6 * x", "fp32_ops(['mul'])", "fp16", lambda: Own(lambda own, x: 1e6 * x / 1e6)
    ),
    "a cast in a custom function overflows": Case(
        OVERFLOW, EVERYWHERE, "x.half()", "", "fp32", lambda: Own(lambda own, x: Halved.apply(1e6 * x) / 1e12)
    ),
    "a cast in an fp32 run": Case(
        DTYPE, EVERYWHERE, "x.bfloat16()", "", "fp32", lambda: Own(lambda own, x: x.bfloat16().float())
    ),
    "the gradient of a root at 0": Case(
        DOMAIN, EVERYWHERE, "(0 * x).sqrt()", "", "fp32", lambda: Own(lambda own, x: x + (0 * x).sqrt())
    ),
    "a constant that does not fit": Case(
        EXCEPTION,
        EVERYWHERE,
        "masked_fill",
        "fp32_ops(['masked_fill'])",
        "fp16",
        lambda: Own(lambda own, x: x.masked_fill(x > 9, -1e9)),
    ),
    "dtypes that do not match": Case(
        EXCEPTION,
        EVERYWHERE,
        "index_add",
        "",
        "bf16",
        lambda: Own(lambda own, x: torch.zeros(16, 32).index_add(0, torch.arange(16), x)),
    ),
    "rounding without a straight-through estimator": Case(
        BLOCKED, EVERYWHERE, "torch.round", "", "bf16", lambda: Own(lambda own, x: torch.round(8 * x) / 8)
    ),
    "a reentrant checkpoint of what needs no gradient": Case(
        BLOCKED,
        "inner.0",
        "use_reentrant",
        "",
        "bf16",
        lambda: nn.ModuleDict({"inner": nn.Sequential(nn.Linear(8, 8)), "outer": nn.Linear(8, 1)}),
        loss=lambda model, batch: F.mse_loss(
            model["outer"](checkpoint(model["inner"], batch["x"], use_reentrant=True)).squeeze(-1), batch["y"]
        ),
    ),
    "a hook clips scaled gradients": Case(
        SCALE,
        EVERYWHERE,
        "gradient.clamp",
        "scaler.unscale_",
        "fp16",
        lambda: hooked(lambda gradient: gradient.clamp(-0.01, 0.01)),
    ),
    "a hook clips accumulated gradients that are scaled": Case(
        SCALE, EVERYWHERE, "def clip", "scaler.unscale_", "fp16", clipping
    ),
    "a hook casts gradients": Case(
        UNDERFLOW,
        EVERYWHERE,
        "gradient.half()",
        "no cast",
        "fp32",
        lambda: hooked(lambda gradient: gradient.half().float()),
        loss=scaled(1e-9),
        optimizer=lambda parameters: torch.optim.Adam(parameters, eps=1e-20),
    ),
    "a hook of a module casts gradients": Case(
        UNDERFLOW,
        "outer",
        "gradient.half()",
        "no cast",
        "fp32",
        hooked_module,
        loss=scaled(1e-9),
        optimizer=lambda parameters: torch.optim.Adam(parameters, eps=1e-20),
    ),
    "an optimizer that casts gradients": Case(
        DIVERGENCE,
        "the optimizer's step",
        "parameter.grad.half()",
        "no cast",
        "fp32",
        Own,
        loss=scaled(1e-8),
        optimizer=Compressed,
    ),
    "gradients that are 0 for ever": Case(
        BLOCKED, "inner", "", "", "bf16", Own, loss=lambda model, batch: F.relu(error(model, batch) - 1e4)
    ),
    "a fill value": Case(
        INPUT,
        "batch['x'], sample 5",
        "",
        "leave out batch['x'], sample 5",
        "bf16",
        Own,
        lambda: with_value(regression(), 0, 9.97e36),
    ),
    "an optimizer that goes up the gradient": Case(
        RATE, EVERYWHERE, "", "", "fp32", Own, optimizer=lambda parameters: Signed(parameters, -1.0)
    ),
    "a weight outside of autograd": Case(
        BLOCKED, "gain", "data * x", "", "bf16", lambda: with_gain(lambda own, x: own.get_parameter("gain").data * x)
    ),
    "an absurd label": Case(
        INPUT,
        "batch['y'], sample 5",
        "",
        "leave out batch['y'], sample 5",
        "fp32",
        Own,
        lambda: with_label(-9999.0),
        optimizer=sgd(0.1),
    ),
    "a factor that nothing divides by": Case(
        SCALE, EVERYWHERE, "factor * error", "no factor", "fp16", Own, loss=scaled(1024.0), optimizer=sgd(0.1)
    ),
    "no scaler": Case(
        UNDERFLOW,
        "inner",
        "",
        "init_scale=65536",
        "fp16",
        Own,
        loss=scaled(1e-6),
        options={"scale": 1.0, "fixed_scale": True},
    ),
    "a static scale that is too large": Case(
        OVERFLOW, EVERYWHERE, "", "GradScaler(init_scale=", "fp16", Own, options={"scale": 2.0**26, "fixed_scale": True}
    ),
    "gradients below eps": Case(UNDERFLOW, EVERYWHERE, "", "", "fp32", Own, loss=scaled(1e-20)),
    "a learning rate that explodes": Case(RATE, EVERYWHERE, "", "a learning rate of", "bf16", Own, optimizer=sgd(1e6)),
    "updates below the spacing of fp32": Case(
        LOST,
        "shift",
        "",
        "",
        "fp32",
        Far,
        loss=lambda model, batch: (model(batch["x"]) - 5).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.03),
    ),
    "an average in 16 bits": Case(LOST, "mean", "", "", "bf16", averaged),
    "weights in 16 bits": Case(
        LOST, "inner", "", "fp32 weights", "bf16_pure", lambda: large_bias(Own(), 1.0), optimizer=adamw(1e-4)
    ),
    "numbers of items that are cast with the features": Case(
        ERROR, EVERYWHERE, "bfloat16()", "", "bf16", Items, items, optimizer=adamw(2e-2)
    ),
    "an offset before a difference": Case(
        DIVERGENCE,
        "inner",
        "",
        "keep_fp32(model, ['inner'])",
        "bf16",
        lambda: large_bias(Own(lambda own, x: x - x.mean(-1, True))),
    ),
    "positions in 16 bits": Case(
        ERROR,
        EVERYWHERE,
        "dtype=torch.bfloat16",
        "fp32_ops(['arange'])",
        "bf16",
        lambda: Own(lambda own, x: x[torch.arange(len(x), dtype=torch.bfloat16).long().clamp(max=len(x) - 1)]),
        lambda: regression(1024),
    ),
    "differences of long sums": Case(
        DIVERGENCE, EVERYWHERE, "log_softmax", "fp32_ops(", "bf16", language, tokens, preferences, adamw(1e-2)
    ),
    "hours since 1970": Case(
        DIVERGENCE,
        "frequency",
        "torch.sin",
        "keep_fp32(model, ['frequency'])",
        "bf16",
        Waves,
        hours,
        optimizer=adamw(1e-2),
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_with_its_place_its_line_and_a_cure(name: str) -> None:
    case = CASES[name]
    report = case.examined()
    assert report.verdict == FOUND, str(report)
    finding = report.findings[0]
    assert (finding.kind, finding.place) == (case.kind, case.place), str(report)
    assert case.line in finding.line, str(report)
    assert any(case.cure in cure for cure in finding.cure or [""]), str(report)
    assert not report.diagnosis.budget.left_out, str(report)


def test_lost_second_moments_are_named() -> None:
    model = Own()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    error(model, regression()[0]).backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()
    finding = mantissa.examine(model, error, regression(), "fp32", optimizer).findings[0]
    assert (finding.kind, finding.place) == (MOMENT, "exp_avg_sq of inner.weight")


def test_a_factor_that_an_optimizer_divides_by_is_not_at_fault() -> None:
    model = Own()
    report = mantissa.examine(model, scaled(1024.0), regression(), "fp32", torch.optim.Adam(model.parameters(), 100.0))
    assert report.findings[0].kind == RATE, str(report)


@pytest.mark.parametrize(("key", "factor"), [("momentum_buffer", 65536.0), ("exp_avg_sq", 1e12)])
def test_a_state_that_spoils_the_steps_is_named(key: str, factor: float) -> None:
    model = Own()
    kept = {"momentum_buffer": torch.optim.SGD(model.parameters(), 0.02, 0.9)}
    optimizer = kept.get(key) or torch.optim.Adam(model.parameters(), 1e-2)
    for batch in regression():
        optimizer.zero_grad()
        error(model, batch).backward()
        optimizer.step()
    for state in optimizer.state.values():
        state[key] *= factor
    finding = mantissa.examine(model, error, regression(), "fp32", optimizer).findings[0]
    assert (finding.kind, finding.place.partition(" of ")[0]) == (MOMENT, key), str(finding)


def test_weights_that_an_update_makes_infinite_are_no_input() -> None:
    """Adam's eps is 0 in fp16, and so are second moments of small gradients."""
    model = Own().half()
    report = mantissa.examine(model, scaled(3), regression(), "fp16_pure", torch.optim.AdamW(model.parameters(), 1e-3))
    finding = report.findings[0]
    assert (finding.kind, finding.direction, finding.place) == (DIVERGENCE, UPDATE, "inner.bias"), str(report)
    assert finding.cure == ["fp32 weights under torch.autocast(device, dtype=torch.float16)"]


def test_bf16_is_no_cure_of_rounding_in_fp16() -> None:
    model = Own(lambda own, x: x + torch.arange(3000.0, 3032.0).to(x.dtype) - 3000)
    report = mantissa.examine(model, error, regression(), "fp16", torch.optim.AdamW(model.parameters(), 1e-3))
    assert report.findings[0].kind == ERROR, str(report)
    assert not any("bfloat16" in cure for cure in report.findings[0].cure), str(report)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_healthy_model_has_no_fault_and_stays_as_it_is(precision: str) -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    error(model, regression()[0]).backward()
    batches = regression()
    kept = [model.state_dict(), optimizer.state_dict(), random_state(torch.device("cpu")), batches]
    gradients = [each.grad for each in model.parameters()]
    before = copy.deepcopy([*kept, gradients])
    report = mantissa.examine(model, error, batches, precision, optimizer)
    assert (report.verdict, report.findings) == (HEALTHY, []), str(report)
    after = [model.state_dict(), optimizer.state_dict(), random_state(torch.device("cpu")), batches]
    assert same_bits([*after, [each.grad for each in model.parameters()]], before)


def stated(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that changes its batch, as augmentation on the device does."""
    return error(model, batch | {"x": batch["x"].mul_(0.5).add_(0.1)})


class Drawing(nn.Module):
    """Draws from generators of its own, twice, and warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out, self.calls = nn.Linear(8, 16), nn.Linear(16, 1), 0
        self.torchs, self.numpys = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x) * (torch.rand(len(x), 16, generator=self.torchs) > 0.1) + torch.randn(len(x), 16) / 4
        y = y * torch.from_numpy(self.numpys.random(16) > 0.1) * torch.bernoulli(torch.full_like(y, 0.9))
        return min(1.0, self.calls / 10) * self.out(y.relu()).squeeze(-1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("build", "loss"), [(Own, stated), (Drawing, error)])
def test_what_a_step_changes_is_restored_before_the_next(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Tensor], precision: str
) -> None:
    torch.manual_seed(0)
    model, batches = build(), regression()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss(model, regression()[0]).backward()
    optimizer.step()
    own = [each.get_state() for each in vars(model).values() if isinstance(each, torch.Generator)]
    report = mantissa.examine(model, loss, batches, precision, optimizer)
    assert (report.verdict, report.findings) == (HEALTHY, []), str(report)
    assert report.diagnosis.budget.left_out == []
    assert same_bits(batches, regression())
    assert same_bits([each.get_state() for each in vars(model).values() if isinstance(each, torch.Generator)], own)


def test_gradients_of_other_models_stay() -> None:
    model, judge = Own(), nn.Linear(1, 1)
    report = mantissa.examine(model, lambda own, batch: judge(own(batch["x"])[:, None]).square().mean(), regression())
    assert report.verdict == HEALTHY, str(report)
    assert judge.weight.grad is None


def replaced() -> nn.Module:
    model = Own()
    forward = model.inner.forward
    model.inner.forward = lambda x: forward(x)  # type: ignore[method-assign]
    return model


ELSEWHERE = Own()
GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (ELSEWHERE, lambda model, batch: error(ELSEWHERE, batch), "a gradient goes to the model that was given"),
        (replaced(), error, "a gradient goes to the model that was given"),
        (
            Own(),
            lambda model, batch: error(model, batch) * torch.rand((), generator=GENERATOR),
            "other gradients when it is taken again",
        ),
    ],
)
def test_a_loss_that_cannot_be_replayed_is_said_to_be_so(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        mantissa.examine(model, loss, regression())
    assert all(each.grad is None for each in model.parameters())


def test_the_surrounding_modes_do_not_matter() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        report = mantissa.examine(Own(), error, with_value(regression(), 0, 1e30), "fp32")
    assert report.findings[0].kind == INPUT, str(report)
    assert "bfloat16" not in str(report)


def test_the_cache_of_a_surrounding_autocast_keeps_no_weights() -> None:
    model = Own()
    model.inner.weight.data.mul_(1e7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = mantissa.examine(model, error, regression(), "fp16")
    assert report.findings[0].kind == OVERFLOW, str(report)
    assert report.findings[0].cure, str(report)


def test_batches_of_any_nesting_and_no_optimizer() -> None:
    batches = [({"a": [batch["x"]]}, "a name", batch["y"]) for batch in regression()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, name, targets = batch
        assert name == "a name"
        return F.mse_loss(model(inputs["a"][0]), targets)

    batches[0][0]["a"][0][4, 1] = float("nan")
    report = mantissa.examine(Own(), loss, batches, "bf16")
    assert report.findings[0].place == "batch[0]['a'][0], sample 4"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "half"}, "precision='half' is unknown"),
        ({"precision": torch.optim.SGD(Own().parameters())}, "precision must be one of fp32, .* is of type SGD"),
        ({"budget_s": 0}, "the budget of 0 s must be more than 0"),
        ({"batches": []}, "0 batches"),
        ({"optimizer": torch.optim.SGD(Own().parameters(), 0.1)}, "no parameter of this model"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"model": Own().requires_grad_(False)}, "leave requires_grad of some parameters on"),
        ({"model": Own}, "model must be a module, and is of type type"),
        ({"loss": lambda model, batch: (model(batch["x"]) - batch["y"]) ** 2}, r"returned a tensor of shape \[16\]"),
        ({"loss": lambda model, batch: error(model, batch).item()}, "must return a scalar tensor.* returned a float"),
        ({"loss": lambda model, batch: error(model, batch).detach()}, "gives no parameter a gradient"),
        ({"loss": regression(), "batches": error}, "loss must be a function, .* and is of type list"),
        ({"batches": error}, "batches must be an iterable of batches"),
        ({"batches": regression()[0]}, r"such as a DataLoader or \[batch\], and is of type dict"),
        ({"batches": regression()[0]["x"]}, r"such as a DataLoader or \[batch\], and is of type Tensor"),
        ({"optimizer": error}, "optimizer must be an optimizer, and is of type function"),
        ({"accumulate": 0}, "accumulate=0 must be 1 or more"),
        ({"checks": ["pear"]}, r"checks=\['pear'\] are unknown; use some of formats"),
    ],
)
def test_arguments_that_cannot_work(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"model": Own(), "loss": error, "batches": regression()}
    with pytest.raises(UsageError, match=words):
        mantissa.examine(**arguments | change)


def test_a_model_that_cannot_be_copied_is_said_to_be_so() -> None:
    model = Own()
    model.generator = (each for each in ())  # type: ignore[assignment]
    with pytest.raises(FormatError, match="cannot be copied, so the step cannot be replayed"):
        mantissa.examine(model, error, regression())


def test_batches_may_have_no_end() -> None:
    batches = itertools.cycle(regression())
    assert mantissa.examine(Own(), error, batches, "bf16").verdict == HEALTHY


def differential(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of an equation of derivatives, which are taken in the forward pass."""
    x = batch["x"].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.sum(-1) - batch["y"]).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_may_differentiate(precision: str) -> None:
    model, batches = Own(), regression()
    report = mantissa.examine(model, differential, batches, precision, torch.optim.Adam(model.parameters(), 1e-3))
    assert report.verdict == HEALTHY, str(report)
    assert not any(batch["x"].requires_grad for batch in batches)
    assert [trial.status for trial in report.diagnosis.sweep][:2] == ["ok", "ok"]
    assert report.diagnosis.budget.left_out == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_complex_weights_have_their_own_reference(precision: str) -> None:
    def filtered(own: nn.Module, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.float()) * own.get_parameter("gain"), n=32)

    model = Own(filtered)
    model.gain = nn.Parameter(torch.ones(17) + 0.5j)
    report = mantissa.examine(model, error, regression(), precision, torch.optim.Adam(model.parameters(), 1e-3))
    assert (report.verdict, report.diagnosis.budget.left_out) == (HEALTHY, []), str(report)


def test_what_runs_without_gradients_on_purpose_is_no_fault() -> None:
    model = nn.ModuleDict({"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)})

    def critic(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            made = model["generator"](batch["x"])
        return F.softplus(model["critic"](made)).mean() + F.softplus(-model["critic"](batch["x"])).mean()

    report = mantissa.examine(model, critic, regression(), "bf16", torch.optim.Adam(model.parameters(), 1e-3))
    assert report.verdict == HEALTHY, str(report)


def test_a_first_batch_whose_loss_is_0_says_nothing_of_the_others() -> None:
    model, batches = Own(), regression()
    batches[0]["y"] = model(batches[0]["x"]).detach() + 1e-4
    report = mantissa.examine(model, error, batches, "bf16", torch.optim.Adam(model.parameters(), 1e-3))
    assert report.verdict == HEALTHY, str(report)


def test_a_loss_that_falls_below_0_does_not_explode() -> None:
    model = Own()

    def critic(model: nn.Module, batch: Batch) -> Tensor:
        return 0.1 - model(batch["x"]).mean()

    report = mantissa.examine(model, critic, regression(), "fp32", torch.optim.SGD(model.parameters(), 0.3))
    assert report.verdict == HEALTHY, str(report)


def test_islands_keep_other_modules_away_from_the_largest_number() -> None:
    """The second scaled layer is finite in this step, and within a factor of 2 of what fp16 holds."""

    class Scaled(nn.Module):
        def __init__(self, size: float) -> None:
            super().__init__()
            self.size = size

        def forward(self, x: Tensor) -> Tensor:
            return self.size * torch.tanh(x).half() / self.size if torch.is_autocast_enabled("cpu") else torch.tanh(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scaled(4e5), nn.Linear(8, 8), Scaled(6e4), nn.Linear(8, 1), nn.Flatten(0))
    batches = [{"x": 9 * batch["x"], "y": batch["y"]} for batch in regression()]
    report = mantissa.examine(model, error, batches, "fp16", torch.optim.SGD(model.parameters(), 1e-4))
    islands = report.diagnosis.islands
    assert islands is not None
    assert sorted(islands.modules) == ["1", "3"], str(report)


def test_an_unknown_command_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examine"]) == 2
    assert capsys.readouterr().err == "examine is no command; use one of doctor, compare, checkup\n"


@pytest.mark.parametrize("given", ["math:pi", "os:getcwd", "os:remove", "no_such_module:f", "os:no_such_function"])
def test_the_command_says_what_a_function_must_return(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", given]) == 2
    assert capsys.readouterr().err.startswith(given)
