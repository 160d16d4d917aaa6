"""Cures are as small as they can be, also where several layers have the same fault; no order of equals is a fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mantissa
from mantissa.doctor.cures import _innermost
from mantissa.doctor.diagnosis import HEALTHY, diagnose
from mantissa.doctor.examine import Report, take
from mantissa.formats import FORMATS
from mantissa.step.loop import LoopStep
from tests.mantissa.doctor.faults import Batch, Own, error, regression, scaled, scaled_gradient

WIDTH = 16


class Residual(nn.Module):
    """Layers with these names, one after another, beside the identity."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.children():
            y = layer(y)
        return x + y


class Net(nn.Module):
    """Blocks between two linear layers, in a list or a dict."""

    def __init__(self, blocks: list[nn.Module] | dict[str, nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks: Any = nn.ModuleDict(blocks) if isinstance(blocks, dict) else nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        y: Tensor = self.last(torch.tanh(x)).squeeze(-1)
        return y if y.ndim == 1 else y.mean(-1)


class NaiveNorm(nn.Module):
    """E[x²] - E[x]², far from 0."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 100
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return (x - x.mean(-1, keepdim=True)) / (variance.abs() + 1e-2).sqrt()


class Rotary(nn.Module):
    """Turns pairs of features by angles in the format of its input."""

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[-2], dtype=x.dtype)
        angle = position[:, None] * (0.5 ** torch.arange(WIDTH // 2)).to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class HardRotary(Rotary):
    """The same, with a cast that no setting reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


class Attention(nn.Module):
    def __init__(self, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        y: Tensor = x + self.out(F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype)))
        return y


class Centered(nn.Module):
    """Removes the mean of a convolution with a large bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv1d(1, 1, 3, padding=1), nn.GELU()
        nn.init.constant_(self.conv.bias, 300.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x[:, None])[:, 0]
        return x + self.act(y - y.mean(-1, keepdim=True))


def normed(norm: type[nn.Module]) -> nn.Module:
    return Residual(norm=norm() if norm is NaiveNorm else norm(WIDTH), up=nn.Linear(WIDTH, WIDTH), act=nn.GELU())


def lines(length: int) -> list[Batch]:
    torch.manual_seed(1)
    inputs = [torch.randn(2, length, 8) for _ in range(4)]
    return [{"x": x, "y": x.mean((1, 2))} for x in inputs]


def examined(build: Callable[[], nn.Module], batches: list[Batch], *more: str, precision: str = "bf16") -> Any:
    torch.manual_seed(0)
    model = build()
    checks = ("formats", "modules", "islands", *more)
    return mantissa.examine(
        model, error, batches, precision, torch.optim.AdamW(model.parameters()), time_budget_s=600, checks=checks
    )


def inside(part: str, names: Iterable[int | str]) -> list[str]:
    return [f"blocks.{name}.{part}" for name in names]


REPEATED: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Batch]], list[str]]] = {
    "a norm in each block of a dict": (
        lambda: Net({name: normed(NaiveNorm) for name in "abc"}),
        regression,
        inside("norm", "abc"),
    ),
    "a norm in half of the blocks": (
        lambda: Net([normed(NaiveNorm if number % 2 else nn.LayerNorm) for number in range(4)]),
        regression,
        inside("norm", (1, 3)),
    ),
    "angles in each layer": (
        lambda: Net([Attention(Rotary()) for _ in range(3)]),
        lambda: lines(600),
        inside("rotary", range(3)),
    ),
    "angles of one module that all layers share": (
        lambda: (lambda rotary: Net([Attention(rotary) for _ in range(3)]))(Rotary()),
        lambda: lines(600),
        inside("rotary", (0,)),
    ),
    "convolutions that no module's error shows": (
        lambda: Net([Centered() for _ in range(3)]),
        regression,
        inside("conv", range(3)),
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_fault_that_siblings_repeat_is_cured_in_them_alone(name: str) -> None:
    build, batches, modules = REPEATED[name]
    report = examined(build, batches())
    named = re.findall(r"'(.*?)'", report.findings[0].cure[0])
    assert sorted(named) == modules, str(report)


class TopRows(nn.Module):
    """The rows with the largest scores, in their order."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.score, self.share = nn.Parameter(torch.randn(WIDTH) / WIDTH), share

    def forward(self, x: Tensor) -> Tensor:
        count = max(1, int(self.share * x.shape[1]))
        order = (x @ self.score).topk(count, -1).indices
        return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


class Capacity(nn.Module):
    """Experts that take the tokens with the largest probability."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, 4) / 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y, likely = x, (x @ self.gate).softmax(-1)
        for number, expert in enumerate(self.experts):
            weights, rows = likely[..., number].topk(8, 1)
            rows = rows[..., None].expand(-1, -1, x.shape[-1])
            y = y.scatter_add(1, rows, (expert(x.gather(1, rows)) * weights[..., None]).to(y.dtype))
        return y


NEAR_TIES: dict[str, Callable[[], nn.Module]] = {
    "a part of the rows": lambda: Net([TopRows(0.25), Attention()]),
    "all rows, sorted": lambda: Net([Attention(), TopRows(), Attention()]),
    "rows for experts": lambda: Net([Attention(), Capacity(), Capacity()]),
}


@pytest.mark.parametrize("name", NEAR_TIES)
def test_an_order_of_nearly_equal_scores_is_no_fault(name: str) -> None:
    report = examined(NEAR_TIES[name], lines(64))
    assert (report.verdict, report.findings) == (HEALTHY, []), str(report)


class Between(nn.Module):
    """Multiplies the gradient by a factor, and divides it again."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + scaled_gradient(scaled_gradient(x, 1 / self.factor), self.factor)


class Small(Between):
    """Multiplies the gradient of its layer by a factor."""

    def forward(self, x: Tensor) -> Tensor:
        return x + scaled_gradient(self.layer(x), self.factor)


class Branches(nn.Module):
    """A sum whose gradients are 2**46 apart."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.tiny = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return scaled_gradient(self.big(x), 2.0**22) + scaled_gradient(self.tiny(x), 2.0**-24)


LOSSES: dict[str, tuple[Callable[[], nn.Module], float, float]] = {
    "a gradient that is large only inside of a module": (lambda: Net([Between(1e9)]), 1.0, 65536.0),
    "the same, a little larger than a scale can be": (lambda: Net([Between(1e4)]), 1.0, 65536.0),
    "a loss in another unit": (lambda: Net([nn.Linear(WIDTH, WIDTH)]), 1e20, 65536.0),
    "a loss in a smaller one": (lambda: Net([nn.Linear(WIDTH, WIDTH)]), 1e-6, 1.0),
    "two branches": (lambda: Net([Branches()]), 1.0, 65536.0),
    "one layer's gradient": (lambda: Net([Small(2.0**-29)]), 1.0, 1024.0),
}


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_no_scale_is_a_cure_that_loses_gradients(name: str, fixed: bool) -> None:
    build, factor, scale = LOSSES[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    step = LoopStep.copied(model, scaled(factor), regression(), FORMATS["fp16"], optimizer, scale, fixed)
    taken = take(step, failed=not fixed)
    # As a run is examined that failed there.
    taken = replace(taken, step=taken.step.at_scale(scale), skipped=taken.skipped or not fixed)
    diagnosis = diagnose(taken, ("formats", "range", "modules", "islands"), 600)
    text = str(Report(diagnosis))
    found = diagnosis.range
    assert found is not None
    cures = [cure for finding in diagnosis.findings for cure in finding.cure]
    scales = [float(number) for cure in cures for number in re.findall(r"init_scale=([\d.e+-]+)", cure)]
    assert all(map(found.holds, scales)), text
    assert cures, text


def focal(model: nn.Module, batch: Batch) -> Tensor:
    """A focal loss whose probabilities are exactly 1 in bf16."""
    p, wanted = torch.sigmoid(9 + 4 * model(batch["x"])), (batch["y"] > 0).float()
    return -(wanted * (1 - p) ** 2 * torch.log(p) + (1 - wanted) * p**2 * torch.log(1 - p)).mean()


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The same of a product of probabilities."""
    right = (20 * model(batch["x"])).sigmoid() * torch.sigmoid(batch["y"] + 20)
    return -torch.log1p(-right).mean()


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


class Padded(nn.Module):
    """Attention that a mask keeps away from padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 3 * WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~mask[:, None], float("-inf"))
        y: Tensor = self.out(scores.softmax(-1) @ v).mean((1, 2))
        return y


def sequences() -> list[Batch]:
    found = [batch | {"mask": torch.arange(12) < torch.randint(3, 12, (len(batch["x"]), 1))} for batch in lines(12)]
    found = [{name: torch.cat([tensor] * 4) for name, tensor in batch.items()} for batch in found]
    found[0]["mask"][5] = False
    return found


def masked(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["mask"]), batch["y"])


class Temperature(Residual):
    """Divides by a learned number in the format of what it divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(8, 1), nn.Parameter(torch.tensor(1e-9))

    def forward(self, x: Tensor) -> Tensor:
        y = 1e-9 * self.layer(x).float().tanh()
        temperature = self.temperature.to(torch.get_autocast_dtype("cpu"))
        return (y / temperature).squeeze(-1)


class Timed(nn.Module):
    """Waves of a time that is cast to the format of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        time = 4000 + 17 * torch.arange(len(x), dtype=torch.float32)
        time = time.to(y.dtype)
        waves = torch.sin(time.float()[:, None] * torch.linspace(0.1, 1, WIDTH))
        z: Tensor = self.out(torch.tanh(y) * waves).squeeze(-1)
        return z


CURES: dict[str, tuple[str, Callable[[], nn.Module], Any, Callable[[], list[Batch]], str]] = {
    "a focal loss": ("bf16", lambda: Net([]), focal, regression, "fp32_ops(['sigmoid'])"),
    "a loss of a product": ("bf16", lambda: Net([]), entropy, regression, "fp32_ops(["),
    "a target that is too long": ("fp32", lambda: nn.Linear(8, 5), ctc, lambda: speech([11]), "leave out sample 11"),
    "two of them": ("fp32", lambda: nn.Linear(8, 5), ctc, lambda: speech([2, 9]), "leave out samples 2, 9"),
    "a row of padding": ("fp32", Padded, masked, sequences, "leave out sample 5"),
    "a row of padding, in fp16": ("fp16", Padded, masked, sequences, "leave out sample 5"),
    "a learned temperature": ("fp16", Temperature, error, regression, "no cast to 16 bits in this line"),
    "times": ("bf16", Timed, error, lambda: regression(64), "no cast to 16 bits in this line"),
    "a cast in each layer": (
        "bf16",
        lambda: Net([Attention(HardRotary()) for _ in range(2)]),
        error,
        lambda: lines(1000),
        "no cast to 16 bits in this line",
    ),
}


@pytest.mark.parametrize("name", CURES)
def test_a_cure_is_tried_where_the_number_is_made(name: str) -> None:
    precision, build, loss, batches, cure = CURES[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    checks = ("formats", "modules", "islands")
    report = mantissa.examine(model, loss, batches(), precision, optimizer, time_budget_s=600, checks=checks)
    assert any(cure in each for each in report.findings[0].cure), str(report)


def test_a_loss_that_no_sample_alone_breaks_names_none() -> None:
    report = examined(lambda: Net([]), [batch | {"y": batch["y"] / 0} for batch in regression()], precision="fp32")
    assert "leave out sample" not in str(report)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda weights: torch.optim.AdamW(weights, 1e-3, weight_decay=0.1), True),
        (lambda weights: torch.optim.AdamW(weights, 1e-1, weight_decay=0.1), False),  # 0.01 of a weight
        (lambda weights: torch.optim.Adam(weights, 1e-3, weight_decay=0.1), False),  # it is added to the gradient
        (lambda weights: torch.optim.SGD(weights, 1e-3, weight_decay=0.1), False),
        (lambda weights: torch.optim.AdamW(weights, 1e-3, weight_decay=0.0), False),
        (lambda weights: torch.optim.NAdam(weights, 1e-3, weight_decay=0.1, decoupled_weight_decay=True), True),
    ],
)
@pytest.mark.parametrize("precision", ["bf16_pure", "bf16"])
def test_weight_decay_that_16_bits_round_away_is_said(optimizer: Any, said: bool, precision: str) -> None:
    model = Net([])
    given = optimizer(model.parameters())
    report = mantissa.examine(model, error, regression(), precision, given, checks=["updates"])
    assert ("weight decay changes nothing" in str(report)) == (said and precision == "bf16_pure"), str(report)
    assert report.diagnosis.budget.crashes == {}


def test_all_buffers_of_a_module_are_named() -> None:
    def average(own: nn.Module, x: Tensor) -> Tensor:
        for name in ("mean", "square"):
            own.get_buffer(name).lerp_((x.detach() ** (1 + (name == "square"))).mean(0).bfloat16(), 1e-3)
        return x - own.get_buffer("mean")

    model = Own(average)
    for name in ("mean", "square"):
        model.register_buffer(name, torch.ones(32, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    report = mantissa.examine(model, error, regression(), "bf16", optimizer, checks=["formats", "state"])
    assert [finding.place for finding in report.findings] == ["mean, square"], str(report)


def test_of_modules_that_each_cure_a_fault_the_last_is_named() -> None:
    model = nn.ModuleDict({"average": nn.Identity(), "project": nn.Identity(), "head": nn.Identity()})
    order = ["project", "average", "head"]
    assert _innermost(model, lambda names: not {"project", "average"}.isdisjoint(names), order) == ["average"]


def dice(model: nn.Module, batch: Batch) -> Tensor:
    """Sums of more than 65504, in the format of the model's output."""
    p = torch.sigmoid(model(batch["x"][:, :1]).expand(-1, 80_000))
    total = torch.einsum("bi,bi->b", p, p)
    return (2 * total / (total + 1)).square().mean()


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.constant_(self.layer.bias, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_an_operator_is_spelled_as_in_its_line() -> None:
    model = Logits()
    report = mantissa.examine(model, dice, regression(), "fp16", torch.optim.SGD(model.parameters(), 1e-3))
    assert any("['einsum']" in cure for cure in report.findings[0].cure), str(report)


class RootNorm(nn.Module):
    """Its variance is rounded to less than 0 in fp16, and to anything in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return (x - mean) / torch.sqrt((x * x).mean(1, keepdim=True) - mean * mean + 1e-5)


def test_a_format_with_another_loss_is_no_cure() -> None:
    torch.manual_seed(16)
    model = nn.Sequential(nn.Linear(8, 32), RootNorm(), nn.Linear(32, 1), nn.Flatten(0))
    nn.init.constant_(model[0].bias, 100.0)
    report = mantissa.examine(model, error, regression(), "fp16", torch.optim.AdamW(model.parameters()))
    assert report.findings[0].cure[0].startswith("mantissa.keep_fp32(model, ['1'])"), str(report)
    assert not any("bfloat16" in cure for cure in report.findings[0].cure), str(report)
