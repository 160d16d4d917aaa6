"""precision=fp8: what is refused, what is converted, and, where torchao is installed, that it trains."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import fit, trainer_of
from trainer.errors import UserError
from trainer.hardware import Hardware
from trainer.precision import fp8, modes
from trainer.precision.manifest import dtypes_in_use
from trainer.precision.modes import SCALINGS, Precision

CPU = torch.device("cpu")
PLAIN_CPU = Hardware(CPU, "plain CPU", 2**34, 2)
LLAMA = (
    *("recipe=llama", "recipe.layers=1", "recipe.context=16", "data=synthetic", "data.vocab_size=90"),
    *("steps=3", "batch_size=4", "micro_batch_size=2"),
)


def gpu(*capability: int) -> Hardware:
    return Hardware(torch.device("cuda", 0), "GPU", 2**36, 8, capability)


def test_hardware_without_fp8_is_refused() -> None:
    for hardware in (PLAIN_CPU, gpu(8, 0), gpu(8, 6)):
        with pytest.raises(UserError, match=r"precision=fp8 is not available.*8.9 or later.*precision=bf16"):
            Precision("fp8").check(hardware)
    assert gpu(8, 9).support("fp8") == gpu(9, 0).support("fp8") == "native"


def test_a_missing_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs torchao, which is not installed; pip install torchao"):
        Precision("fp8").check(gpu(9, 0))
    monkeypatch.setattr(modes, "find_spec", lambda name: name)
    Precision("fp8").check(gpu(9, 0))


def test_plain_linear_layers_whose_sides_divide_by_16_outside_islands() -> None:
    class Derived(nn.Linear):
        pass

    island = nn.ModuleDict({"inside": nn.Linear(16, 16)})
    layers = {"good": nn.Linear(32, 48), "wide": nn.Linear(32, 20), "narrow": nn.Linear(8, 32)}
    model = nn.ModuleDict({**layers, "derived": Derived(16, 16), "island": island})
    assert fp8.convertible(model, []) == ["good", "island.inside"]
    assert fp8.convertible(model, ["island"]) == ["good"]
    assert fp8.convertible(nn.Linear(16, 16), []) == []


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_scaling_that_is_asked_for_reaches_torchao(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Options:
        recipe: str
        emulate: bool = False

    seen = []

    def convert(model: nn.Module, *, config: Options, module_filter_fn: Any) -> None:
        seen.append((config, [name for name, module in model.named_modules() if module_filter_fn(module, name)]))

    library = SimpleNamespace(
        Float8LinearConfig=SimpleNamespace(from_recipe_name=Options), convert_to_float8_training=convert
    )
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=library))
    monkeypatch.setitem(sys.modules, "torchao.float8", library)
    fp8.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10)), [], scaling)
    assert seen == [(Options(scaling), ["0"])]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_llama_trains_with_emulated_products(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.float8", reason="torchao is optional")
    convert = fp8.convert
    monkeypatch.setattr(Precision, "check", lambda self, hardware: None)
    monkeypatch.setattr(fp8, "convert", lambda model, kept, _: convert(model, kept, scaling, emulate=True))
    losses = []
    for mode in ("precision=bf16", "precision=fp8 precision.fp32_modules=['*.v_proj']"):
        trainer = trainer_of(*LLAMA, *mode.split())
        losses.append(torch.stack([record.loss for record in fit(trainer)]))
    names = dtypes_in_use(trainer.model, trainer.optimizer)["fp8_modules"]
    assert len(names) == 6  # of seven: v_proj is an island, and the output layer has the loss in it
    assert all("_proj" in name for name in names)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert torch.allclose(losses[0], losses[1], rtol=0.02)
    assert not torch.equal(losses[0], losses[1])


def test_what_has_no_such_layer_or_rows_is_refused() -> None:
    pytest.importorskip("torchao.float8", reason="torchao is optional")
    with pytest.raises(UserError, match=r"no plain nn.Linear whose dimensions are multiples of 16.*recipe=llama"):
        fp8.convert(nn.Sequential(nn.Linear(10, 10)), [], "tensorwise", emulate=True)
    model = nn.Sequential(nn.Linear(32, 32))
    fp8.convert(model, [], "tensorwise", emulate=True)
    with pytest.raises(UserError, match=r"gets 6 rows.*multiple of 16; use another micro_batch_size"):
        model(torch.ones(2, 3, 32))
    assert model.eval()(torch.ones(2, 3, 32)).shape == (2, 3, 32)
