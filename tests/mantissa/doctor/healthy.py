"""Steps without a fault in which a simpler doctor would find one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mantissa
from mantissa.doctor.examine import Report
from tests.mantissa.doctor.faults import (
    NARROW,
    WIDTH,
    Batch,
    Computes,
    Fused,
    Net,
    Optimizer,
    Own,
    adam,
    adamw,
    around,
    error,
    lines,
    mean_square,
    noise,
    of_output,
    regression,
    rows_of,
)


def differential(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of an equation of derivatives, which are taken in the forward pass."""
    x = batch["x"].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.sum(-1) - batch["y"]).square().mean()


def critic(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that runs a part of the model without gradients on purpose."""
    with torch.no_grad():
        made = model["generator"](batch["x"])  # type: ignore[index]
    judge: nn.Module = model["critic"]  # type: ignore[index]
    return F.softplus(judge(made)).mean() + F.softplus(-judge(batch["x"])).mean()


def solved_at_first() -> list[Batch]:
    """Batches of which the first has a loss of 0, which says nothing of the others."""
    batches = regression()
    batches[0]["y"] = Own()(batches[0]["x"]).detach() + 1e-4
    return batches


class TopRows(nn.Module):
    """The rows with the largest scores, in their order."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.score, self.share = nn.Parameter(torch.randn(NARROW) / NARROW), share

    def forward(self, x: Tensor) -> Tensor:
        count = max(1, int(self.share * x.shape[1]))
        order = (x @ self.score).topk(count, -1).indices
        return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


class Capacity(nn.Module):
    """Experts that take the tokens with the largest probability."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(NARROW, 4) / 4)
        self.experts = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y, likely = x, (x @ self.gate).softmax(-1)
        for number, expert in enumerate(self.experts):
            weights, rows = likely[..., number].topk(8, 1)
            rows = rows[..., None].expand(-1, -1, x.shape[-1])
            y = y.scatter_add(1, rows, (expert(x.gather(1, rows)) * weights[..., None]).to(y.dtype))
        return y


class Masked(nn.Module):
    """Attention to oneself and those before, with a mask that is infinite in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(NARROW, NARROW) for _ in range(3))
        self.hide = Computes(lambda own, scores: scores - 1e9 * own.later, later=torch.ones(64, 64).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / NARROW**0.5
        result: Tensor = x + self.hide(scores).softmax(-1).to(x.dtype) @ self.value(x)
        return result


class Recomputed(nn.Module):
    """Layers with dropout whose activations are recomputed, and two linear layers around them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = nn.Linear(8, 32), nn.Linear(32, 1), reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.BatchNorm1d(32), nn.GELU()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x).squeeze(-1)


def centred_targets(scale: float) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: F.mse_loss(model(batch["x"]), (batch["y"].double() - 1e6).float() / scale)


def far_targets(scale: float) -> Callable[[], list[Batch]]:
    return lambda: [{**batch, "y": 1e6 + scale * batch["y"].double()} for batch in regression()]


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[], list[Batch]]:
    return lambda: [{**batch, "x": change(batch["x"])} for batch in regression()]


@torch.autocast("cpu", dtype=torch.bfloat16)
def entering(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that enters autocast itself."""
    return error(model, batch)


@dataclass
class Healthy:
    """A step of a loop in which nothing is at fault."""

    model: Callable[[], nn.Module] = Own
    batches: Callable[[], list[Batch]] = field(default=lambda: regression())
    loss: Callable[[nn.Module, Batch], Tensor] = field(default=lambda model, batch: error(model, batch))
    optimizer: Optimizer = field(default_factory=adamw)
    precisions: tuple[str, ...] = ("bf16",)

    def examined(self, precision: str) -> Report:
        torch.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        return mantissa.examine(model, self.loss, self.batches(), precision, optimizer, time_budget_s=600)


BOTH = ("fp32", "bf16")
HEALTHY: dict[str, Healthy] = {
    "derivatives in the loss": Healthy(loss=differential, optimizer=adam(), precisions=BOTH),
    "complex weights, which have a reference of their own": Healthy(
        lambda: Own(
            lambda own, x: torch.fft.irfft(torch.fft.rfft(x.float()) * own.gain, n=32),
            gain=nn.Parameter(torch.ones(17) + 0.5j),
        ),
        optimizer=adam(),
        precisions=BOTH,
    ),
    "a part without gradients": Healthy(
        lambda: nn.ModuleDict({"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)}),
        loss=critic,
        optimizer=adam(),
    ),
    "a first loss of 0": Healthy(batches=solved_at_first, optimizer=adam()),
    "a loss that enters autocast": Healthy(loss=entering, precisions=("fp32", "bf16", "bf16_pure")),
    "data that is centred before it is rounded": Healthy(
        lambda: Computes(lambda own, x: own.inner(x - 2000), inner=Own()), changed(lambda x: 2000 + x)
    ),
    "large targets that the loss centres": Healthy(batches=far_targets(10), loss=centred_targets(10)),
    "activations that are recomputed, reentrant": Healthy(lambda: Recomputed(True), optimizer=adam()),
    "a buffer that is infinite from the beginning": Healthy(
        lambda: around(
            Computes(
                lambda own, x: x.masked_fill(own.mask.isinf(), 0), mask=torch.tensor([-torch.inf] + [0.0] * (WIDTH - 1))
            )
        ),
        rows_of(noise),
        of_output(mean_square),
    ),
    "a mask that fp16 does not hold": Healthy(
        lambda: Net([Masked(), Masked()]), lambda: lines(64), precisions=("bf16", "fp16")
    ),
    # An order of nearly equal scores is rounded to another one.
    "a part of the rows": Healthy(lambda: Net([TopRows(0.25), Fused()]), lambda: lines(64)),
    "rows for experts": Healthy(lambda: Net([Fused(), Capacity(), Capacity()]), lambda: lines(64)),
}
