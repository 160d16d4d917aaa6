"""Requested and effective precision: each silent difference is planted in a real step, named, and cured as it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mantissa
from mantissa.formats import FORMATS, FP32
from mantissa.step.flags import flags_of
from mantissa.watch.first_step import FirstStep
from mantissa.watch.scale import LossScale
from mantissa.watch.setup import Setup, flags_differ, read_setup

BF16, FP16 = torch.bfloat16, torch.float16
Made = Callable[["Net"], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.inside: Callable[[], Any] = nullcontext

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        with self.inside():
            hidden = self.inner(hidden.to(self.inner.weight.dtype))
        return self.head(hidden.to(self.head.weight.dtype))


def taken(
    precision: str | None = "fp32",
    *,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    enabled: bool = True,
    scaled: bool = True,
    passes: int = 1,
    change: Callable[[Net], object] = lambda net: None,
    made: Made = lambda net: torch.optim.AdamW(net.parameters()),
    late: Callable[[Net], None] = lambda net: None,
    step: Callable[[torch.optim.Optimizer, Any], None] | None = None,
) -> Setup:
    """Take a step and return its setup.

    Args:
        precision: that was asked for.
        autocast: of the forward pass.
        dtype: of the weights.
        scale: the scaler's first one; None: there is no scaler.
        enabled: whether the scaler is.
        scaled: whether it scales the loss.
        passes: forward and backward passes.
        change: of the model, before the optimizer is made.
        made: makes the optimizer.
        late: a change of the model after the optimizer is watched.
        step: of the optimizer.
    """
    torch.manual_seed(0)
    net = Net().to(dtype)
    change(net)
    optimizer = made(net)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", scale, enabled=enabled)
    first = FirstStep(net, optimizer, LossScale(scaler, optimizer), True, pytest.fail)
    hook = optimizer.register_step_pre_hook(lambda *_: first.before_update())
    late(net)
    for _ in range(passes):
        with torch.autocast("cpu", dtype=autocast or BF16, enabled=autocast is not None):
            loss = net(torch.arange(16)[None]).float().square().mean()
        (loss if scaler is None or not scaled else scaler.scale(loss)).backward()
    (step or (plain if scaler is None else by_scaler))(optimizer, scaler)
    first.close()
    hook.remove()
    assert not any(module._forward_pre_hooks for module in net.modules())
    return read_setup(first, precision)


# Steps of an optimizer.


def plain(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    optimizer.step()


def by_scaler(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def inside(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    with torch.autocast("cpu", dtype=BF16):
        optimizer.step()


def inside_without_cache(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        optimizer.step()


def clipped(unscales: bool, largest: float = 1.0) -> Callable[[torch.optim.Optimizer, Any], None]:
    def step(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        if unscales:
            scaler.unscale_(optimizer)
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        nn.utils.clip_grad_norm_(parameters, largest * (1 if unscales else scaler.get_scale() ** (largest < 1)))
        by_scaler(optimizer, scaler)

    return step


def after_zero_grad(set_to_none: bool) -> Callable[[torch.optim.Optimizer, Any], None]:
    def step(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        optimizer.zero_grad(set_to_none)
        optimizer.step()

    return step


# Optimizers.


def masters(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(weight.detach().float()) for weight in net.parameters()])


def of_a_copy(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(copy.deepcopy(net).parameters())


def of_inner(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.inner.parameters())


def beside_the_loss(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(2))])


def low_state(net: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    for weight in net.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight, dtype=BF16)
    return optimizer


# Changes of the model.


@torch.no_grad()
def moved(net: Net) -> None:
    """Change weights as another optimizer does."""
    net.embed.weight.mul_(0.99)


def freed(net: Net) -> None:
    net.inner.weight.grad = torch.ones_like(net.inner.weight)
    net.inner.weight.requires_grad_(False)


def penalised(net: Net) -> None:
    """Call a module once more outside of autocast, as a gradient penalty does."""

    def again(*_: Any) -> None:
        with torch.autocast("cpu", enabled=False):
            net.inner(torch.ones(1, 8))

    net.register_forward_hook(again)


def around_inner(**options: Any) -> Callable[[Net], None]:
    return lambda net: setattr(net, "inside", partial(torch.autocast, "cpu", **options))


def listed(net: Net, kind: type = list) -> None:
    """Let a layer of the forward pass be in a list, which the model does not see."""
    net.others = kind([nn.Linear(8, 8)])
    net.embed.register_forward_hook(lambda module, args, output: net.others[0](output))


def untied(net: Net) -> None:
    net.head.weight = nn.Parameter(net.embed.weight.detach().clone())


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", {}),
        (None, {}),
        (None, {"autocast": BF16}),
        ("bf16", {"autocast": BF16}),
        ("bf16", {"autocast": BF16, "change": penalised}),
        ("bf16", {"change": around_inner(dtype=BF16)}),
        ("bf16_pure", {"dtype": BF16, "passes": 2}),
        ("bf16_master", {"dtype": BF16, "made": masters}),
        ("fp16", {"autocast": FP16, "scale": 65536}),
        ("fp16", {"autocast": FP16, "scale": 4096, "step": clipped(unscales=True, largest=0.05)}),
        ("fp16", {"autocast": FP16, "scale": 4096, "step": clipped(unscales=False, largest=0.05)}),
        ("fp32", {"scale": 65536, "enabled": False}),
        ("bf16", {"autocast": BF16, "change": lambda net: net.inner.requires_grad_(False).to(BF16)}),
        ("fp32", {"made": of_inner, "late": moved}),
    ],
)
def test_what_is_as_requested_differs_in_nothing(precision: str | None, options: dict[str, Any]) -> None:
    setup = taken(precision, **options)
    assert setup.differences == []
    assert f"requested: {precision or 'not stated'}" in str(setup)
    assert {"weights", "gradients", "optimizer state", "autocast", "fp8"} <= setup.effective.keys()


HALF = {"precision": "fp16", "autocast": FP16, "scale": 4096}
PURE = {"precision": "fp16_pure", "dtype": FP16}
Row = tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]
DIFFERENCES: list[Row] = [
    (("3 parameters", "bfloat16", "precision=fp32 asks for fp32", "model.float()"), {"dtype": BF16}, {"dtype": None}),
    (("no precision was stated", "='bf16_pure'"), {"precision": None, "dtype": BF16}, {"precision": "bf16_pure"}),
    (("fp32 masters", "fp32 copies"), {"precision": "bf16_master", "dtype": BF16}, {"made": masters}),
    (("asks for bfloat16 weights", "model.to(torch.bfloat16)"), {"precision": "bf16_pure"}, {"dtype": BF16}),
    (("asks for float32 weights", "are wider"), {"dtype": torch.float64}, {"dtype": torch.float32}),
    (("asks for float64 weights", "are narrower"), {"precision": "fp64"}, {"dtype": torch.float64}),
    (("4 forward passes are summed in bfloat16",), {"dtype": BF16, "passes": 4}, {"dtype": None}),
    (("inner.weight (momentum_buffer)", "has fewer bits than weights"), {"made": low_state}, {"made": None}),
    (("eps=1e-08 is 0 in float16", "keep fp32 weights"), PURE, {"precision": "fp32", "dtype": None}),
    (("set eps=1e-4",), PURE, {"made": lambda net: torch.optim.AdamW(net.parameters(), eps=1e-4)}),
    (
        ("ran without it", 'torch.autocast("cpu", dtype=torch.bfloat16)'),
        {"precision": "bf16"},
        {"autocast": BF16},
    ),
    (("in autocast to float16",), HALF | {"precision": "bf16"}, {"autocast": BF16, "scale": None}),
    (("asks for no autocast", "in autocast to bfloat16"), {"autocast": BF16}, {"autocast": None}),
    (
        ("Autocast is off in 1 module (inner)", "autocast(enabled=False)"),
        {"precision": "bf16", "autocast": BF16, "change": around_inner(enabled=False)},
        {"change": None},
    ),
    (("no weight had a gradient, so", "zero_grad after"), {"step": after_zero_grad(True)}, {"step": plain}),
    (("had a gradient other than 0", "nothing trains"), {"step": after_zero_grad(False)}, {"step": plain}),
    (("inside of autocast", "leave it before"), {"step": inside}, {"step": plain}),
    (("inside of autocast", "whose cache"), {"step": inside}, {"step": inside_without_cache}),
    (("no loss scale", "use a GradScaler, and give it to Watch"), HALF | {"scale": None}, {"scale": 4096}),
    (("no loss scale",), HALF | {"enabled": False}, {"enabled": True}),
    (("no use with bfloat16", "leave it out"), {"autocast": BF16, "precision": "bf16", "scale": 1}, {"scale": None}),
    (
        ("was never used", "call scaler.scale(loss).backward() and scaler.step(optimizer)"),
        HALF | {"scaled": False, "step": plain},
        {"scaled": True, "step": by_scaler},
    ),
    (("multiplied by 4096", "instead of optimizer.step()"), HALF | {"step": plain}, {"step": by_scaler}),
    *[
        (
            ("were clipped to 1 while they were multiplied by the loss scale of 4096", "scaler.unscale_(optimizer)"),
            HALF | {"step": clipped(unscales=False), "made": made},
            {"step": clipped(unscales=True)},
        )
        for made in (
            lambda net: torch.optim.AdamW(net.parameters()),
            lambda net: torch.optim.AdamW(net.parameters(), fused=True),
        )
    ],
    (
        ("3 of 3 tensors", "are not the model's parameters", "make the optimizer after"),
        {"made": of_a_copy},
        {"made": None},
    ),
    (("1 of 4 tensors", "one module that has them, too"), {"made": beside_the_loss}, {"made": None}),
    (("In no group", "1 parameter (embed.weight)", "add them"), {"made": of_inner}, {"made": None}),
    (("call requires_grad_(False)",), {"made": of_inner}, {"change": lambda net: net.embed.requires_grad_(False)}),
    (
        ("In a list or dict of the model", "2 weights", "nn.ModuleList"),
        {"change": listed},
        {"change": lambda net: listed(net, nn.ModuleList)},
    ),
    (("embed.weight and head.weight were one weight", "tie them, as with"), {"late": untied}, {"late": None}),
    (("Frozen, but changed: 1 parameter (inner.weight)", "clear their .grad"), {"change": freed}, {"change": None}),
    (
        ("2 modules (inner, head) are plain nn.Linear", "convert_to_float8_training"),
        {"precision": "fp8", "autocast": BF16},
        {"precision": "bf16"},
    ),
]
"""What is said of a mistake, the mistake, and what takes it back; None: as it is without the option."""


@pytest.mark.parametrize(("words", "mistake", "cure"), DIFFERENCES)
def test_a_silent_difference_is_a_sentence_whose_cure_ends_it(
    words: tuple[str, ...], mistake: dict[str, Any], cure: dict[str, Any]
) -> None:
    wrong = taken(**mistake).differences
    assert any(all(word in sentence for word in words) for sentence in wrong), wrong
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in wrong)
    right = {name: value for name, value in (mistake | cure).items() if value is not None or name == "precision"}
    left = taken(**right).differences
    assert not any(words[0] in sentence for sentence in left), left
    assert {*left} < {*wrong}  # nothing else is wrong by it


@pytest.fixture
def flags() -> Any:
    """Give the flags of fp32 products back."""
    with flags_of(FP32):
        yield


def test_fp32_products_in_other_formats_are_named_where_the_model_has_such_layers(flags: Any) -> None:
    linear, images = nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1))
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # torch's default
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for format, model, words in (
        ("fp32", images, "in tf32 (cudnn.conv)"),
        ("fp32", linear, ""),
        ("bf16", images, ""),
        ("tf32", linear, "in ieee (cuda.matmul)"),
    ):
        told = [text for text in flags_differ("cuda", model, FORMATS[format]) if "fp32 products" in text]
        assert words in told[0] if words else not told
    told = flags_differ("cpu", linear, FORMATS["tf32"])  # a CPU has no such products
    assert not [text for text in told if "fp32 products" in text]


def test_a_precision_set_for_another_device_reaches_the_cpus_products_too(flags: Any) -> None:
    torch.set_float32_matmul_precision("medium")
    (difference,) = taken("fp32").differences
    assert "in bf16 (mkldnn.matmul): set torch.backends.mkldnn.matmul.fp32_precision = 'ieee'" in difference
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    assert not taken("fp32").differences


def test_old_and_new_flags_that_contradict_each_other(flags: Any) -> None:
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision = "ieee", "tf32"
    assert "contradict" in flags_differ("cuda", nn.Linear(2, 2), None)[0]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(
    "wrong",
    ["set_float32_matmul_precision('high')", "backends.cudnn.conv.fp32_precision = 'ieee'"]
    + [f"backends.{name}.fp32_precision = 'tf32'" for name in ("cuda.matmul", "cudnn.conv", "cudnn")],
)
def test_what_is_set_as_told_leaves_nothing_to_tell(wrong: str, precision: str, flags: Any) -> None:
    """Neither to a second Watch nor to code that reads the older flags, which torch's compiler does."""
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    exec(f"torch.{wrong}")
    model = nn.ModuleList([nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.LSTM(1, 1)])
    for sentence in flags_differ("cuda", model, FORMATS[precision]):
        exec(sentence.partition(": set ")[2].removesuffix("."))
    assert flags_differ("cuda", model, FORMATS[precision]) == []
    older = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert precision == "bf16" or older == (precision == "tf32",) * 2


def test_tf32_of_convolutions_leaves_matmuls_as_they_are(flags: Any) -> None:
    for library in (torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn):
        library.fp32_precision = "none"  # torch's default, which reads as that of another
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # allow_tf32 is off
    (sentence,) = flags_differ("cuda", nn.Conv2d(1, 1, 1), None)
    exec(sentence.partition(": set ")[2].removesuffix("."))
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()) == (False, "highest")


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_weights_that_a_scaler_refuses_are_named_at_once(fused: bool) -> None:
    net, said = nn.Linear(2, 2).half(), list[str]()
    optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
    mantissa.Watch(net, optimizer, torch.amp.GradScaler("cpu"), say=said.append)
    refused = "DIFFERS: The weights are float16, whose gradients a GradScaler refuses to unscale: load the weights in"
    assert [text.startswith(refused) for text in said] == ([] if fused else [True])
