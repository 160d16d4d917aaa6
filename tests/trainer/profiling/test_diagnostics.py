"""What rounding does to updates: the meter beside updates worked out by hand, and a run's metrics and warnings."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.formats import FORMATS
from mantissa.step.updates import SAMPLE, Counts, UpdateMeter
from tests.helpers import BIGNET, NoData, SmallConvNet, compose, same_bits
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.optim.masters import masters_of
from trainer.optim.optimizer import Optimizer
from trainer.optim.update import Clip, ClipNorm, Update
from trainer.parallel.world import World
from trainer.precision.modes import Precision
from trainer.precision.scaler import LossScale
from trainer.profiling.diagnostics import Numerics
from trainer.run.start import train

CPU = torch.device("cpu")


class Net(nn.Module):
    """A layer norm, whose weight is 1.0, and weights of about 0.02 as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 1024)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        return logits.float().pow(2).mean()


class Training:
    """A model in training, without a run."""

    def __init__(
        self,
        mode: str,
        name: str = "AdamW",
        lr: float = 1e-4,
        scale: float | None = None,
        clip: Clip | None = None,
        fused: bool | str = "auto",
        state: str = "auto",
        **options: Any,
    ) -> None:
        self.net = Net()
        precision = Precision(mode)
        precision.convert(self.net, CPU)
        self.masters = masters_of(FORMATS[mode], self.net, 0)
        changed = self.masters or self.net
        self.optimizer = Optimizer(name, lr=lr, fused=fused, state=state, options=options).build(changed, CPU)
        scaled = LossScale(CPU, scale)
        self.update = Update(self.optimizer, changed.parameters(), scaled, clip or Clip(), self.masters)
        self.meter = UpdateMeter(self.net, self.optimizer, precision.half, self.masters, self.update.clip)
        self.half = FORMATS[mode].autocast
        self.steps = 0
        self.generator = torch.Generator().manual_seed(0)

    def step(self, loss_times: float = 1.0) -> bool:
        """Take a step; return whether it was skipped."""
        x = torch.randn(16, 64, generator=self.generator)
        with torch.autocast("cpu", dtype=self.half or torch.bfloat16, enabled=self.half is not None):
            loss = self.net(x)
        self.update.backward(loss * loss_times)
        skipped = self.update.step(self.steps, 1.5).skipped
        self.steps += 1
        return bool(skipped)

    def measured(self) -> dict[str, Counts]:
        self.update.meter = self.meter
        self.step()
        self.update.meter = None
        return self.meter.results()


def after(training: Training, steps: int) -> dict[str, Counts]:
    for _ in range(steps - 1):
        training.step()
    return training.measured()


@pytest.mark.parametrize(
    ("mode", "name", "options"),
    [
        ("fp32", "AdamW", {"clip": ClipNorm(0.01)}),
        ("bf16", "AdamW", {}),
        ("bf16", "AdamW", {"state": "bf16", "clip": ClipNorm(0.01)}),
        ("bf16_master", "AdamW", {"clip": ClipNorm(0.01)}),
        ("fp16_master", "AdamW", {"scale": 256.0}),
        ("fp32", "SGD", {"lr": 1e-2, "clip": ClipNorm(0.1), "momentum": 0.9}),
        ("fp32", "Adam", {"lr": 1e-2, "clip": ClipNorm(0.1), "amsgrad": True}),
        ("fp32", "RMSprop", {"lr": 1e-2, "clip": ClipNorm(0.1), "momentum": 0.5}),
        *(("fp32", name, {"lr": 1e-2, "clip": ClipNorm(0.1)}) for name in ("Adagrad", "Adadelta", "NAdam", "Rprop")),
    ],
)
def test_nothing_is_lost_in_fp32_and_with_masters_whatever_the_optimizer(
    mode: str, name: str, options: dict[str, Any]
) -> None:
    found = after(Training(mode, name, **options), 3)
    assert set(found) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    for update in found.values():
        assert update.lost == 0
        assert update.edq == pytest.approx(1, abs=1e-3)
        assert name != "AdamW" or update.moment_zero == 0


@pytest.mark.parametrize(("mode", "fused"), [("fp16_pure", True), ("bf16_pure", False)])
def test_the_intended_update_is_adams_with_the_true_gradient_in_fp32(mode: str, fused: bool) -> None:
    """16-bit weights and scaled 16-bit gradients, which the fused optimizer divides and the other gets rounded."""
    training = Training(mode, "Adam", lr=1e-3, scale=1024.0, clip=ClipNorm(0.02), eps=1e-4, fused=fused)
    for _ in range(2):
        training.step()
    weight = training.net.head.weight
    before = weight.detach().float()
    state = {key: value.float() for key, value in training.optimizer.state[weight].items()}
    true: list[Tensor] = []
    clip = training.update.clip.clip_factor

    def fold(gradients: list[Tensor], norm: Tensor, factor: Tensor) -> Tensor:
        assert norm > 0.02
        true.append(gradients[2].float() * 1.5 / 1024 * 0.02 / (norm + 1e-6))
        return clip(gradients, norm, factor)

    training.update.clip.clip_factor = fold
    update = training.measured()["head.weight"]
    mean = 0.9 * state["exp_avg"] + 0.1 * true[0]
    square = 0.999 * state["exp_avg_sq"] + 0.001 * true[0] ** 2
    intended = -1e-3 * mean / (1 - 0.9**3) / ((square / (1 - 0.999**3)).sqrt() + 1e-4)
    real = weight.detach().float() - before
    moving = intended != 0
    assert update.moving <= 64 * 1024 == SAMPLE
    assert update.lost_share == pytest.approx(float(((real == 0) & moving).sum() / moving.sum()), abs=1e-4)
    assert update.edq == pytest.approx(float((intended * real).sum() / (intended**2).sum()), rel=1e-4)


def test_stochastic_rounding_loses_single_updates_and_is_right_on_average() -> None:
    training = Training("bf16_sr")
    found = [training.measured() for _ in range(20)]
    edq = [each["norm.weight"].edq for each in found]
    assert max(each["norm.weight"].lost_share for each in found) > 0.9
    assert max(edq) - min(edq) > 0.1
    assert sum(edq) / len(edq) == pytest.approx(1, abs=0.3)  # of 64 elements; of the many of the head:
    assert sum(each["head.weight"].edq for each in found) / len(found) == pytest.approx(1, abs=0.01)
    assert training.meter.stochastic


@pytest.mark.parametrize("mode", ["fp16", "fp16_pure", "fp16_master"])
def test_a_skipped_step_is_not_measured(mode: str) -> None:
    training = Training(mode, scale=1024.0)
    training.measured()
    training.update.meter = training.meter
    assert training.step(loss_times=math.inf)
    assert training.meter.results() == {}
    assert set(training.measured()) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("mode", "state"),
    [*((mode, "auto") for mode in ("fp16", "fp16_pure", "bf16_sr", "bf16_master")), ("fp16", "bf16")],
)
def test_measured_steps_train_the_same_to_the_last_bit(mode: str, state: str) -> None:
    scale = 2.0**16 if "fp16" in mode else None
    plain, metered = (Training(mode, scale=scale, clip=ClipNorm(0.5), state=state) for _ in range(2))
    random = torch.get_rng_state()
    metered.update.meter = metered.meter
    for number in range(4):
        times = math.inf if number == 2 and "fp16" in mode else 1.0
        skipped = plain.step(times)
        assert metered.step(times) == skipped
    assert same_bits(random, torch.get_rng_state())
    for one, other in ((plain.net, metered.net), (plain.optimizer, metered.optimizer)):
        assert same_bits(one.state_dict(), other.state_dict())


def test_optimizers_that_mix_elements_are_refused() -> None:
    for name in ("Muon", "Lamb"):
        with pytest.raises(UserError, match=f"diagnostics=numerics cannot measure optimizer.name={name}"):
            Numerics().check(Optimizer(name))
    with pytest.raises(UserError, match="diagnostics=none"):
        Config(SmallConvNet(), NoData(), diagnostics=Numerics(), optimizer=Optimizer("Adafactor"))


def session(training: Training, every: int, steps: int) -> dict[int, dict[str, float]]:
    """What a session of so many steps logs."""
    diagnostics = Numerics(every).start(training.net, training.update, torch.bfloat16, World())
    logged = {}
    for step in range(1, steps + 1):
        diagnostics.begin(step)
        training.step()
        logged |= dict(diagnostics.collect())
    return logged


def test_warnings_name_the_parameters_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mantissa"):
        session(Training("bf16_pure"), 1, 3)
        logged = session(Training("bf16_sr", lr=1e-6), 2, 4)
    (record,) = caplog.records  # of the first alone
    assert all(words in record.getMessage() for words in ("step 1", "norm.weight", "precision=bf16_master"))
    assert list(logged) == [2, 4]
    assert not any("numerics/lost_updates" in name for metrics in logged.values() for name in metrics)


def run(folder: Path, log_every: int) -> dict[int, dict[str, float]]:
    options = ("precision=fp16", "scaler.init=0.01", "diagnostics=numerics", "diagnostics.every=3", "steps=10")
    own = (
        "profiler=none",
        "checkpoint=none",
        "tracking=local",
        f"log_every={log_every}",
        f"output_dir={folder}",
        "run_name=run",
    )
    train(compose(*BIGNET, *options, *own, "device=cpu"))
    found: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        if numbers := {key: value for key, value in line.items() if key.startswith("numerics/")}:
            assert line["step"] not in found
            found[line["step"]] = numbers
    return found


def test_a_run_logs_every_measured_step_whatever_the_log_interval(tmp_path: Path) -> None:
    first, other = (run(tmp_path / str(every), every) for every in (1, 4))
    assert list(first) == [3, 6, 9]
    assert other == first
    assert 0 < max(metrics["numerics/grad_flushed"] for metrics in first.values()) < 1
    names = {f"numerics/{name}" for name in ("edq", "lost_updates", "grad_flushed", "scale_headroom_bits")}
    for metrics in first.values():
        assert metrics.keys() == names
        assert metrics["numerics/lost_updates"] == 0
        assert metrics["numerics/edq"] == pytest.approx(1, abs=1e-3)
        assert 16 < metrics["numerics/scale_headroom_bits"] < 32
