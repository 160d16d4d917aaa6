from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import CPU, NoData, SmallConvNet, fit, start, trainer_of
from trainer.config.schema import Config
from trainer.data.contract import Batch
from trainer.files import remembered
from trainer.kernels import convolution
from trainer.kernels.convolution import _sees_only_padding, compute_in_fp32, unreliable, warning, written_whole
from trainer.optim.optimizer import Optimizer
from trainer.parallel.activation import ActivationCheckpointing
from trainer.precision.modes import Precision
from trainer.precision.scaler import AutoScaler
from trainer.recipe import LossOutput


class TwoDamaged(SmallConvNet):
    """Its second and third convolution see images of 2 × 2 and 1 × 1, beside whose border some taps lie."""

    def build_model(self, datasets: Any) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=6, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.Sequential(nn.Conv2d(8, 8, 7, padding=3), nn.ReLU()),
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 8, 1),
            nn.Flatten(),
            nn.Linear(8, 5),
        )
        return model.to(memory_format=torch.channels_last)

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model[2]]

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        logits = model(batch["image"].to(memory_format=torch.channels_last))
        return LossOutput(F.cross_entropy(logits.float(), batch["label"], reduction="sum"), {})


DAMAGED = ["2.0", "4"]
true_gradient = convolution.weight_gradient


def written(layer: Any, x: Tensor, upstream: Tensor) -> Tensor:
    """As a CPU without the defect computes it."""
    return true_gradient(copy.deepcopy(layer).float(), x.float(), upstream.float()).to(layer.weight.dtype)


def unwritten(layer: Any, x: Tensor, upstream: Tensor) -> Tensor:
    """oneDNN's defect: in 16 bits, what no pixel reaches is not written."""
    if layer.weight.dtype == torch.float32:
        return true_gradient(layer, x, upstream)
    memory = torch.empty_like(layer.weight)  # before anything here is freed whose numbers would do
    gradient = true_gradient(layer, x, upstream)
    wide = copy.deepcopy(layer).float()
    ones = true_gradient(wide, torch.ones_like(x).float(), torch.ones_like(upstream).float())
    return memory.copy_(torch.where(ones == 0, memory, gradient))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, ...]]:
    """This CPU made one that has the defect; the shapes that are tried."""
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(convolution, "computed_by_onednn", lambda dtype: True)
    monkeypatch.setattr(convolution, "weight_gradient", unwritten)
    tried: list[tuple[int, ...]] = []

    def counted(layer: Any, shape: tuple[int, ...], *rest: Any) -> bool:
        tried.append(shape)
        return written_whole(layer, shape, *rest)

    monkeypatch.setattr(convolution, "written_whole", counted)
    return tried


def config(mode: str, **options: Any) -> Config:
    optimizer = Optimizer("SGD", lr=0.1, options={"momentum": 0.9})
    return Config(
        TwoDamaged(),
        NoData(),
        precision=Precision(mode),
        scaler=AutoScaler(),
        optimizer=optimizer,
        device="cpu",
        steps=2,
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), 1),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4), 1),
        (nn.Conv2d(4, 6, 7, padding=3, bias=False), 2),
        (nn.Conv2d(4, 6, 3, padding="same"), 1),
    ],
    ids=repr,
)
def test_a_partly_unwritten_gradient_is_found(
    layer: nn.Conv2d, size: int, channels_last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (3, 4, size, size)
    before, generator = layer.weight.detach().clone(), torch.get_rng_state()
    monkeypatch.setattr(convolution, "weight_gradient", written)  # this CPU may have the defect
    assert written_whole(layer, shape, channels_last, dtype)
    monkeypatch.setattr(convolution, "weight_gradient", unwritten)
    assert not written_whole(layer, shape, channels_last, dtype)
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), generator)


def test_which_layers_have_taps_that_see_only_padding() -> None:
    """Those whose gradient is 0 though every pixel and every result has a share in it."""
    kernels = [(3, 1, 1), (3, 2, 1), (5, 1, 1), (7, 1, 1), (3, 1, 2)]
    answers = []
    for size, (kernel, stride, dilation), padding in product([1, 2, 3, 5, 8], kernels, [0, 1, 3, "same", "valid"]):
        border = padding if isinstance(padding, int) else dilation * (kernel - 1) // 2 * (padding == "same")
        if (padding == "same" and stride > 1) or size + 2 * border < dilation * (kernel - 1) + 1:
            continue  # torch has no such layer
        layer = nn.Conv2d(1, 1, kernel, stride, padding, dilation, bias=False)
        (gradient,) = torch.autograd.grad(layer(torch.ones(1, 1, size, size)).sum(), layer.weight)
        answers.append(_sees_only_padding(layer, (1, 1, size, size)))
        assert answers[-1] == bool((gradient == 0).any()), (layer, size)
    assert len(answers) > 60
    assert set(answers) == {False, True}


def test_a_runs_layers_are_found_by_their_shapes_named_and_remembered(calls: list[Any]) -> None:
    trainer = start(config("bf16"))
    assert trainer.conv_in_fp32 == DAMAGED
    assert calls == [(8, 3, 12, 12), (8, 8, 2, 2), (8, 8, 1, 1), (8, 8, 1, 1)]
    assert start(config("bf16")).conv_in_fp32 == DAMAGED
    assert len(calls) == 4  # of this machine it is known now
    assert start(config("fp16", batch_size=4, micro_batch_size=4)).conv_in_fp32 == DAMAGED
    assert calls[4:] == [(4, *shape[1:]) for shape in calls[:4]]
    sentence = warning(trainer.conv_in_fp32, Path("none"))
    assert sentence
    assert sentence.endswith("docs/onednn-conv-gradients.md): 2.0, 4")
    assert warning([], Path("none")) is None


def test_layers_that_the_user_took_out_are_left_to_precision_fp32_modules(calls: list[Any]) -> None:
    taken = config("bf16")
    taken = replace(taken, precision=Precision("bf16", fp32_modules=["2"]))
    assert start(taken).conv_in_fp32 == ["4"]


def test_nothing_is_tried_in_fp32_or_where_onednn_has_no_part(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(config("fp32")).conv_in_fp32 == []
    monkeypatch.setattr(convolution, "computed_by_onednn", lambda dtype: False)
    assert start(config("bf16")).conv_in_fp32 == []
    assert calls == []


def test_the_search_leaves_no_trace_in_the_model_and_the_generators(calls: list[Any]) -> None:
    torch.manual_seed(0)
    model = TwoDamaged().build_model(None).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()

    def forward() -> None:
        model(torch.ones(2, 3, 12, 12).to(memory_format=torch.channels_last))

    assert unreliable(model, forward, torch.bfloat16, CPU) == DAMAGED
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("mode", ["bf16", "fp16", "bf16_master", "bf16_pure"])
def test_such_a_layer_has_the_gradients_of_fp32_and_results_in_the_runs_format(mode: str, calls: list[Any]) -> None:
    trainer = start(config(mode))
    layer, dtype = trainer.model[4], torch.float16 if mode == "fp16" else torch.bfloat16
    assert layer.weight.dtype == (torch.float32 if mode in ("bf16", "fp16") else dtype)
    x = torch.randn(8, 8, 1, 1)
    results = []
    for exact in (False, True):
        own = x.to(dtype).requires_grad_()
        weight = layer.weight
        if exact:
            plain = nn.Conv2d(8, 8, 3, stride=2, padding=1)
            plain.load_state_dict({name: tensor.float() for name, tensor in layer.state_dict().items()})
            weight, output = plain.weight, plain(own.float()).to(dtype)
        else:
            with trainer.config.precision.autocast(trainer.device):
                output = layer(own)
        of_weight, of_input = torch.autograd.grad(output, (weight, own), torch.ones_like(output))
        results.append([output, of_input, of_weight.to(layer.weight.dtype)])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert results[0][0].dtype == dtype


@pytest.mark.parametrize("recomputed", ["none", "blocks"])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_trains_compiled_and_recomputed(recomputed: str, compiled: bool, calls: list[Any]) -> None:
    trainer = start(config("bf16", activation_checkpointing=ActivationCheckpointing(recomputed)))
    assert trainer.conv_in_fp32 == DAMAGED
    if compiled:
        trainer.model.compile(backend="aot_eager")
    computed: list[torch.dtype] = []
    convolve = F.conv2d

    def noted(input: Tensor, *rest: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            computed.append(input.dtype if not torch.is_autocast_enabled("cpu") else torch.bfloat16)
        return convolve(input, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "conv2d", noted)
        records = fit(trainer)
    assert all(math.isfinite(record.grad_norm.item()) for record in records)
    if not compiled:
        expected = [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
        again = [torch.float32] * (recomputed == "blocks")
        assert computed == (expected + again) * 2


def test_compute_in_fp32_alone_changes_no_weight_and_no_name() -> None:
    model = TwoDamaged().build_model(None)
    names = list(model.state_dict())
    compute_in_fp32(model, DAMAGED, torch.bfloat16)
    assert list(model.state_dict()) == names


def test_a_cached_result_is_computed_once_per_condition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    asked: list[int] = []

    def work() -> int:
        asked.append(1)
        return len(asked)

    assert [remembered("x", {"a": 1, "b": (2,)}, work) for _ in range(3)] == [1, 1, 1]
    assert remembered("x", {"a": 2, "b": (2,)}, work) == 2
    assert remembered("y", {"a": 1, "b": (2,)}, work) == 3
    for path in (tmp_path / "cache" / "x").iterdir():
        path.write_text("{")  # damaged: found again
    assert remembered("x", {"a": 1, "b": (2,)}, work) == 4
    monkeypatch.setenv("MANTISSA_CACHE", "/proc/nowhere")
    assert [remembered("x", {"a": 1}, work) for _ in range(2)] == [5, 6]


def test_resnet_on_images_of_sixteen_pixels_repeats_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last block sees 1 × 1. Where oneDNN computes bf16 (avx512_bf16) this met the defect itself."""
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    norms = []
    for _ in range(3):
        trainer = trainer_of(
            *("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=16", "precision=bf16", "deterministic=true"),
            *("optimizer=sgd", "optimizer.lr=0.02", "batch_size=2", "steps=1"),
        )
        records = fit(trainer)
        norms.append([record.grad_norm.item() for record in records])
    torch.use_deterministic_algorithms(False)
    assert norms[0] == norms[1] == norms[2]
    assert all(map(math.isfinite, norms[0]))


def test_a_resumed_run_reports_if_other_convolutions_compute_in_fp32(tmp_path: Path) -> None:
    before = tmp_path / "precision.json"
    before.write_text(json.dumps({"effective": {"conv_in_fp32": ["conv1"]}}))
    assert "convolutions in fp32 were conv1 and are now none" in str(warning([], before))
    assert "compute in fp32, because" in str(warning(["conv1"], before))
    before.write_text(json.dumps({"effective": {}}))  # of a version that did not look
    assert warning([], before) is None
