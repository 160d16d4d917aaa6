"""Watch, examine and the doctor on a GPU, and what the memory of one leads to."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mantissa
from evidence.doctor import replay
from evidence.memory.trial import measure, peak_of
from mantissa.doctor.diagnosis import CHECKS, diagnose
from mantissa.step.memory import available_bytes
from recipes.bignet import BigNet
from tests.gpu.conftest import Gpu
from tests.gpu.pretended import Pretended
from tests.helpers import BIGNET, compose, trainer_of
from trainer.errors import NonFiniteError, is_out_of_memory
from trainer.recipe import Sizes
from trainer.run import start

Batch = tuple[Tensor, Tensor]
adam = partial(torch.optim.AdamW, lr=1e-3, fused=True)
sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.head(F.relu(self.norm(self.convolution(images))).mean((2, 3)))
        return features


def model_and_batches(count: int) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3, 8, 8).to("cuda"), torch.randint(10, (8,)).to("cuda")) for _ in range(count)]
    return ConvNet().to("cuda"), batches


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def loop(precision: str, optimizer: Callable[..., Any], **options: Any) -> tuple[mantissa.Watch, Callable, list[Batch]]:
    """A loop of a user's own under Watch: what it watches with, its step, and eight batches."""
    model, batches = model_and_batches(8)
    optimize = optimizer(model.parameters())
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=precision == "fp16")
    watch = mantissa.Watch(model, optimize, scaler, precision=precision, every=2, say=lambda text: None, **options)

    def step(batch: Batch) -> None:
        watch.keep(batch)
        with torch.autocast("cuda", dtype=half, enabled=half is not None):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimize)
        scaler.update()
        optimize.zero_grad()
        watch.step(loss.detach())

    return watch, step, batches


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", sgd), ("bf16", adam), ("fp16", adam), ("fp16", sgd)],
    ids=["fp32", "bf16", "fp16", "fp16-sgd"],
)
def test_watch_follows_a_loop_and_waits_in_its_first_step_alone(
    precision: str, optimizer: Callable[..., Any], gpu: Gpu | Pretended, tmp_path: Path
) -> None:
    watch, step, batches = loop(precision, optimizer, folder=tmp_path)
    step(batches[0])
    for batch in batches[1:]:
        gpu.step(step, batch)
    watch.close()
    assert (watch.number, watch.skipped) == (8, 0)
    assert all(map(math.isfinite, watch.metrics().values()))


def test_watch_names_what_made_a_step_not_finite(gpu: Gpu | Pretended, tmp_path: Path) -> None:
    _, step, batches = loop("bf16", adam, folder=tmp_path, loss=loss_of)
    batches[3][0].fill_(float("inf"))
    with pytest.raises(mantissa.NotFiniteError, match=r"step 4: .* batch\[0\]"):
        list(map(step, batches))
    assert "batch[0]" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("precision", "optimizer"), [("fp16", adam), ("bf16_pure", sgd)], ids=["fp16", "bf16_pure"])
def test_examine_leaves_no_check_out(precision: str, optimizer: Callable[..., Any], gpu: Gpu | Pretended) -> None:
    model, batches = model_and_batches(2)
    report = mantissa.examine(
        model, loss_of, batches, precision, optimizer(model.parameters()), time_budget_s=600, say=lambda text: None
    )
    assert not report.diagnosis.budget.left_out
    assert not report.diagnosis.budget.crashes
    assert {finding.kind for finding in report.findings} <= {"lost updates"}


def test_the_doctor_finds_why_a_run_failed(gpu: Gpu | Pretended, tmp_path: Path) -> None:
    job = (
        *BIGNET,
        "device=cuda",
        "precision=fp16_pure",
        "optimizer=sgd",
        "optimizer.lr=1e30",
        "steps=8",
        "log_every=1",
    )
    with pytest.raises(NonFiniteError):
        start.train(compose(*job, "tracking=local", f"output_dir={tmp_path}", "run_name=failed", "quiet=true"))
    taken, _ = replay.of_run(str(tmp_path / "failed"), ["device=cuda"], 0)
    diagnosis = diagnose(taken, CHECKS, 600, say=lambda text: None)
    assert diagnosis.verdict == "FOUND"
    assert not diagnosis.budget.crashes


def test_memory_that_freed_tensors_leave_reserved_is_available(pretended: Pretended) -> None:
    device = torch.device("cuda", 0)
    pretended.elsewhere = pretended.total - 2**28
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert available_bytes(device) == 0
    del held
    assert available_bytes(device) == 2**28


WIDE = ("recipe=bignet", "recipe.layers=2", "recipe.width=64", "data.samples=40000", "loader=plain", "steps=2")


@pytest.fixture
def limit(gpu: Gpu | Pretended) -> Any:
    """Limits this process to so many bytes."""
    total = torch.cuda.get_device_properties(0).total_memory
    yield lambda size: torch.cuda.set_per_process_memory_fraction(size / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_trial_of_two_steps_fits_or_runs_out(limit: object) -> None:
    config = compose(*WIDE, "device=cuda", "batch_size=4096", "micro_batch_size=4096")
    assert measure(config, 2**32)
    torch.cuda.empty_cache()  # what is cached is given out whatever the limit is
    with pytest.raises(RuntimeError) as raised:
        measure(config, 2**20)
    assert is_out_of_memory(raised.value)


def test_the_microbatch_is_halved_until_it_fits(
    limit: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BigNet, "sizes", lambda recipe, hardware: Sizes(2, 32768, 32768))
    peaks = []
    for size in (32768, 16384):
        trainer = trainer_of(*WIDE, f"micro_batch_size={size}", device="cuda")
        first, second = trainer.batches()
        trainer.train_step(first)
        peaks.append(peak_of(trainer, partial(trainer.train_step, second)))
        del trainer
        torch.cuda.empty_cache()
    limit(sum(peaks) / 2)
    written = ("tracking=local", f"output_dir={tmp_path}", "checkpoint=none", "eval_samples=8", "quiet=true")
    job = compose(*WIDE, "device=cuda", *written)
    assert start.train(job).summary["status"] == "FINISHED"
    assert capsys.readouterr().out.count("starting again with micro_batch_size=16384") == 1
