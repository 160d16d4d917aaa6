"""A case restores every bit of a step's start, operators are traced to their modules, islands cure overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evidence.doctor.step import step_of as step_of_trainer
from mantissa.doctor.dtypes import explicit_casts
from mantissa.doctor.sweep import _formats
from mantissa.formats import FORMATS, TF32
from mantissa.step.flags import flags_of
from mantissa.step.loop import LoopStep
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from mantissa.step.trace import BACKWARD, FORWARD, Op, Trace
from mantissa.tensors import random_state
from tests.evidence.doctor.planted import TINY, Planted, step_of, step_of_run
from tests.helpers import copied, fit, same_bits, trainer_of
from tests.mantissa.doctor.faults import BATCH, WIDTH
from trainer.precision.modes import Precision
from trainer.trainer import Trainer


def after_two_steps(*overrides: str) -> tuple[Trainer, list[Any]]:
    trainer = trainer_of(*overrides)
    fit(trainer, 2)
    return trainer, next(trainer.batches())


def everything(passes: Replay) -> dict[str, Any]:
    masters = dict(passes.masters.persistent_weights()) if passes.masters is not None else {}
    random = random_state(passes.step.device)
    return copied({"model": passes.model.state_dict(), "masters": masters, "random": random})


@pytest.mark.parametrize(
    "overrides",
    [
        (*TINY["gpt2"], "recipe.dropout=0.1", "precision=fp16_master"),
        (*TINY["gpt2"], "recipe.dropout=0.1", "precision=bf16_sr"),
        (*TINY["gpt2"], "recipe.dropout=0.1", "precision=bf16", "activation_checkpointing=blocks"),
        (*TINY["resnet"], "precision=bf16_master"),
        (*TINY["bignet"], "precision=fp64", "activation_checkpointing=blocks"),
    ],
    ids=["masters", "stochastic rounding", "dropout, recomputed", "batch norm", "fp64"],
)
def test_an_attempt_is_the_runs_own_step_every_time(overrides: tuple[str, ...]) -> None:
    trainer, microbatches = after_two_steps(*overrides)
    before = random_state(trainer.device)
    step = step_of_trainer(trainer)
    assert same_bits(random_state(trainer.device), before)
    expected = trainer.gradients(microbatches)
    if trainer.masters is not None:
        trainer.masters.take_gradients()
    wanted = {name: p.grad for name, p in (trainer.masters or trainer.model).named_parameters() if p.grad is not None}
    other = Replay.as_run(step)
    start = everything(other)
    assert same_bits(start["random"], before)
    for _ in range(2):
        found = other.run()
        assert same_bits(found.loss, expected.loss)
        assert same_bits(found.gradients, wanted)
        assert same_bits(found.buffers, dict(trainer.model.named_buffers()))
        other.start()
        assert same_bits(everything(other), start)


@pytest.mark.parametrize("mode", ["bf16_master", "fp64"])
def test_training_continues_from_a_case_as_the_run_does(mode: str) -> None:
    trainer, microbatches = after_two_steps(*TINY["gpt2"], f"precision={mode}")
    other = Replay.as_run(step_of_trainer(trainer))
    record = trainer.train_step(microbatches)
    assert other.train([microbatches]) == [record.loss.item()]
    assert same_bits(trainer.model.state_dict(), other.model.state_dict())


def test_a_step_in_fp64_is_swept_from_its_reference_over_fp32_to_itself() -> None:
    trainer, microbatches = after_two_steps(*TINY["bignet"], "precision=fp64")
    step = step_of_trainer(trainer)
    loss = trainer.gradients(microbatches).loss.item()
    trials = [trial.take(step) for trial in _formats(step)]
    assert [trial.name for trial in trials] == ["fp64", "fp32", "fp64"]
    assert [trial.loss == loss for trial in trials] == [True, False, True]
    assert trials[1].loss == pytest.approx(loss, rel=1e-5)


def test_a_run_keeps_its_fp32_products_where_its_reference_has_others() -> None:
    """A trainer sets torch's flags in the whole process, and a reference is built by one."""
    step, seen = step_of_trainer(trainer_of(*TINY["bignet"])), list[str]()

    def taken(replay: Replay) -> str:
        matmul = torch.backends.cuda.matmul
        replay.model.register_forward_pre_hook(lambda *_: seen.append(matmul.fp32_precision))
        replay.run()
        return seen[-1]

    with flags_of(TF32):  # a run's, on a GPU
        run, reference = Replay.as_run(step), Replay.exact(step)
        assert (taken(run), taken(reference), taken(run)) == ("tf32", "ieee", "tf32")


class Casts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(dtype=torch.bfloat16).float()


def casting() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Casts(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


def step_of_a_trainer() -> Step:
    trainer = Planted(casting, Precision(mode="fp16")).trainer()
    fit(trainer, 2)
    return step_of_trainer(trainer)


def step_of_a_loop() -> Step:
    torch.manual_seed(0)
    model = casting()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [{"x": torch.randn(BATCH, WIDTH)} for _ in range(4)]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = model(batch["x"])
        return output.float().square().mean()

    for batch in batches[:2]:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return LoopStep.copied(model, loss, batches, FORMATS["fp16"], optimizer)


OTHER_STEPS: dict[str, Callable[[Step], Step]] = {
    "another format": lambda step: step.in_format(FORMATS["bf16"]),
    "modules in fp32": lambda step: step.in_fp32(["0"]),
    "operators in fp32": lambda step: step.in_fp32(operators=["linear"]),
    "no cast in a line": lambda step: step.without_casts(
        explicit_casts(Replay.in_format(step, FORMATS["fp32"]))[0].line
    ),
    "another scale": lambda step: step.at_scale(2.0**-12),
    "another rate": lambda step: step.at_rate(0.5),
    "another loss": lambda step: step.with_loss_times(0.5),
    "a fresh optimizer": lambda step: step.with_fresh_state(),
    "another batch": lambda step: step.with_microbatches(step.following(2)[1]),
    "other weights": lambda step: step.with_values(lambda tensor: tensor * 1.01),
    "a later step": lambda step: trained(step)[0].after(2),
}


def trained(step: Step) -> tuple[Replay, list[float]]:
    replay = Replay.as_run(step)
    return replay, replay.train(step.following(3))


@pytest.mark.parametrize("name", OTHER_STEPS)
@pytest.mark.parametrize("of", [step_of_a_trainer, step_of_a_loop])
def test_another_step_trains_otherwise_and_leaves_the_first_as_it_is(of: Callable[[], Step], name: str) -> None:
    step = of()
    losses = trained(step)[1]
    other = OTHER_STEPS[name](step)
    assert trained(other)[1] != losses
    assert trained(step)[1] == losses


@pytest.mark.parametrize("of", [step_of_a_trainer, step_of_a_loop])
def test_a_replay_takes_a_step_from_other_tensors_in_the_same_model(of: Callable[[], Step]) -> None:
    step = of()
    replay = Replay.as_run(step)
    first = copied(replay.run().outputs)
    other = step.with_microbatches(step.following(2)[1]).with_values(lambda tensor: tensor * 1.01)
    shared = replay.of(other)
    assert shared.model is replay.model
    assert same_bits(copied(shared.run().outputs), copied(Replay.as_run(other).run().outputs))
    assert same_bits(copied(replay.run().outputs), first)


@pytest.mark.parametrize(
    ("mode", "exact"), [("bf16", torch.float32), ("bf16_pure", torch.float32), ("fp32", torch.float64)]
)
def test_what_is_exact_has_more_bits_than_the_format(mode: str, exact: torch.dtype) -> None:
    replay = Replay.exact(step_of(casting, mode))
    assert {parameter.dtype for parameter in replay.model.parameters()} == {exact}
    assert replay.forward().dtype == exact


@pytest.mark.parametrize("recomputed", ["none", "blocks"])
@pytest.mark.parametrize("recipe", TINY)
def test_backward_operators_belong_to_modules_that_ran(recipe: str, recomputed: str) -> None:
    step = step_of_run(*TINY[recipe], "precision=fp32", f"activation_checkpointing={recomputed}")
    other = Replay.in_format(step, FORMATS["fp32"])
    places: set[tuple[str, str]] = set()
    products: list[tuple[str, str, list[int]]] = []

    def note(op: Op) -> None:
        places.add(op.place)
        if op.bare_name in ("mm", "addmm"):
            products.append((*op.place, [each.untyped_storage().data_ptr() for each in op.inputs]))

    with Trace(other.model, note):
        other.run()
    forward = {module for module, direction in places if direction == FORWARD}
    backward = {module for module, direction in places if direction == BACKWARD}
    with_weights = {name.rpartition(".")[0] for name, p in other.model.named_parameters() if p.grad is not None}
    assert backward - with_weights - {""} <= forward
    assert with_weights & forward <= backward
    linear = {name: m for name, m in other.model.named_modules() if type(m) is nn.Linear}
    owner = {m.weight.untyped_storage().data_ptr(): name for name, m in linear.items()}
    for module, direction, storages in products:
        names = {owner[storage] for storage in storages if storage in owner}
        assert not names or module in names, (module, direction, names)
    if linear:
        assert {module for module, direction, _ in products if direction == BACKWARD} >= linear.keys() & forward
