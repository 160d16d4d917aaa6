from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from mantissa.formats import FORMATS
from tests.helpers import trainer_of
from trainer.errors import UserError
from trainer.optim.groups import decayed
from trainer.optim.masters import MasterWeights, masters_of
from trainer.optim.muon import Muon
from trainer.optim.optimizer import TRAITS, Optimizer, Traits, fused_is_sound, optimizer_class
from trainer.optim.update import Clip, Update
from trainer.precision.scaler import LossScale

CPU = torch.device("cpu")


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4), nn.LayerNorm(4))


def test_a_vector_is_not_decayed_whatever_its_name() -> None:
    """A PReLU's slopes are called weight, and it is no norm."""
    assert decayed(nn.Sequential(nn.Linear(2, 3), nn.PReLU(3))) == {"0.weight"}


@pytest.mark.parametrize(
    ("arch", "left"),
    [
        ("convnext_tiny", {"layer_scale"}),
        ("vit_b_16", {"class_token", "pos_embedding"}),
        ("swin_v2_t", {"logit_scale"}),
        ("maxvit_t", {"relative_position_bias_table"}),
        ("resnet18", set()),
    ],
)
def test_parameters_of_two_dimensions_that_are_no_weights_are_not_decayed(arch: str, left: set[str]) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(arch, weights=None)
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    weights = decayed(model)
    assert weights <= matrices
    assert {name.rpartition(".")[2] for name in matrices - weights} == left
    assert {name.rpartition(".")[2] for name in weights} <= {"weight", "in_proj_weight"}


@pytest.mark.parametrize("recipe", ["gpt2", "llama", "bert", "t5"])
def test_language_models_have_the_groups_that_their_checkpoints_have(recipe: str) -> None:
    model = trainer_of(f"recipe={recipe}", "recipe.size=nano", "data=synthetic", "data.vocab_size=90").model
    named = dict(model.named_parameters())
    assert decayed(model) & named.keys() == {name for name, parameter in named.items() if parameter.ndim >= 2}


class Unusual(nn.Module):
    """Parameters of its own, and a norm over two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.ones(3, 3))
        self.Bias = nn.Parameter(torch.ones(1, 3, 1))
        self.cls_token = nn.Parameter(torch.ones(1, 1, 3))
        self.norm = nn.LayerNorm((3, 3))
        self.gru = nn.GRU(3, 3)


@pytest.mark.parametrize("mode", ["fp32", "bf16_master"])
def test_a_models_own_parameters_are_judged_by_role_also_through_masters(mode: str) -> None:
    model = Unusual().to(torch.bfloat16 if mode == "bf16_master" else torch.float32)
    masters = masters_of(FORMATS[mode], model, 0)
    optimizer = Optimizer("AdamW", weight_decay=0.1).build(masters or model, CPU)
    chosen = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    found = [name for name, parameter in (masters or model).named_parameters() if id(parameter) in chosen]
    assert found == ["mixing", "gru.weight_ih_l0", "gru.weight_hh_l0"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_what_the_class_refuses_is_reported() -> None:
    with pytest.raises(UserError, match=r"torch.optim.AdamW refuses optimizer.options="):
        Optimizer("AdamW", options={"betas": [1.5, 0.9]}).build(net(), CPU)
    with pytest.raises(UserError, match=r"optimizer.name=Muon .* names no repeated blocks; set optimizer=a"):
        Optimizer("Muon").build(net(), CPU)


def test_a_class_of_torch_may_have_its_whole_name_and_is_not_the_one_of_that_name_elsewhere() -> None:
    assert Optimizer("torch.optim.AdamW").traits is TRAITS["AdamW"]
    assert Optimizer("torch.optim.Muon").traits == Traits()


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "Muon"])
def test_the_fused_form_is_taken_where_torch_has_its_kernel(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch registers them for each kind of device alone; of Adagrad some versions have CPU's only."""
    registered = {("aten::_fused_adamw_", "CUDA"), ("aten::_fused_adamw_", "MPS"), ("aten::_fused_adagrad_", "CPU")}
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *found: found in registered)
    optimizer, parameters = Optimizer(name), list(net().parameters())
    taken = optimizer._takes_fused(optimizer_class(name), parameters, torch.device(kind))
    assert taken is (name != "Adagrad" and kind != "xpu")


class Unscaled(torch.optim.AdamW):
    """As torch's fused kernels on MPS were: they ignored the scale without a word."""

    def step(self) -> None:
        self.grad_scale = None
        super().step()


def test_a_kernel_that_ignores_the_scale_is_found_by_its_trial_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_is_sound(torch.optim.AdamW, torch.bfloat16, "cpu")
    assert not fused_is_sound(Unscaled, torch.bfloat16, "cpu")
    tried: list[str] = []
    monkeypatch.setattr("trainer.optim.optimizer.has_fused_kernel", lambda cls, device: True)
    monkeypatch.setattr("trainer.optim.optimizer.fused_is_sound", lambda cls, dtype, device: tried.append(device))
    halves = list(net().to(torch.bfloat16).parameters())
    taken = {kind: Optimizer()._takes_fused(torch.optim.AdamW, halves, torch.device(kind)) for kind in ("cuda", "mps")}
    assert (taken, tried) == ({"cuda": True, "mps": False}, ["mps"])


def test_fused_sgd_starts_with_a_momentum_that_a_skipped_first_step_leaves_at_zero() -> None:
    """Torch's own first fused step allocates the buffers and, given found_inf, never writes them."""
    model = nn.Linear(4, 4)
    reference = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = Optimizer("SGD", lr=0.1, options={"momentum": 0.9}).build(model, CPU)
    plain = torch.optim.SGD(reference, 0.1, 0.9)
    optimizer.grad_scale = None
    for skipped in (1.0, 0.0, 0.0, 0.0):
        optimizer.found_inf = torch.tensor(skipped)
        for parameter in (*model.parameters(), *reference):
            parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()
        if not skipped:
            plain.step()
    torch.testing.assert_close(list(model.parameters()), reference)
    torch.testing.assert_close(optimizer.state_dict()["state"], plain.state_dict()["state"])


def test_sgd_with_dampening_is_not_fused() -> None:
    """Its first momentum is the whole gradient, which a buffer that starts at zero would dampen."""
    options = {"momentum": 0.9, "dampening": 0.1}
    assert not Optimizer("SGD", options=options).build(net(), CPU).defaults["fused"]


def moves_all(name: str) -> bool:
    """Return whether torch's own fused form takes a loss scale, and changes each of 100 fp16 weights on a CPU."""
    weight = nn.Parameter(torch.ones(100, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 0.5)
    optimizer = optimizer_class(name)([weight], lr=0.125, fused=True)  # type: ignore[call-arg]
    optimizer.step()
    return getattr(optimizer, "_step_supports_amp_scaling", False) and bool((weight < 1).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {"eps": 1e-4}), ("AdamW", {})]
)
def test_16_bit_weights_take_the_steps_of_fp32_ones(name: str, options: dict[str, float], dtype: torch.dtype) -> None:
    """Whatever form of the optimizer is chosen here: torch 2.11's fused SGD leaves 96 of these 100 alone."""
    weights = [torch.ones(100, dtype=kind) for kind in (torch.float32, dtype)]
    for weight in weights:
        model = nn.ParameterList([weight])
        if weight.dtype == torch.float16 and not moves_all(name):
            with pytest.raises(UserError, match="gets fp16 gradients without the loss scale"):
                Optimizer(name, lr=0.125, options=options).build(model, CPU)
            return
        optimizer = Optimizer(name, lr=0.125, options=options).build(model, CPU)
        for _ in range(3):
            model[0].grad = torch.full_like(weight, 0.5)
            optimizer.step()
    assert torch.allclose(weights[0], weights[1].float(), rtol=0.03)
    assert (weights[1] < 0.9).all()


@pytest.mark.parametrize(("name", "fused"), [("AdamW", False), ("SGD", False), ("RMSprop", True), ("Lion", True)])
def test_what_computes_in_fp16_is_refused_for_small_gradients_would_be_lost(name: str, fused: bool) -> None:
    """Every optimizer that is allowed moves a weight by a true gradient of 2^-26, which is 0 in fp16."""
    optimizer, half = Optimizer(name, lr=2.0**10, fused=fused, options={}), net().to(torch.float16)
    fused_helps = not fused and fused_is_sound(optimizer_class(name), torch.float16, "cpu")
    words = [] if fused_helps else ["optimizer=adamw optimizer.name=AdamW"]
    remedy = " ".join(words if fused else [*words, r"optimizer\.fused=true"])
    with pytest.raises(UserError, match=f"set {remedy} or precision=fp16_master"):
        optimizer.build(half, CPU)
    optimizer.build(net().to(torch.bfloat16), CPU)  # which has the exponents of fp32
    masters = MasterWeights(half)
    update = Update(optimizer.build(masters, CPU), masters.parameters(), LossScale(CPU, 2.0**20), Clip(), masters)
    for weight in half.parameters():
        weight.data.zero_()
        weight.grad = torch.full_like(weight, 2.0**-6)
    update.step()
    assert all((weight != 0).all() for weight in half.parameters())


def test_muon_is_refused_in_fp16_also_where_its_step_takes_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it rounds the unscaled gradients of matrices to fp16 again."""
    monkeypatch.setattr(Muon, "_step_supports_amp_scaling", True)
    model = net()
    with pytest.raises(UserError, match="set optimizer=adamw"):
        Optimizer("Muon").build(model.to(torch.float16), CPU, [model])
    Optimizer("Muon").build(model.to(torch.bfloat16), CPU, [model])
