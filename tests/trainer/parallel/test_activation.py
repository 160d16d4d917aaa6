from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.gpt2 import GPT2, SHAPES, Shape
from recipes.language import LanguageModel
from recipes.resnet import ResNet
from recipes.vision.architectures import build
from tests.helpers import same_bits
from trainer.errors import UserError
from trainer.parallel.activation import ActivationCheckpointing, _policy
from trainer.precision.modes import Precision
from trainer.profiling.ledger import MemoryLedger
from trainer.recipe import Recipe

CPU = torch.device("cpu")


SMALL = Shape(3, 2, 32, 16)
Case = tuple[nn.Module, list[nn.Module], Callable[[], tuple[Tensor, ...]]]
"""A model, its blocks, and what makes its next inputs."""


def gpt2(dropout: float = 0.1, shape: Shape = SMALL) -> nn.Module:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", shape)
        return LanguageModel(GPT2(size="small", dropout=dropout).network(96, shape.context), "gpt2")


def tokens(rows: int, context: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(96, (rows, context + 1))
    return ids[:, :-1], ids[:, 1:]


def gpt2_case() -> Case:
    model = gpt2()
    return model, GPT2().blocks(model), lambda: tokens(2, 16)


def image_case(arch: str) -> Case:
    # 3 × 3 kernels with stride 2 on 1 × 1 have wrong bf16 gradients on some CPUs: docs/onednn-conv-gradients.md.
    size = 32 if arch == "resnet18" else 16
    model = build(arch, size, 10).to(memory_format=torch.channels_last)
    batch = lambda: (torch.randn(4, 3, size, size).contiguous(memory_format=torch.channels_last),)  # noqa: E731
    return model, ResNet(arch=arch).blocks(model), batch


def train(case: Callable[[], Case], mode: str, precision: str = "fp32", fp32_modules: Sequence[str] = ()) -> Any:
    """Two optimizer steps of two microbatches; returns everything they leave behind."""
    torch.manual_seed(3)
    model, blocks, batch = case()
    names = [name for name, _ in model.named_parameters()]
    policy = Precision(precision, list(fp32_modules))
    policy.keep_fp32(model, CPU)
    ActivationCheckpointing(mode).apply(blocks)
    assert [name for name, _ in model.named_parameters()] == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gradients, losses = [], []
    for _ in range(2):
        for _ in range(2):
            inputs = batch()
            with policy.autocast(CPU):
                loss = model.train()(*inputs).float().square().mean()
            losses.append(loss.detach())
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return {"state": model.state_dict(), "losses": losses, "gradients": gradients, "rng": torch.get_rng_state()}


def check(case: Callable[[], Case], precision: str = "fp32", fp32_modules: Sequence[str] = ()) -> Any:
    """Train without recomputing and with it, compare every bit, and return what was left behind."""
    plain = train(case, "none", precision, fp32_modules)
    for mode in ("blocks", "selective"):
        assert same_bits(train(case, mode, precision, fp32_modules), plain), mode
    return plain


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gpt2_with_dropout_trains_as_without_recomputing_bit_for_bit(precision: str) -> None:
    losses = check(gpt2_case, precision)["losses"]
    assert losses[0] != losses[1]


# Convolutions in fp16 take ten times as long on a CPU, so that net is the smallest.
@pytest.mark.parametrize(
    ("arch", "precision"),
    [
        ("resnet18", "bf16"),
        ("shufflenet_v2_x0_5", "fp16"),
        # Dropout, stochastic depth, and a squeeze that writes SiLU's result over that of a convolution, which
        # selective keeps.
        ("efficientnet_b0", "fp32"),
    ],
)
def test_a_net_with_batch_norm_trains_as_without_recomputing_bit_for_bit(arch: str, precision: str) -> None:
    state = check(lambda: image_case(arch), precision)["state"]
    assert {int(count) for name, count in state.items() if "num_batches" in name} == {4}


@pytest.mark.parametrize("pattern", ["c_fc", "h.1"])
def test_fp32_islands_in_a_block_or_around_it_stay_in_fp32(pattern: str) -> None:
    assert not same_bits(check(gpt2_case, "bf16", [pattern]), train(gpt2_case, "none", "bf16"))


class Calls(TorchDispatchMode):
    """Counts the operators that are really run, in place or not."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__.removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


def operators(mode: str, model: nn.Module, blocks: list[nn.Module], inputs: tuple[Tensor, ...]) -> Counter[str]:
    ActivationCheckpointing(mode).apply(blocks)
    with Calls() as calls:
        loss = model(*inputs).square().mean()
        if loss.requires_grad:
            loss.backward()
    return calls.count


def test_selective_repeats_what_is_cheap_and_blocks_repeat_everything() -> None:
    def count(mode: str) -> Counter[str]:
        model = gpt2(0.0)
        return operators(mode, model.train(), GPT2().blocks(model), tokens(2, 16))

    none, blocks, selective = (count(mode) for mode in ("none", "blocks", "selective"))
    expensive = ("addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu")
    assert all(selective[name] == none[name] for name in expensive)
    assert selective["native_layer_norm"] == none["native_layer_norm"] + 6
    assert selective["gelu"] == none["gelu"] + 3
    assert blocks["addmm"] >= none["addmm"] + 9  # torch stops before the last product, which nothing needs
    assert blocks["_scaled_dot_product_flash_attention_for_cpu"] == 6


def test_evaluation_recomputes_nothing() -> None:
    for disable in (torch.no_grad, nullcontext):  # neither without gradients, nor with them in eval mode
        counts = []
        for mode in ("none", "blocks", "selective"):
            torch.manual_seed(0)
            model, blocks, batch = image_case("shufflenet_v2_x0_5")
            with disable():
                counts.append(operators(mode, model.eval(), blocks, batch()))
        assert counts[0] == counts[1] == counts[2]


def working_memory(mode: str, case: Callable[[], Case]) -> int:
    model, blocks, batch = case()
    inputs = batch()
    ActivationCheckpointing(mode).apply(blocks)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    with MemoryLedger(model, optimizer) as ledger:
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = ledger.report()
    return report.at_peak["activations"] + report.at_peak["temporary"]


# With dropout, attention on a CPU is not fused: most of the memory is then T × T scores, which selective recomputes.
@pytest.mark.parametrize(("dropout", "at_most"), [(0.0, 0.78), (0.1, 0.52)])
def test_blocks_need_less_memory_than_selective_and_that_less_than_none(dropout: float, at_most: float) -> None:
    def case() -> Case:
        model = gpt2(dropout, Shape(6, 4, 64, 64))
        return model, GPT2().blocks(model), lambda: tokens(16, 64)

    none, blocks, selective = (working_memory(mode, case) for mode in ("none", "blocks", "selective"))
    assert selective < at_most * none
    assert blocks < 0.6 * selective


def test_attention_that_draws_dropout_is_recomputed_so_that_later_draws_are_the_same() -> None:
    query = torch.empty(1, 1, 2, 4)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def keeps(*call: Any, **options: Any) -> bool:
        return "SAVE" in _policy(True, None, *call, **options).name

    assert keeps(flash, query, query, query)
    assert keeps(flash, query, query, query, 0.0, True, scale=0.5)
    assert not keeps(flash, query, query, query, 0.1)
    assert keeps(efficient, query, query, query, None, True)
    assert not keeps(efficient, query, query, query, None, True, 0.1)
    assert not keeps(efficient, query, query, query, None, compute_log_sumexp=True, dropout_p=0.1)
    assert keeps(torch.ops.aten.mm.default, query, query)
    assert not keeps(torch.ops.aten.native_dropout.default, query, 0.1, True)


class Normalised(nn.Module):
    """A block with batch norm that torch.compile takes in one piece, or in two."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.broken = nn.Linear(8, 8), nn.BatchNorm1d(8), broken

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x)
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.norm(inner).relu()


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("broken", [False, True])
def test_compiled_blocks_update_batch_norm_once(broken: bool, whole: bool) -> None:
    def trained(mode: str, compiled: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Normalised(broken), Normalised(broken))
        ActivationCheckpointing(mode).apply(list(model))
        for module in ([model] if whole else model) if compiled else ():
            module.compile(backend="aot_eager")
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
        return model.state_dict(), [parameter.grad for parameter in model.parameters()]

    plain = trained("none", compiled=False)
    assert plain[0]["0.norm.num_batches_tracked"] == 3
    for mode in ("blocks", "selective"):
        torch.testing.assert_close(trained(mode, compiled=True), plain)


# One line for each file of torchvision.models: a classifier and the number of its blocks.
FAMILIES = {
    "resnet18": 8, "regnet_y_400mf": 16, "densenet121": 4, "vit_b_32": 12, "swin_t": 12, "maxvit_t": 11,
    "convnext_tiny": 18, "efficientnet_v2_s": 40, "mobilenet_v2": 17, "mobilenet_v3_small": 11, "mnasnet0_5": 16,
    "shufflenet_v2_x0_5": 16, "squeezenet1_1": 8, "googlenet": 9, "inception_v3": 11, "alexnet": 0, "vgg11": 0,
}  # fmt: skip


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_blocks_of_torchvisions_families(arch: str) -> None:
    with torch.device("cpu" if arch.startswith("regnet") else "meta"):
        model = build(arch, 224, 10)
    blocks = ResNet(arch=arch).blocks(model)
    assert len(blocks) == FAMILIES[arch]
    inside = [module for block in blocks for module in block.modules()]
    assert len({id(module) for module in inside}) == len(inside)  # none inside another


def test_what_has_no_blocks_is_refused() -> None:
    assert Recipe().blocks(nn.Linear(1, 1)) == []
    ActivationCheckpointing("none").apply([])
    with pytest.raises(UserError, match=r"checkpointing=selective: .* use activation_checkpointing=none"):
        ActivationCheckpointing("selective").apply([])
    with pytest.raises(UserError, match=r"activation_checkpointing\.mode=block is unknown; did you mean 'blocks'"):
        ActivationCheckpointing("block")
