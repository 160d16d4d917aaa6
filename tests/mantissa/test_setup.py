"""Requested and effective precision: each silent difference is planted in a real step, and named with its cure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.formats import FORMATS
from mantissa.watch.scale import LossScale
from mantissa.watch.setup import FirstStep, Setup, flags_differ, fp32_flags, read_setup

AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.island = False

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        with torch.autocast("cpu", enabled=False) if self.island else nullcontext():
            hidden = self.inner(hidden.to(self.inner.weight.dtype))
        return self.head(hidden.to(self.head.weight.dtype))


def taken(
    precision: str | None = "fp32",
    *,
    autocast: str = "",
    dtype: torch.dtype = torch.float32,
    scaler: Any = None,
    passes: int = 1,
    change: Callable[[Net], None] = lambda net: None,
    made: Callable[[Net], torch.optim.Optimizer] = lambda net: torch.optim.AdamW(net.parameters()),
    late: Callable[[Net], None] = lambda net: None,
    step: Callable[[torch.optim.Optimizer, Any], None] | None = None,
) -> Setup:
    """Take a step and return its setup; ``change`` is made before the optimizer, ``late`` after it is watched."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    change(net)
    optimizer = made(net)
    first = FirstStep(net, optimizer, LossScale(scaler, optimizer), True, pytest.fail)
    hook = optimizer.register_step_pre_hook(lambda *_: first.before_update())
    late(net)
    for _ in range(passes):
        with torch.autocast("cpu", dtype=AUTOCAST.get(autocast, torch.bfloat16), enabled=bool(autocast)):
            loss = net(torch.arange(16)[None]).float().square().mean()
        scaled = scaler.scale(loss) if scaler is not None and step not in (plain, on_its_own) else loss
        scaled.backward()
    if step is not None:
        step(optimizer, scaler)
    elif scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    first.close()
    hook.remove()
    assert not any(module._forward_pre_hooks for module in net.modules())
    return read_setup(first, precision)


def masters(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(each.detach().float()) for each in net.parameters()])


def clipped(unscales: bool, largest: float = 1.0) -> Callable[[torch.optim.Optimizer, Any], None]:
    def step(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        if unscales:
            scaler.unscale_(optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(parameters, largest * (1 if unscales else scaler.get_scale() ** (largest < 1)))
        scaler.step(optimizer)
        scaler.update()

    return step


SCALER = torch.amp.GradScaler
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", {}),
        (None, {}),
        (None, {"autocast": "bf16"}),
        ("bf16", {"autocast": "bf16"}),
        ("bf16_pure", {"dtype": BF16}),
        ("bf16_pure", {"dtype": BF16, "passes": 2}),
        ("bf16_master", {"dtype": BF16, "made": masters}),
        ("fp16", {"autocast": "fp16", "scaler": SCALER("cpu")}),
        ("fp16", {"autocast": "fp16", "scaler": SCALER("cpu", 4096), "step": clipped(unscales=True)}),
        ("fp16", {"autocast": "fp16", "scaler": SCALER("cpu", 4096), "step": clipped(unscales=True, largest=0.05)}),
        ("fp16", {"autocast": "fp16", "scaler": SCALER("cpu", 4096), "step": clipped(unscales=False, largest=0.05)}),
        ("fp32", {"scaler": SCALER("cpu", enabled=False)}),
        ("bf16", {"autocast": "bf16", "change": lambda net: net.inner.requires_grad_(False).to(BF16)}),
        ("fp32", {"made": lambda net: torch.optim.SGD(net.inner.parameters()), "late": lambda net: stepped(net.embed)}),
    ],
)
def test_what_is_as_requested_differs_in_nothing(precision: str | None, options: dict[str, Any]) -> None:
    found = taken(precision, **options)
    assert found.differences == []
    assert f"requested: {precision or 'not stated'}" in str(found)
    assert {"weights", "gradients", "optimizer state", "autocast", "fp8"} <= found.effective.keys()


@torch.no_grad()
def stepped(module: nn.Module) -> None:
    """Change weights as another optimizer does."""
    for each in module.parameters():
        each.mul_(0.99)


def freed(net: Net) -> None:
    net.inner.weight.grad = torch.ones_like(net.inner.weight)
    net.inner.weight.requires_grad_(False)


def untie(net: Net) -> None:
    net.head.weight = nn.Parameter(net.embed.weight.detach().clone())


def plain(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    optimizer.step()


def inside(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    with torch.autocast("cpu", dtype=BF16):
        optimizer.step()


def on_its_own(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    scaler.scale(torch.ones(()))
    optimizer.step()


def unmatched(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(copy.deepcopy(net).parameters())


def low_state(net: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, dtype=BF16)
    return optimizer


@pytest.mark.parametrize(
    ("precision", "options", "words"),
    [
        ("fp32", {"dtype": BF16}, ("3 parameters", "bfloat16", "precision=fp32 asks for fp32", "model.float()")),
        (None, {"dtype": BF16}, ("no precision was stated", "precision='bf16_pure'")),
        ("bf16_master", {"dtype": BF16}, ("asks for fp32 masters", "fp32 copies")),
        ("bf16_pure", {}, ("asks for bfloat16 weights", "model.to(bfloat16)")),
        (None, {"dtype": BF16, "passes": 4}, ("4 forward passes are summed in bfloat16", "sum them in fp32")),
        ("fp32", {"made": low_state}, ("inner.weight (momentum_buffer)", "has fewer bits than weights")),
        (
            "fp16_pure",
            {"dtype": torch.float16, "made": lambda net: torch.optim.Adam(net.parameters())},
            ("eps=1e-08 is 0 in float16", "set eps=1e-4"),
        ),
        ("bf16", {}, ("ran without it", 'torch.autocast("cpu", dtype=torch.bfloat16)')),
        ("bf16", {"autocast": "fp16", "scaler": SCALER("cpu")}, ("in autocast to float16",)),
        ("fp32", {"autocast": "bf16"}, ("asks for no autocast", "in autocast to bfloat16")),
        (
            "bf16",
            {"autocast": "bf16", "change": lambda net: setattr(net, "island", True)},
            ("Autocast is off in 1 module (inner)", "autocast(enabled=False)"),
        ),
        ("bf16", {"autocast": "bf16", "step": inside}, ("inside of autocast", "leave it before")),
        ("fp16", {"autocast": "fp16"}, ("knows of no loss scale", "use a GradScaler, and give it to Watch")),
        ("fp16", {"autocast": "fp16", "scaler": SCALER("cpu", enabled=False)}, ("knows of no loss scale",)),
        ("bf16", {"autocast": "bf16", "scaler": SCALER("cpu")}, ("no use with bfloat16", "leave it out")),
        ("fp16", {"autocast": "fp16", "scaler": SCALER("cpu"), "step": plain}, ("was never used",)),
        (
            "fp16",
            {"autocast": "fp16", "scaler": SCALER("cpu"), "step": on_its_own},
            ("instead of optimizer.step()", "multiplied by 65536"),
        ),
        (
            "fp16",
            {"autocast": "fp16", "scaler": SCALER("cpu", 4096), "step": clipped(unscales=False)},
            ("were clipped to 1 while they were multiplied by the loss scale of 4096", "scaler.unscale_(optimizer)"),
        ),
        (
            "fp16",
            {
                "autocast": "fp16",
                "scaler": SCALER("cpu", 4096),
                "step": clipped(unscales=False),
                "made": lambda net: torch.optim.AdamW(net.parameters(), fused=True),
            },
            ("were clipped to 1 while they were multiplied by the loss scale of 4096",),
        ),
        ("fp32", {"made": unmatched}, ("3 of 3 tensors", "are not the model's parameters")),
        (
            "fp32",
            {"made": lambda net: torch.optim.SGD(net.inner.parameters())},
            ("In no group", "1 parameter (embed.weight)"),
        ),
        ("fp32", {"late": untie}, ("embed.weight and head.weight were one weight", "tie them, as with")),
        (
            "fp32",
            {"change": freed},
            ("Frozen, but changed: 1 parameter (inner.weight)", "clear their .grad"),
        ),
        ("fp8", {"autocast": "bf16"}, ("2 modules (inner, head) are plain nn.Linear", "convert_to_float8_training")),
    ],
)
def test_a_silent_difference_is_a_sentence_with_its_cure(
    precision: str | None, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    differences = taken(precision, **options).differences
    assert any(all(word in sentence for word in words) for sentence in differences), differences
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in differences)


@pytest.fixture
def flags() -> Any:
    """Give the flags of fp32 products back."""
    kept = {kind: fp32_flags(kind) for kind in ("cuda", "cpu")}
    yield
    torch.set_float32_matmul_precision("highest")
    for found in kept.values():
        for name, value in found.items():
            library, _, operator = name.partition(".")
            getattr(getattr(torch.backends, library), operator).fp32_precision = value


def test_fp32_products_in_other_formats_are_named_where_the_model_has_such_layers(flags: Any) -> None:
    linear, images = nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1))
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # torch's default
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert not any("cudnn" in each for each in flags_differ("cuda", linear, FORMATS["fp32"]))
    assert any("cudnn.conv.fp32_precision = 'ieee'" in each for each in flags_differ("cuda", images, FORMATS["fp32"]))
    assert not any("products" in each for each in flags_differ("cuda", images, FORMATS["bf16"]))
    assert any("in ieee (cuda.matmul)" in each for each in flags_differ("cuda", linear, FORMATS["tf32"]))


def test_a_precision_set_for_another_device_reaches_the_cpus_products_too(flags: Any) -> None:
    torch.set_float32_matmul_precision("medium")
    assert any("in bf16 (mkldnn.matmul)" in each for each in taken("fp32").differences)


def test_old_and_new_flags_that_contradict_each_other(flags: Any) -> None:
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision = "ieee", "tf32"
    assert any("contradict" in each for each in flags_differ("cuda", nn.Linear(2, 2), None))
