"""What ``precision=auto`` is on a device: the run is named, checked, recorded and continued by that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers import CPU, GPT2, GPU
from trainer import hardware
from trainer.config import build
from trainer.config.command_line import read
from trainer.config.compose import compose, composed
from trainer.config.registration import flatten
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.run.sweep import Sweep

T4 = replace(GPU, name="T4", capability=(7, 5))
B200 = replace(GPU, name="B200", capability=(10, 0))
AMD = replace(GPU, name="an AMD GPU", capability=None)
ON = [(CPU, "fp32"), (AMD, "fp32"), (T4, "fp16"), (GPU, "bf16"), (B200, "bf16")]


@pytest.fixture(autouse=True)
def here(device: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda name: device)
    monkeypatch.setattr(torch.version, "hip", "7.0" if device is AMD else None)


on_each = pytest.mark.parametrize(("device", "mode"), ON, ids=[device.name for device, _ in ON])


@on_each
@pytest.mark.parametrize("typed", ["precision=auto", "precision.mode=auto"])
def test_a_run_has_the_name_and_the_record_of_what_auto_is(device: Hardware, mode: str, typed: str) -> None:
    config = compose([*GPT2, typed])
    plan = plan_of(config, device)
    assert (config.name, flatten(plan.config)["precision.mode"]) == (f"gpt2-{mode}-s0", mode)
    ((value, why),) = [(each.value, each.why) for each in plan.decisions if each.key == "precision"]
    assert value == mode
    assert why


@on_each
def test_the_runs_of_a_sweep_have_its_name_too(device: Hardware, mode: str) -> None:
    sweep = Sweep(read(["-m", *GPT2, "precision=fp32,auto", "seed=0,1"]))
    for typed, name in (([], f"gpt2-{mode}-s1"), (["run_name=mine"], f"mine-{mode}-seed_1")):
        run = [*GPT2, *typed, "precision=auto", "seed=1"]
        assert sweep.set_name(composed(run), run) == (name, {"precision": mode, "seed": "1"})


@on_each
@pytest.mark.parametrize("option", ["precision.modules={lm_head:fp32}", "precision.fp32_ops=[softmax]"])
def test_options_of_16_bits_are_refused_where_auto_is_fp32(device: Hardware, mode: str, option: str) -> None:
    if mode != "fp32":
        assert compose([*GPT2, "precision=auto", option]).precision.mode == mode
        return
    with pytest.raises(UserError, match="has no effect: precision=fp32 has"):
        compose([*GPT2, "precision=auto", option])


@on_each
def test_a_loss_scale_is_for_what_auto_is(device: Hardware, mode: str) -> None:
    config = compose([*GPT2, "precision=auto"])
    assert config.scaler.build(config.precision.format, torch.device("cpu")).recovers == (mode == "fp16")
    if mode == "fp16":
        assert compose([*GPT2, "precision=auto", "scaler=static"]).precision.mode == mode
        return
    with pytest.raises(UserError, match=f"scaler=static with precision={mode}"):
        compose([*GPT2, "precision=auto", "scaler=static"])


@pytest.mark.parametrize("device", [CPU], ids=["a CPU"])
def test_a_run_that_is_continued_elsewhere_keeps_its_precision(device: Hardware) -> None:
    """That of a GPU, with options that only 16 bits have."""
    record = flatten(compose([*GPT2, "precision=bf16"])) | {"resume": "outputs/run"}
    run = composed([*GPT2, "precision=auto", "precision.modules={lm_head:fp32}"])
    continued = build.build(run, ["precision=auto", "precision.modules={lm_head:fp32}"], record)
    assert flatten(plan_of(continued, device, recorded=record).config)["precision.mode"] == "bf16"


@pytest.mark.parametrize(("device", "mode"), [(CPU, "fp32"), (GPU, "bf16")], ids=["a CPU", "a GPU"])
@pytest.mark.parametrize("experiment", ["gpt2_124m", "resnet50_imagenet", "resnet50_a3"])
def test_the_experiments_that_are_meant_for_gpus_have_it(device: Hardware, mode: str, experiment: str) -> None:
    path = ["data.path=."] if experiment != "gpt2_124m" else []
    config = compose([f"experiment={experiment}", *path, *["optimizer=sgd"] * (experiment == "resnet50_a3")])
    assert config.precision.mode == mode
