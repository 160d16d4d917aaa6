"""Precision modes with 16-bit weights: what is kept in which format, and what becomes of small updates."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from mantissa.formats import FORMATS
from mantissa.step.ledger import MemoryLedger
from tests.helpers import NoData, SmallConvNet, copied, fit, same_bits, start, trainer_of
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.optim.masters import StochasticWeights, masters_of, stochastic_round
from trainer.optim.optimizer import Optimizer, fused_is_sound
from trainer.optim.update import Clip, ClipNorm, ClipValue, Update
from trainer.parallel.wrap import DDP, FSDP
from trainer.precision.manifest import dtypes_in_use, manifest_of
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler, LossScale
from trainer.trainer import Trainer

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES = sorted(name for name, row in FORMATS.items() if row.half_weights)


def conv_trainer(mode: str, modules: dict[str, str] | None = None, **changes: Any) -> Trainer:
    options: dict[str, Any] = {"batch_size": 8, "micro_batch_size": 4, "steps": 5, "scaler": AutoScaler(init=256.0)}
    options |= {"precision": Precision(mode, modules or {}), "optimizer": Optimizer("AdamW", lr=1e-3)}
    return start(Config(SmallConvNet(), NoData(), device="cpu", **options | changes))


class Ones(nn.Module):
    """A weight at 1.0, where the next bf16 numbers are 2^-8 below and 2^-7 above."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 48))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def moved(mode: str) -> Tensor:
    """The weights of ``Ones`` after 100 steps of AdamW at lr 6e-4, each of which moves them by about that much."""
    net = Ones()
    Precision(mode).convert(net, CPU)
    masters = masters_of(FORMATS[mode], net, seed=0)
    changed = masters or net
    update = Update(Optimizer(lr=6e-4).build(changed, CPU), changed.parameters(), LossScale(CPU), Clip(), masters)
    for step in range(100):
        update.backward(net(torch.ones(16, 48)).float())
        update.step(step)
    assert net.weight.dtype == FORMATS[mode].weights
    return net.weight.detach().float()


def test_small_updates_are_lost_in_pure_bf16_and_kept_by_masters_and_stochastic_rounding() -> None:
    exact = moved("fp32")
    assert torch.allclose(exact, torch.tensor(0.94), atol=1e-3)
    assert (moved("bf16_pure") == 1).all()
    assert torch.equal(moved("bf16_master"), exact.bfloat16().float())
    rounded = moved("bf16_sr")
    assert rounded.unique().numel() > 3  # each weight on its own way
    assert abs(rounded.mean() - 0.94) < 1e-3
    assert torch.equal(rounded, moved("bf16_sr"))


@pytest.mark.parametrize("mode", MODES)
def test_weights_gradients_and_optimizer_have_the_formats_of_the_manifest(mode: str) -> None:
    trainer = conv_trainer(mode)
    row = FORMATS[mode]
    dtype, changed = row.weights, row.weights if row.only_half else FP32
    seen: set[torch.dtype] = set()
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: seen.add(gradient.dtype))
    trainer.model[0].register_forward_pre_hook(lambda module, inputs: seen.add(inputs[0].dtype))
    record = fit(trainer, 1)[0]
    assert seen == {parameter.dtype for parameter in trainer.model.parameters()} == {dtype}
    assert record.loss.dtype == record.grad_norm.dtype == FP32
    assert [buffer.dtype for buffer in trainer.model.buffers()] == [FP32, FP32, torch.int64]
    assert {state["exp_avg"].dtype for state in trainer.optimizer.state.values()} == {changed}
    names = [str(one).removeprefix("torch.") for one in (dtype, changed)]
    assert list(dtypes_in_use(trainer.model, trainer.optimizer).values()) == [*names, {}]
    manifest = manifest_of(trainer.config.precision, trainer.hardware, trainer.fp32_modules)
    assert manifest["effective"]["matmul_dtype"] == str(row.half).removeprefix("torch.")
    assert trainer.loss_scale.recovers == (row.half == FP16)


def test_constants_that_are_not_saved_with_the_model_keep_their_format() -> None:
    net = nn.Linear(3, 3)
    net.register_buffer("table", torch.ones(3))
    net.register_buffer("frequencies", torch.ones(3), persistent=False)
    Precision("bf16_pure").convert(net, CPU)
    assert (net.table.dtype, net.frequencies.dtype) == (BF16, FP32)


@pytest.mark.parametrize(("mode", "momentum", "affine"), [("bf16_pure", None, False), ("fp16_master", 0.1, True)])
def test_running_statistics_are_fp32s(momentum: float | None, affine: bool, mode: str) -> None:
    """A mean of 3 that moves by 0.001, and a variance beyond fp16: 16 bits would keep neither."""
    torch.manual_seed(0)
    dtype = FORMATS[mode].weights
    norm, exact = (nn.BatchNorm2d(4, momentum=momentum, affine=affine) for _ in range(2))
    net = nn.Sequential(norm)
    Precision(mode).convert(net, CPU)
    for _ in range(50):
        x = 3 + torch.randn(8, 4, 5, 5) * torch.tensor([0.01, 1.0, 300.0, 1.0])[:, None, None]
        x = x.to(dtype)
        out = net(x)
        exact(x.float())
    assert out.dtype == dtype
    torch.testing.assert_close(norm.running_mean, exact.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_var, exact.running_var, rtol=1e-5, atol=0)
    assert norm.running_var[2] > 70_000
    assert norm.num_batches_tracked == 50
    assert torch.allclose(net.eval()(x).float(), exact.eval()(x.float()), atol=0.03)
    if affine:
        net.train()(x).float().square().sum().backward()
        assert {parameter.grad.dtype for parameter in norm.parameters()} == {dtype}
        assert [name for name, _ in norm.named_parameters()] == ["weight", "bias"]


def test_an_island_is_fp32_throughout_and_a_loss_in_it_stays_so() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.between = FP16

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.first(x)
            self.between = hidden.dtype
            return self.second(hidden), hidden.sum() * 1e6

    net = nn.ModuleDict({"inner": Inner(), "other": nn.Linear(8, 8)})
    Precision("fp16_pure", {"inner": "fp32"}).convert(net, CPU)
    out, loss = net["inner"](torch.ones(2, 8, dtype=FP16))
    assert (out.dtype, loss.dtype, net["inner"].between) == (FP16, FP32, FP32)


def test_a_weight_shared_with_an_island_is_refused() -> None:
    net = nn.ModuleDict({"table": nn.Embedding(4, 8), "head": nn.Linear(8, 4, bias=False)})
    net["head"].weight = net["table"].weight
    with pytest.raises(UserError, match=r"set .precision.modules=\{head:fp32,table:fp32\}., or leave it out"):
        Precision("bf16_master", {"head": "fp32"}).convert(net, CPU)
    net["other"] = nn.Linear(8, 8)
    Precision("bf16_master", {"head": "fp32", "table": "fp32"}).convert(net, CPU)
    assert net["head"].weight is net["table"].weight
    assert net["head"].weight.dtype == FP32


def test_what_holds_an_islands_tensors_keeps_its_type() -> None:
    @dataclass
    class Output:
        hidden: Tensor
        others: tuple[Tensor, ...]
        count: int = 3

    class Island(nn.Module):
        def forward(self, x: Tensor) -> tuple[Any, ...]:
            return Output(x, (x, x)), OrderedDict(a=x), defaultdict(list, b=[x]), BaseModelOutput(x)

    net = nn.ModuleDict({"island": Island(), "linear": nn.Linear(2, 2)})
    Precision("bf16_pure", {"island": "fp32"}).convert(net, CPU)
    output, ordered, default, of_transformers = net["island"](torch.ones(2, dtype=BF16))
    assert (type(output), output.hidden.dtype, output.others[1].dtype, output.count) == (Output, BF16, BF16, 3)
    assert (type(ordered), ordered["a"].dtype) == (OrderedDict, BF16)
    assert (type(default), default["b"][0].dtype, default["new"]) == (defaultdict, BF16, [])
    hidden = of_transformers.last_hidden_state  # it is a dict, a dataclass and can be indexed
    assert (type(of_transformers), hidden.dtype) == (BaseModelOutput, BF16)
    assert hidden is of_transformers[0] is of_transformers["last_hidden_state"]


def test_a_skipped_step_does_not_round_the_weights_again() -> None:
    net = nn.Linear(64, 64)
    Precision("bf16_sr").convert(net, CPU)
    masters = StochasticWeights(net, seed=0)
    update = Update(Optimizer("SGD").build(masters, CPU), masters.parameters(), LossScale(CPU, 1.0), Clip(), masters)
    before = copied(net.state_dict())
    update.backward(net(torch.ones(1, 64, dtype=BF16)).float().sum() * float("inf"))
    assert update.step().skipped
    assert same_bits(dict(net.state_dict()), dict(before))


def adaptive(name: str) -> tuple[Optimizer, torch.dtype, float, float, Clip, float, float]:
    """They divide a gradient by its size plus eps, which is as large."""
    optimizer = Optimizer(name, lr=2.0**-10, options={"eps": 2.0**-30})
    return optimizer, FP16, 2.0**20, 2.0**-10, Clip(), 2.0**-28, 2.0**-11


PURE: dict[str, tuple[Optimizer, torch.dtype, float, float, Clip, float, float]] = {
    # optimizer, dtype, loss scale, gradient of each of 16 weights, clip; their true norm, how far a weight moves
    # True gradients of 2^-30 are 0 in fp16: the optimizer divides by the scale, in fp32.
    "SGD": (Optimizer("SGD", lr=2.0**20), FP16, 2.0**20, 2.0**-10, Clip(), 2.0**-28, 2.0**-10),
    "AdamW": adaptive("AdamW"),
    "Adagrad": adaptive("Adagrad"),
    "clip by norm": (Optimizer("SGD", lr=2.0**10), FP16, 2.0**20, 4.0, ClipNorm(2.0**-20), 2.0**-16, 2.0**-12),
    "clip by value": (Optimizer("SGD", lr=2.0**10), FP16, 2.0**20, 4.0, ClipValue(2.0**-21), 2.0**-16, 2.0**-11),
    "unfused": (Optimizer("SGD", lr=2.0**10, fused=False), BF16, 2.0**20, 4.0, ClipNorm(2.0**-20), 2.0**-16, 2.0**-12),
    "a norm beyond fp16": (Optimizer("SGD", lr=1e-6), FP16, 2.0**-2, 16000.0, ClipValue(1e9), 256000.0, 0.064),
}


@pytest.mark.parametrize("case", PURE)
def test_16_bit_gradients_are_unscaled_and_clipped_by_their_true_size(case: str) -> None:
    optimizer, dtype, scale, gradient, clip, norm, moved = PURE[case]
    if optimizer.fused is not False and not fused_is_sound(getattr(torch.optim, optimizer.name), dtype, "cpu"):
        pytest.skip("its fused form is not used: in this torch it updates 16-bit weights wrongly on a CPU")
    net = nn.Linear(4, 4, bias=False).to(dtype)
    nn.init.zeros_(net.weight)
    update = Update(optimizer.build(net, CPU), net.parameters(), LossScale(CPU, scale), clip)
    net.weight.grad = torch.full((4, 4), gradient, dtype=dtype)
    result = update.step()
    assert (result.grad_norm.item(), result.skipped.item()) == (norm, False)
    tolerance = 0.07 if isinstance(clip, ClipNorm) else 0.0  # torch adds 1e-6 to the norm
    torch.testing.assert_close(net.weight.detach(), torch.full((4, 4), -moved, dtype=dtype), rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("mode", "weights", "optimizer", "peak"),
    [("bf16_pure", 2, 4, 8), ("bf16_master", 2, 12, 18), ("bf16_sr", 2, 8, 18), ("bf16", 4, 8, 16)],
)
def test_bytes_of_each_parameter_with_adam(mode: str, weights: int, optimizer: int, peak: int) -> None:
    """Weights + gradients + optimizer: 2 + 2 + 4 pure; 2 + 4 + 12 with masters, also with two microbatches."""
    wide = ("recipe=bignet", "recipe.layers=12", "recipe.width=96", "data.samples=64", "steps=3", "batch_size=4")
    micro = 4 if mode == "bf16" else 2
    trainer = trainer_of(*wide, f"micro_batch_size={micro}", "optimizer=adamw", f"precision={mode}")
    first, second, _ = trainer.batches()
    trainer.train_step(first)
    with MemoryLedger(trainer.model, trainer.optimizer) as recorded:
        trainer.train_step(second)
    ledger, count = recorded.report(), sum(parameter.numel() for parameter in trainer.model.parameters())
    assert ledger.highest["weights"] == weights * count
    assert ledger.highest["optimizer"] == pytest.approx(optimizer * count, rel=1e-3)
    assert ledger.highest["gradients"] == (2 if mode == "bf16_pure" else 4) * count
    assert (ledger.highest["autocast_copies"] > 0) == (mode == "bf16")
    assert ledger.peak_bytes == pytest.approx(peak * count, rel=0.1)


def test_stochastic_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    for value, low, high in ((1 + 0.3 * 2**-7, 1.0, 1 + 2**-7), (-(1 + 0.3 * 2**-7), -(1 + 2**-7), -1.0)):
        rounded = stochastic_round(torch.full((100, 1000), value), generator).double()
        assert rounded.unique().tolist() == [low, high]
        assert abs(rounded.mean().item() - value) < 6 * 2**-7 * 0.5 / 100_000**0.5
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, 2.0**-130, float("inf"), -float("inf")])
    for _ in range(20):
        assert same_bits(stochastic_round(exact, generator), exact.bfloat16())
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)  # a carry would make numbers of them
    assert stochastic_round(nans.view(FP32), generator).isnan().all()
    images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert stochastic_round(images, generator).shape == images.shape


def test_rounding_depends_on_seed_and_step() -> None:
    def weights(seed: int, step: int) -> Tensor:
        net = nn.Linear(32, 32, bias=False)
        nn.init.ones_(net.weight)
        Precision("bf16_sr").convert(net, CPU)
        masters = StochasticWeights(net, seed)
        optimizer = torch.optim.SGD(masters.parameters(), lr=1e-3)
        update = Update(optimizer, masters.parameters(), LossScale(CPU), Clip(), masters)
        net.weight.grad = torch.ones_like(net.weight)
        update.step(step)
        return net.weight.detach()

    assert [torch.equal(weights(0, 5), weights(*other)) for other in ((0, 5), (0, 6), (1, 5))] == [True, False, False]


def test_contradictions_are_refused() -> None:
    with pytest.raises(UserError, match="set precision=bf16_master"):
        FSDP().check(Precision("bf16_sr"))
    with pytest.raises(UserError, match=r"precision\.modules"):
        FSDP().check(Precision("fp16_master", {"bn": "fp32"}))
    for mode in MODES:
        DDP().check(Precision(mode, {"bn": "fp32"}))
