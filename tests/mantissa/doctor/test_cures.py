"""Cures are as small as they can be, also where several layers have the same fault; no order of equals is a fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mantissa
from mantissa.doctor.diagnosis import HEALTHY
from tests.mantissa.doctor.faults import Batch, error, regression

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
        model, error, batches, precision, torch.optim.AdamW(model.parameters()), budget_s=600, checks=checks
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
