"""The optimizers that are no class of torch.optim alone: Muon beside AdamW, and those of other libraries."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.helpers import GPT2, Operators, fit, same_bits, trainer_of
from trainer.errors import UserError
from trainer.optim import muon as muon_module
from trainer.optim.muon import Muon
from trainer.optim.optimizer import Optimizer

Groups = tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]
"""Hidden matrices, other decayed parameters, the rest."""


def muon(groups: Groups) -> list[torch.optim.Optimizer]:
    hidden, decayed, others = groups
    rest = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), fused=True),
    ]


def of_timm(name: str, weight_decay: float, lr: float) -> Callable[[Groups], list[torch.optim.Optimizer]]:
    def make(groups: Groups) -> list[torch.optim.Optimizer]:
        hidden, decayed, others = groups
        options = [{"params": decayed + hidden, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [getattr(pytest.importorskip("timm.optim"), name)(options, lr=lr)]

    return make


REFERENCES: dict[str, Callable[[Groups], list[torch.optim.Optimizer]]] = {
    "muon": muon,
    "adafactor": lambda groups: [torch.optim.Adafactor(itertools.chain(*groups), lr=1e-2)],
    "lion": of_timm("Lion", 1.0, 1e-4),
    "lamb": of_timm("Lamb", 0.02, 5e-3),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_three_steps_are_those_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of its YAML, bit for bit."""
    monkeypatch.setattr(muon_module, "bf16_is_emulated", lambda: False)
    trainer = trainer_of(*GPT2, f"optimizer={name}", "schedule=constant", "schedule.warmup_steps=0", "clip=none")
    bare = copy.deepcopy(trainer.model)
    blocks = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    groups: Groups = ([], [], [])
    for own, parameter in bare.named_parameters():
        groups[0 if own.endswith(blocks) else 1 if parameter.ndim == 2 else 2].append(parameter)
    assert [len(group) for group in groups] == [16, 2, 34]
    reference = REFERENCES[name](groups)
    batches = trainer.batches()
    for _ in range(3):
        _, correction, _ = trainer.gradients(next(batches))
        for parameter, own in zip(bare.parameters(), trainer.model.parameters(), strict=True):
            parameter.grad = own.grad.clone()
        trainer.update.step(trainer.step, correction)
        for optimizer in reference:
            optimizer.step()
    assert same_bits(trainer.model.state_dict(), bare.state_dict())


@pytest.mark.parametrize(
    ("recipe", "found", "left"),
    [
        (GPT2, {"h.0.attn.c_attn.weight", "h.3.mlp.c_proj.weight"}, {"wte.weight", "wpe.weight", "h.0.ln_1.weight"}),
        (
            ("recipe=t5", "recipe.size=nano", "data=synthetic", "data.vocab_size=90"),
            {"encoder.block.0.layer.0.SelfAttention.q.weight"},
            {"shared.weight", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"},
        ),
    ],
    ids=["gpt2", "t5"],
)
def test_muon_takes_the_matrices_of_the_blocks(recipe: tuple[str, ...], found: set[str], left: set[str]) -> None:
    trainer = trainer_of(*recipe, "optimizer=muon")
    fit(trainer, 1)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    taken: dict[bool, set[str]] = {True: set(), False: set()}
    for group in trainer.optimizer.param_groups:
        taken[group["muon"]] |= {names[id(parameter)] for parameter in group["params"]}
        keys = {"momentum_buffer"} if group["muon"] else {"step", "exp_avg", "exp_avg_sq"}
        assert all(trainer.optimizer.state[parameter].keys() == keys for parameter in group["params"])
    for muon, ends in ((True, found), (False, left)):
        assert all(any(name.endswith(end) for name in taken[muon]) for end in ends)
        assert not any(name.endswith(tuple(ends)) for name in taken[not muon])
    assert taken[True] | taken[False] == set(names.values())


@pytest.mark.parametrize(("emulated", "least", "most"), [(True, 0.0, 1e-5), (False, 1e-3, 0.1)])
def test_muon_iterates_in_fp32_where_the_cpu_emulates_bf16(
    emulated: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_module, "bf16_is_emulated", lambda: emulated)
    gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    exact = gradient.double() / gradient.double().norm()
    for _ in range(5):
        square = exact @ exact.T
        exact = 3.4445 * exact + (-4.775 * square + 2.0315 * square @ square) @ exact
    weight = nn.Parameter(torch.zeros(24, 40))
    weight.grad = gradient.clone()
    Muon([{"params": [weight], "muon": True}], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="original").step()
    update = -weight.detach().double()  # "original" leaves a matrix with more columns than rows as it is
    assert least <= ((update - exact).norm() / exact.norm()).item() < most
    assert torch.equal(weight.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_a_flag_muon_stacks_equal_shapes_to_the_same_bits_and_waits_for_nothing(dtype: torch.dtype) -> None:
    """As on a GPU, where the update hands over the flag, and the scale of 16-bit gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (24, 24)] * 6 + [(24,)]
    steps = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(3)]
    results = []
    for flagged in (True, False):
        weights = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        groups = [{"params": weights[:-1], "muon": True}, {"params": weights[-1:], "muon": False}]
        optimizer = Muon(groups, lr=0.1, fused=True)
        assert not optimizer._step_supports_amp_scaling  # on a CPU, where the host reads flags for nothing
        for number, gradients in enumerate(steps):
            bad = number == 1
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient * torch.inf if bad else gradient * 4 if flagged else gradient.clone()
            optimizer.found_inf, optimizer.grad_scale = None, None  # type: ignore[attr-defined]
            if flagged:
                optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(bad)), torch.tensor(4.0)  # type: ignore[attr-defined]
            with Operators() as seen:
                if flagged or not bad:
                    optimizer.step()
        results.append((seen.count, weights, [optimizer.state[weight] for weight in weights]))
    (stacked, *flagged_state), (one_by_one, *state) = results
    assert same_bits(flagged_state, state)
    assert stacked.keys().isdisjoint({"_local_scalar_dense", "item", "nonzero"})
    assert stacked.total() < one_by_one.total() / 3, (stacked, one_by_one)


@pytest.mark.parametrize(
    "adjusted",
    [
        "original",
        "match_rms_adamw",
        *["spectral_unclamped"] * ("spectral_unclamped" in inspect.getsource(torch.optim._muon)),  # not in torch 2.11
    ],
)
def test_muon_takes_the_sides_of_conv1d_as_those_of_a_linear_layer(
    adjusted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's matrices are inputs × outputs: torch's Muon of their transposes has the right rates."""
    monkeypatch.setattr(muon_module, "bf16_is_emulated", lambda: True)  # exact enough to compare
    options = (f"optimizer.options.adjust_lr_fn={adjusted}", "optimizer.lr=0.01", "optimizer.weight_decay=0.5")
    trainer = trainer_of(*GPT2, "optimizer=muon", *options, "schedule=constant", "schedule.warmup_steps=0", "clip=none")
    block = "gpt2.transformer.h.0."
    names = [f"{block}{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    matrices = [trainer.model.get_parameter(name) for name in names]
    linear = [nn.Parameter(matrix.detach().T.clone()) for matrix in matrices]
    reference = torch.optim.Muon(linear, lr=0.01, weight_decay=0.5, adjust_lr_fn=adjusted)
    for _ in range(2):
        for matrix, weight in zip(matrices, linear, strict=True):
            matrix.grad = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(matrix.shape[1]))
            weight.grad = matrix.grad.T.clone()
        trainer.optimizer.step()
        with monkeypatch.context() as patch:
            iterated = lambda matrix, *options: muon_module.orthogonal(matrix.clone(), *options)  # noqa: E731, in fp32
            patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", iterated)
            reference.step()
    for matrix, weight in zip(matrices, linear, strict=True):
        torch.testing.assert_close(matrix.detach().T, weight.detach(), rtol=1e-4, atol=1e-5)


def test_a_class_of_any_package_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer("torch.optim.rprop.Rprop").build(nn.ParameterList([weight]), torch.device("cpu"))
    assert type(optimizer) is torch.optim.Rprop
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    for name in ("no.Such", "Lamb"):
        with pytest.raises(UserError, match=f"optimizer.name={name}"):
            Optimizer(name)
