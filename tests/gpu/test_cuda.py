"""Training on a GPU: no waiting of the host, fused updates on the device, TF32, memory, and the same bits there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mantissa.formats import NUMBERS
from mantissa.step.ledger import MemoryLedger
from recipes.gpt2 import SHAPES, Shape
from tests.gpu.conftest import Gpu, real, waits
from tests.gpu.pretended import Pretended
from tests.helpers import PROJECT, copied, fit, mxfp8_of_torchao, same_bits, trainer_of
from tests.parallel.conftest import TORCHRUN, environment
from tests.parallel.ranks import flag_obeyed
from tests.parity.bare import Bare, gpt2_loss
from trainer.data.contract import Batch
from trainer.data.loader import to_device
from trainer.errors import NonFiniteError
from trainer.hardware import NATIVE, UNAVAILABLE, detect
from trainer.precision.manifest import dtypes_in_use
from trainer.precision.modes import Precision
from trainer.profiling import rates
from trainer.profiling.utilisation import data_sheet
from trainer.run.monitor import Monitor
from trainer.trainer import Trainer

STEPS = 9
Device = Gpu | Pretended
MODES = ["fp32", "tf32", "bf16", "fp16"]
GPT2 = ["recipe=gpt2", "recipe.size=small", "recipe.context=64", "data=synthetic", "data.vocab_size=500", "clip=norm"]
RESNET = ["recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=synthetic", "data.classes=10"]
RESNET += ["batch_size=4", "micro_batch_size=2"]
BIGNET = ["recipe=bignet", "recipe.layers=2", "recipe.width=64"]


@pytest.fixture(autouse=True)
def small_size(monkeypatch: pytest.MonkeyPatch, gpu: Device) -> None:
    monkeypatch.setitem(SHAPES, "small", Shape(2, 4, 64, 64))


def on_gpu(*overrides: str) -> Trainer:
    return trainer_of(f"steps={STEPS}", "batch_size=8", "micro_batch_size=4", *overrides, device="cuda")


def on_device(trainer: Trainer) -> list[list[Batch]]:
    """Every step's microbatches, copied beforehand."""
    steps = [[to_device(batch, trainer.device) for batch in step] for step in trainer.batches()]
    torch.cuda.synchronize()
    return steps


def monitor_of(trainer: Trainer, log_every: int) -> Monitor:
    monitor = Monitor(trainer)
    monitor.log_every = log_every
    return monitor


@pytest.mark.parametrize(
    ("mode", "clip", "optimizer", "recipe"),
    [  # every two of the values meet
        ("fp32", "none", "adamw", GPT2), ("fp32", "norm", "sgd", RESNET), ("fp32", "value", "adamw", BIGNET),
        ("tf32", "none", "sgd", BIGNET), ("tf32", "norm", "adamw", GPT2), ("tf32", "value", "sgd", RESNET),
        ("bf16", "none", "adamw", RESNET), ("bf16", "norm", "sgd", BIGNET), ("bf16", "value", "sgd", GPT2),
        ("fp16", "none", "sgd", GPT2), ("fp16", "norm", "adamw", BIGNET), ("fp16", "value", "adamw", RESNET),
    ],
    indirect=["mode"], ids=lambda value: value[0].removeprefix("recipe=") if isinstance(value, list) else value,
)  # fmt: skip
def test_the_host_never_waits_between_log_steps(
    mode: str, clip: str, optimizer: str, recipe: list[str], gpu: Device
) -> None:
    """The copies included, from pinned memory as loader=pinned gives it."""
    options = (f"precision={mode}", f"clip={clip}", f"optimizer={optimizer}", "optimizer.lr=0.001")
    assert steps_without_a_wait(gpu, *recipe, *options) == 3


@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [
        *(("bf16", "muon"), ("bf16_master", "adamw"), ("bf16_sr", "muon"), ("bf16_pure", "adamw")),
        *(("fp16_master", "muon"), ("fp16_pure", "adamw")),
    ],
    indirect=["mode"],
)
def test_nor_does_it_with_16_bit_weights_and_with_muon(mode: str, optimizer: str, gpu: Device) -> None:
    assert steps_without_a_wait(gpu, *GPT2, f"precision={mode}", f"optimizer={optimizer}") == 3


def steps_without_a_wait(gpu: Device, *options: str) -> int:
    """Take steps in which a wait for the device is an error, and return how many were taken."""
    trainer = on_gpu(*options, "steps=6")
    assert trainer.update._takes_flag
    monitor = monitor_of(trainer, log_every=100)
    steps = list(trainer.batches())
    assert all(tensor.is_pinned() for step in steps for batch in step for tensor in batch.values())
    for step in steps[:2]:  # kernels are chosen and state is made
        monitor.add(trainer.train_step(step))
    torch.cuda.synchronize()
    for step in steps[2:5]:
        monitor.add(gpu.step(trainer.train_step, step))
    assert waits(gpu, monitor.collect)  # so a wait is seen
    return trainer.step - 2


@pytest.mark.parametrize("precision", ["fp16", "fp16_master"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_skipped_fused_step_leaves_weights_and_state(optimizer: str, precision: str) -> None:
    options = (f"precision={precision}", "scaler.init=1024", f"optimizer={optimizer}", "optimizer.lr=0.001")
    trainer = on_gpu(*BIGNET, *options)
    steps = on_device(trainer)
    for step in steps[:2]:
        trainer.train_step(step)
    before = copied(trainer.model.state_dict()), copied(trainer.optimizer.state_dict()["state"])
    steps[2][1]["y"][0, 3] = float("inf")
    record = trainer.train_step(steps[2])
    assert bool(record.skipped)
    assert same_bits((trainer.model.state_dict(), trainer.optimizer.state_dict()["state"]), before)
    assert trainer.loss_scale.scale.item() == 512
    assert not trainer.train_step(steps[3]).skipped
    assert not same_bits(copied(trainer.model.state_dict()), before[0])


@real("NCCL is not pretended")
def test_a_skipped_fused_step_of_sharded_weights(tmp_path: Path) -> None:
    """FSDP2 gives the fused kernel DTensors, and the flag beside them is a plain tensor."""
    command = [*TORCHRUN, "--nproc-per-node=1", "-m", "tests.parallel.ranks", "flag", str(tmp_path)]
    variables = environment() | {"MANTISSA_TEST_DEVICE": "cuda"}
    done = subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = (json.loads(path.read_text())["flag"] for path in tmp_path.glob("*.json"))
    for mode, rank in found.items():
        assert rank == flag_obeyed(mode)


@pytest.mark.parametrize("mode", ["fp32", "bf16"], indirect=True)
def test_a_bad_step_without_a_scaler_blocks_all_later_ones(mode: str) -> None:
    trainer = on_gpu(*BIGNET, f"precision={mode}")
    monitor = monitor_of(trainer, log_every=6)
    steps = on_device(trainer)
    for step in steps[:2]:
        monitor.add(trainer.train_step(step))
    before = copied(trainer.model.state_dict())
    steps[2][0]["y"][0, 0] = float("nan")
    for step in steps[2:5]:
        monitor.add(trainer.train_step(step))
    with pytest.raises(NonFiniteError, match="step 3"):
        monitor.add(trainer.train_step(steps[5]))
    assert same_bits(copied(trainer.model.state_dict()), before)


@pytest.mark.parametrize("mode", MODES, indirect=True)
def test_bitwise_the_bare_loop(mode: str) -> None:
    options = ["recipe.chunked_loss=false", f"scaler.init={2.0**24}", "scaler.interval=4", "deterministic=true"]
    trainer = on_gpu(*GPT2, *options, f"precision={mode}")
    bare = Bare.of(trainer, gpt2_loss(500))
    steps = list(trainer.batches())
    records = fit(trainer)
    for step in steps:
        bare.step(step, 8 * 64)
    skipped = bare.check(trainer, records)
    assert (skipped[0], all(skipped)) == (mode == "fp16", False)


@pytest.mark.parametrize("mode", ["fp32", "bf16"], indirect=True)
def test_no_more_memory_than_the_bare_loop(mode: str) -> None:
    """Of tensors that the allocator gave, at the highest, after the optimizer's state exists."""
    trainer = on_gpu(*GPT2, "recipe.chunked_loss=false", f"precision={mode}")
    steps = list(trainer.batches())

    def peak(take: Callable[[list[Batch]], object]) -> int:
        for step in steps[:3]:
            take(step)
        torch.cuda.reset_peak_memory_stats()
        take(steps[3])
        return torch.cuda.max_memory_allocated()

    trainer.model.train()
    own = peak(trainer.train_step)
    bare = Bare.of(trainer, gpt2_loss(500))
    del trainer
    torch.cuda.empty_cache()
    assert own <= 1.02 * peak(lambda step: bare.step(step, 8 * 64))


def error_of(compute: str) -> float:
    """The relative error of an fp32 product or convolution against fp64."""
    torch.manual_seed(0)
    if compute == "matmul":
        function, given = torch.mm, torch.randn(2, 512, 512, device="cuda")
    else:
        function, given = F.conv2d, [torch.randn(*shape, device="cuda") for shape in ((8, 64, 32, 32), (64, 64, 3, 3))]
    exact, found = function(*(each.double() for each in given)), function(*given)
    return ((found - exact).norm() / exact.norm()).item()


@real("rounding is not pretended")
@pytest.mark.parametrize("compute", ["matmul", "convolution"])
def test_fp32_is_fp32_and_tf32_is_tf32(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where cuDNN may try algorithms out it can choose Winograd's, whose fp32 error is larger; earlier tests let it.
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    Precision("fp32").apply()
    assert error_of(compute) < 1e-5
    if detect("cuda").support("tf32") == NATIVE:
        Precision("tf32").apply()
        assert 5e-5 < error_of(compute) < 2e-3
        Precision("fp32").apply()
        assert error_of(compute) < 1e-5


@real("speed is not pretended")
def test_the_matmul_rates_of_a_gpu() -> None:
    hardware = detect("cuda")
    names = [name for name in NUMBERS if hardware.support(name) != UNAVAILABLE]
    before = torch.backends.cuda.matmul.fp32_precision
    found = {name: rates.measure(NUMBERS[name], hardware.device) for name in names}
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert found["fp16"] > found["fp32"]
    for name, rate in found.items():
        if (stated := data_sheet(hardware.name, name)) is not None:
            assert 0.05 < rate / stated < 1.1, (name, rate)  # other tests may use the GPU at the same time


@real("kernels are not pretended")
@pytest.mark.parametrize("mode", ["bf16"], indirect=True)
def test_a_model_that_masks_attention_does_not_take_cudnns_kernel(mode: str) -> None:
    """Its mask and cuDNN's kernel: NaN gradients on a Hopper GPU."""
    trainer = on_gpu("recipe=t5", "recipe.context=64", "data=synthetic", "data.vocab_size=500", f"precision={mode}")
    step = on_device(trainer)[0]
    trainer.model.train()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        record = trainer.train_step(step)
    assert torch.isfinite(record.grad_norm)
    assert not [event.key for event in profile.key_averages() if "dot_product_cudnn" in event.key]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@real("pinned memory is not pretended")
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_loader_pins_and_plain_does_not(workers: int) -> None:
    for loader, pinned in (("pinned", True), ("plain", False)):
        trainer = on_gpu(*BIGNET, f"loader={loader}", f"loader.workers={workers}", "steps=2")
        for step in trainer.batches():
            assert {tensor.is_pinned() for batch in step for tensor in batch.values()} == {pinned}


@real("pinned memory is not pretended")
@pytest.mark.parametrize("recipe", [BIGNET, ("recipe=resnet", "data=synthetic", "data.samples=600")])
def test_the_thread_that_prepares_batches_changes_none(recipe: tuple[str, ...]) -> None:
    """It has the device of the training thread; batches and buffers that are used again stay those of their step."""
    steps = {}
    for loader in ("pinned", "plain"):
        sizes = ("batch_size=512", "micro_batch_size=256", "steps=30")
        trainer = on_gpu(*recipe, f"loader={loader}", "loader.workers=0", *sizes)
        copies = ([to_device(batch, trainer.device) for batch in step] for step in trainer.batches())
        steps[loader] = [[{name: each.cpu() for name, each in batch.items()} for batch in step] for step in copies]
    assert len(steps["plain"]) == 30
    assert same_bits(steps["pinned"], steps["plain"])


@real("the allocator's history is not pretended")
def test_memory_profiler_writes_the_allocators_history(tmp_path: Path) -> None:
    trainer = on_gpu(*BIGNET, "profiler=memory")
    session = trainer.config.profiler.start(
        tmp_path, trainer.device, partial(MemoryLedger, trainer.model, trainer.optimizer)
    )
    trainer.model.train()
    for index, step in enumerate(trainer.batches()):
        with session.step(index):
            trainer.train_step(step)
    session.finish()
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {"ledger.json", "ledger.txt", "memory_snapshot.pickle"}
    assert (tmp_path / "profile" / "memory_snapshot.pickle").stat().st_size > 1000
    weights = sum(parameter.numel() * 4 for parameter in trainer.model.parameters())
    assert session.ledger.at_peak["weights"] == weights


@real("kernels are not pretended")
@pytest.mark.parametrize("mode", ["mxfp8"], indirect=True)
def test_native_mxfp8_multiplies_as_the_emulated_one(mode: str) -> None:
    x, weight = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    results = []
    for native in (True, False):
        mxfp8_of_torchao(native)(x, weight).square().sum().backward()
        results.append((x.grad, weight.grad))
        x.grad = weight.grad = None
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


@real("kernels are not pretended")
@pytest.mark.filterwarnings("default")  # warnings of the compiler are not tested here
@pytest.mark.parametrize("mode", ["fp8"], indirect=True)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", ["'off'", "default"], ids=["eager", "compiled"])
def test_fp8_trains_as_bf16_does(mode: str, scaling: str, compiled: str) -> None:
    """Compiled, fp8 by rows was NaN behind a fused RMS norm (pytorch issue 150859)."""
    pytest.importorskip("torchao.float8", reason="torchao is optional")
    llama = ("recipe=llama", "recipe.layers=2", "recipe.context=64", "data=synthetic", "data.vocab_size=500")
    losses = []
    for options in (["precision=bf16"], ["precision=fp8", f"precision.fp8_scaling={scaling}"]):
        trainer = on_gpu(*llama, *options, f"compile={compiled}")
        losses.append(torch.stack([record.loss for record in fit(trainer)]))
    assert dtypes_in_use(trainer.model, trainer.optimizer)["scaled_modules"]
    assert torch.allclose(losses[0], losses[1], rtol=0.03)
    assert not torch.equal(losses[0], losses[1])
