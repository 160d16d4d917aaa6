"""``mantissa.examine`` as a function: what it leaves as it is, what it refuses, and what is healthy."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mantissa
from mantissa import UsageError
from mantissa.__main__ import main
from mantissa.doctor import budget, examine
from mantissa.doctor.budget import Budget
from mantissa.doctor.checks import TABLE
from mantissa.doctor.diagnosis import HEALTHY, INCOMPLETE
from mantissa.doctor.finding import DTYPE, ERROR, INPUT, LOST, MOMENT, OVERFLOW, RATE
from mantissa.doctor.sweep import RAISES, FormatTrial
from mantissa.formats import FORMATS
from mantissa.step.loop import LoopStep
from mantissa.step.replay import Replay, ReplayResult
from mantissa.step.step import Step
from mantissa.tensors import random_state
from tests.mantissa.bits import same_bits
from tests.mantissa.doctor.faults import Batch, Own, adam, error, regression, with_value

PROJECT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("key", "factor"), [("momentum_buffer", 65536.0), ("exp_avg_sq", 1e12)])
def test_a_state_that_spoils_the_steps_is_named(key: str, factor: float) -> None:
    model = Own()
    kept = {"momentum_buffer": torch.optim.SGD(model.parameters(), 0.02, 0.9)}
    optimizer = kept.get(key) or torch.optim.Adam(model.parameters(), 1e-2)
    for batch in regression():
        optimizer.zero_grad()
        error(model, batch).backward()
        optimizer.step()
    for state in optimizer.state.values():
        state[key] *= factor
    finding = mantissa.examine(model, error, regression(), "fp32", optimizer).findings[0]
    assert (finding.kind, finding.place.partition(" of ")[0]) == (MOMENT, key), str(finding)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), 0.02, 0.9),
        lambda model: torch.optim.Adam(model.parameters(), 1e-2),
        lambda model: torch.optim.Adagrad(model.parameters(), 1e-2, initial_accumulator_value=0.5),
    ],
)
def test_a_fresh_state_is_that_of_a_new_optimizer(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model, batches = Own(), regression()
    weights, used = copy.deepcopy(model.state_dict()), optimizer(model)
    for batch in batches:
        error(model, batch).backward()
        used.step()
    model.load_state_dict(weights)
    step, new = (LoopStep.copied(model, error, batches, FORMATS["fp32"], of) for of in (used, optimizer(model)))
    losses = [Replay.reference(each).train(step.batches(1, 5)) for each in (step, step.with_fresh_state(), new)]
    assert losses[0] != losses[1] == losses[2]


def test_a_cause_that_cannot_be_found_for_a_fault_of_the_search_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise TypeError("unsupported operand")

    monkeypatch.setattr("mantissa.doctor.sweep.find_origin", crash)
    report = mantissa.examine(Own(), error, with_value(regression(), 0, 1e30), "fp32")
    assert [finding.kind for finding in report.findings] == ["not finite", "crash"], str(report)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("rate", [1e-3, 100.0])
def test_sparse_data_are_examined(layout: torch.layout, rate: float) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (torch.sparse.mm(batch["x"], model.get_parameter("weight").T)[:, 0] - batch["y"]).square().mean()

    batches = [{**batch, "x": batch["x"].relu().to_sparse(layout=layout)} for batch in regression()]
    model = nn.Linear(8, 1, bias=False)
    report = mantissa.examine(model, loss, batches, "bf16", torch.optim.SGD(model.parameters(), rate))
    assert [each.kind for each in report.findings] == [RATE] * (rate > 1), str(report)
    assert not any("sparse" in each for each in report.diagnosis.budget.left_out), str(report)


def test_columns_of_a_table_that_bf16_does_not_tell_apart_are_a_note() -> None:
    batches = [{**each, "x": torch.cat([each["x"][:, :6], 100 + 0.1 * each["x"][:, 6:]], 1)} for each in regression()]
    model = Own()
    report = mantissa.examine(model, error, batches, "bf16", torch.optim.AdamW(model.parameters(), 1e-3))
    lost = "loses 100% of what varies in 2 columns (6, 7): subtract the mean before"
    assert report.diagnosis.notes == [f"rounding batch['x'] to bfloat16 {lost}"], str(report)
    assert report.verdict == HEALTHY


def test_casts_that_make_a_loss_wrong_which_rounding_explains_are_a_note() -> None:
    """A ratio of probabilities, whose logarithms are far larger than what they differ by."""
    generator = torch.Generator().manual_seed(0)
    bases = [-500 + 200 * torch.rand(64, generator=generator) for _ in range(4)]
    batches = [{"x": torch.randn(64, 8), "base": base, "old": base - 0.1} for base in bases]

    def loss(dtype: torch.dtype) -> Callable[[nn.Module, Batch], Tensor]:
        def ratio(model: nn.Module, batch: Batch) -> Tensor:
            new = (0.1 * model(batch["x"]) + batch["base"]).to(dtype)
            return (new - batch["old"].to(dtype)).exp().float().mean()

        return ratio

    half, full = (
        mantissa.examine(Own(), loss(dtype), batches, "bf16", checks=["modules"], time_budget_s=600).diagnosis
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert (half.verdict, full.verdict, full.notes) == (HEALTHY, HEALTHY, [])
    assert "without the casts to 16 bits in" in half.notes[-1]
    assert "new = (0.1 * model" in half.notes[-1]


def test_a_module_that_cannot_be_examined_is_not_healthy() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.layer(y) if y.dtype == torch.bfloat16 else self.layer(self.layer(x))

    model = nn.Sequential(Twice(), nn.Linear(8, 1), nn.Flatten(0))
    report = mantissa.examine(model, error, regression(), "bf16", checks=["modules"], time_budget_s=600)
    assert (report.verdict, report.findings) == (INCOMPLETE, []), str(report)
    assert "errors of " in report.diagnosis.budget.left_out[0]


def test_weights_in_no_group_of_the_optimizer_are_named() -> None:
    model = Own()
    named = list(model.named_parameters())
    report = mantissa.examine(model, error, regression(), "bf16", torch.optim.SGD([named[0][1]], 1e-3))
    left = f"in no group of the optimizer, but with a gradient: {len(named) - 1} parameter"
    assert any(left in note for note in report.diagnosis.notes), str(report)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_healthy_model_has_no_fault_and_stays_as_it_is(precision: str) -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    error(model, regression()[0]).backward()
    batches = regression()
    kept = [model.state_dict(), optimizer.state_dict(), random_state(torch.device("cpu")), batches]
    gradients = [each.grad for each in model.parameters()]
    before = copy.deepcopy([*kept, gradients])
    report = mantissa.examine(model, error, batches, precision, optimizer)
    assert (report.verdict, report.findings) == (HEALTHY, []), str(report)
    after = [model.state_dict(), optimizer.state_dict(), random_state(torch.device("cpu")), batches]
    assert same_bits([*after, [each.grad for each in model.parameters()]], before)


def stated(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that changes its batch, as augmentation on the device does."""
    return error(model, batch | {"x": batch["x"].mul_(0.5).add_(0.1)})


class Drawing(nn.Module):
    """Draws from generators of its own, twice, and warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out, self.calls = nn.Linear(8, 16), nn.Linear(16, 1), 0
        self.torchs, self.numpys = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x) * (torch.rand(len(x), 16, generator=self.torchs) > 0.1) + torch.randn(len(x), 16) / 4
        y = y * torch.from_numpy(self.numpys.random(16) > 0.1) * torch.bernoulli(torch.full_like(y, 0.9))
        return min(1.0, self.calls / 10) * self.out(y.relu()).squeeze(-1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("build", "loss"), [(Own, stated), (Drawing, error)])
def test_what_a_step_changes_is_restored_before_the_next(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Tensor], precision: str
) -> None:
    torch.manual_seed(0)
    model, batches = build(), regression()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss(model, regression()[0]).backward()
    optimizer.step()
    own = [each.get_state() for each in vars(model).values() if isinstance(each, torch.Generator)]
    report = mantissa.examine(model, loss, batches, precision, optimizer)
    assert (report.verdict, report.findings) == (HEALTHY, []), str(report)
    assert report.diagnosis.budget.left_out == []
    assert same_bits(batches, regression())
    assert same_bits([each.get_state() for each in vars(model).values() if isinstance(each, torch.Generator)], own)


def test_gradients_of_other_models_stay() -> None:
    model, judge = Own(), nn.Linear(1, 1)
    report = mantissa.examine(model, lambda own, batch: judge(own(batch["x"])[:, None]).square().mean(), regression())
    assert report.verdict == HEALTHY, str(report)
    assert judge.weight.grad is None


def replaced() -> nn.Module:
    model = Own()
    forward = model.inner.forward
    model.inner.forward = lambda x: forward(x)  # type: ignore[method-assign]
    return model


def with_hidden() -> nn.Module:
    model = Own()
    model.others = [nn.Linear(8, 8)]  # type: ignore[assignment]
    model.register_forward_pre_hook(lambda module, args: module.others[0](args[0]))
    return model


def test_the_surrounding_modes_do_not_matter() -> None:
    batches = with_value(regression(), 0, 1e30)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        report = mantissa.examine(Own(), error, batches, "fp32")
    assert report.findings[0].kind == INPUT, str(report)
    assert "bfloat16" not in str(report)


def test_the_cache_of_a_surrounding_autocast_keeps_no_weights() -> None:
    model = Own()
    model.inner.weight.data.mul_(1e7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = mantissa.examine(model, error, regression(), "fp16")
    assert report.findings[0].kind == OVERFLOW, str(report)
    assert report.findings[0].cure, str(report)


def test_batches_of_any_nesting_and_no_optimizer() -> None:
    batches = [({"a": [batch["x"]]}, "a name", batch["y"]) for batch in regression()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, name, targets = batch
        assert name == "a name"
        return F.mse_loss(model(inputs["a"][0]), targets)

    batches[0][0]["a"][0][4, 1] = float("nan")
    report = mantissa.examine(Own(), loss, batches, "bf16")
    assert report.findings[0].place == "batch[0]['a'][0], sample 4"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": torch.optim.SGD(Own().parameters())}, "precision must be one of fp32, .* is of type SGD"),
        ({"model": nn.ReLU()}, "model must be a module with parameters"),
        ({"model": nn.LazyLinear(1)}, "lazy modules, .* call it once"),
        ({"model": Own().double()}, "float64, which no autocast lowers"),
        ({"loss": nn.MSELoss()}, r"called as loss\(model, batch\), and raises \w+Error"),
        ({"loss": lambda model, batch: error(model, batch["inputs"])}, "raises KeyError: 'inputs'"),
        ({"checks": "format"}, "checks=\\['format'\\] are unknown"),
        ({"accumulate": "2"}, "accumulate must be a whole number, such as 1, and is of type str"),
        ({"time_budget_s": 0}, "time_budget_s=0 must be more than 0"),
        ({"scale": float("nan")}, "scale=nan must be more than 0"),
        ({"model": replaced()}, "a gradient goes to the model that was given"),
        ({"model": with_hidden()}, "2 weights with a gradient, and nothing trains them; hold layers in nn.ModuleList"),
        ({"model": Own}, "model must be a module with parameters, and is of type type"),
        ({"loss": regression(), "batches": error}, "loss must be a function, .* and is of type list"),
        ({"batches": error}, "batches must be an iterable of batches"),
        ({"batches": regression()[0]}, r"such as a DataLoader or \[batch\], and is of type dict"),
        ({"batches": [torch.ones(4, 2), torch.ones(4).long()]}, r"so it is one batch; give \[batch\]"),
        ({"optimizer": error}, "optimizer must be an optimizer, and is of type function"),
    ],
)
def test_arguments_that_cannot_work(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"model": Own(), "loss": error, "batches": regression()}
    arguments |= change
    with pytest.raises(UsageError, match=words):
        mantissa.examine(**arguments)
    assert not isinstance(arguments["model"], Own) or all(each.grad is None for each in arguments["model"].parameters())


def test_a_step_begins_with_the_random_numbers_of_before_its_batches_which_stay() -> None:
    def batches() -> Iterator[Batch]:
        while True:
            yield {"x": torch.randn(16, 8), "y": torch.randn(16)}

    model, before = Own(), torch.get_rng_state()
    report = mantissa.examine(model, error, batches(), "fp32", checks=["manifest"])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(report.diagnosis.step.generators["torch"], before)
    with pytest.raises(UsageError):
        mantissa.examine(model, error, itertools.islice(batches(), 1), "fp32", accumulate=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_may_have_no_end() -> None:
    batches = itertools.cycle(regression())
    assert mantissa.examine(Own(), error, batches, "bf16").verdict == HEALTHY


@pytest.mark.parametrize("part", ["manifest", "whole gradients", "divergence"])
def test_any_check_that_crashes_is_never_healthy(part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise TypeError("unsupported operand")

    table = [replace(check, find=crash) if part in (check.part, check.name) else check for check in TABLE]
    monkeypatch.setattr("mantissa.doctor.diagnosis.TABLE", table)
    model = Own()
    report = mantissa.examine(model, error, regression(), "fp16", torch.optim.AdamW(model.parameters()))
    assert (report.verdict, report.diagnosis.exit_code) == ("CRASHED", 3), str(report)
    assert "FOUND crash, examination: check " in str(report)
    assert report.diagnosis.budget.left_out == []  # the other checks are made
    assert "raise TypeError" in report.write(tmp_path).read_text()
    assert "raise TypeError" in "".join(json.loads((tmp_path / "verdict.json").read_text())["crashes"].values())


class Locked(nn.Module):
    """A layer that cannot be called again alone: its argument cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8))

    def forward(self, x: Tensor, lock: Any) -> Tensor:
        with lock:
            return F.linear(x, self.weight).squeeze(-1)


def test_a_model_without_a_module_that_can_be_examined_is_not_healthy() -> None:
    report = mantissa.examine(
        Locked(), lambda model, batch: F.mse_loss(model(batch["x"], threading.Lock()), batch["y"]), regression()
    )
    assert (report.verdict, report.diagnosis.exit_code) == ("INCOMPLETE", 3), str(report)
    assert str(report).splitlines()[-1] == "INCOMPLETE at step 1: no fault in what was examined"


@pytest.mark.parametrize("raised", [ZeroDivisionError, RuntimeError])
def test_a_loss_that_takes_no_other_batch_is_examined(raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mantissa.step.step._FEW", 0)  # as if the step were a large one
    model = Own()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch["x"]) != 16:
            raise raised("16 samples are needed")
        return error(model, batch)

    report = mantissa.examine(model, loss, regression(), "bf16", adam()(model.parameters()))
    assert (report.verdict, report.diagnosis.budget.left_out) == (HEALTHY, []), str(report)
    report = mantissa.examine(model, loss, with_value(regression(), 0, float("nan")), "bf16")
    assert report.findings[0].kind == INPUT, str(report)
    assert report.findings[0].cure[0].startswith("leave out sample 5"), str(report)  # others take its place
    assert report.diagnosis.budget.crashes == {}


def test_a_format_that_raises_holds_neither_model_nor_activations() -> None:
    given: list[weakref.ref[Tensor]] = []

    class Raising(Own):
        def forward(self, x: Tensor) -> Tensor:
            given.append(weakref.ref(x))
            raise RuntimeError("not here")

    step = LoopStep.copied(Raising(), error, regression(), FORMATS["bf16"])
    trial = FormatTrial("bf16", FORMATS["bf16"]).take(step)
    assert (trial.status, trial.why) == (RAISES, "RuntimeError: not here")
    assert [kept() for kept in given] == [None]


def test_what_does_not_fit_beside_a_step_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations of a step count, and not only the weights."""
    batches = regression(rows=4096)
    monkeypatch.setattr("mantissa.step.step.available_bytes", lambda device: 4096 * 32 * 4)  # one of them
    report = mantissa.examine(Own(), error, batches, "bf16")
    assert [each.partition(" (it needs about ")[0] for each in report.diagnosis.budget.left_out] == [
        *("fp64", "modules", "whole gradients")
    ]
    assert report.verdict == "INCOMPLETE"


def test_a_step_takes_until_its_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated clock: passes are queued at once, and run when the host waits for them."""
    now, queued, run = 0.0, 0.0, Replay.run

    def queue(replay: Replay, *given: Any) -> ReplayResult:
        nonlocal queued
        queued += 7.0
        return run(replay, *given)

    def wait(device: torch.device) -> None:
        nonlocal now, queued
        now, queued = now + queued, 0.0

    monkeypatch.setattr(Replay, "run", queue)
    for module in (budget, examine):
        monkeypatch.setattr(module, "synchronise", wait)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    step = LoopStep.copied(Own(), error, regression(), FORMATS["bf16"])
    assert examine.take(step).seconds == 7.0
    parts = Budget(60, step)
    parts.run("part", Replay.as_run(step).run)
    assert parts.spent == {"part": 7.0}


def test_the_page_has_the_models_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    mantissa.examine(Own(), error, regression(), "bf16", checks=["formats"]).write(tmp_path)
    hardware = json.loads((tmp_path / "verdict.json").read_text())["hardware"]
    assert hardware["device"] == "cpu"
    assert hardware["name"] != "a GPU"


class Slow:
    """A simulated clock, on which the step takes a second, in fp64 as many as it is slower; two samples far fewer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowdown: int) -> None:
        self.now = 0.0
        run = Replay.run

        def timed(replay: Replay, microbatches: Any = None) -> ReplayResult:
            samples = sum(len(next(iter(batch.values()))) for batch in replay.step.microbatches)
            self.now += samples / ROWS * (slowdown if replay._wide == torch.float64 else 1)
            return run(replay, microbatches)

        monkeypatch.setattr(Replay, "run", timed)
        monkeypatch.setattr("mantissa.step.step._FEW", 0)
        monkeypatch.setattr(Step, "fp64_slowdown", slowdown)
        for module in (budget, examine):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


ROWS = 256


@pytest.mark.parametrize(
    ("precision", "slowdown", "formats"),
    [
        ("bf16", 2, "fp64 ok · fp32 ok · bf16 ok"),
        ("bf16", 64, "fp64 of a part ok · fp32 ok · bf16 ok"),
        ("fp32", 64, "fp64 of a part ok · fp32 ok"),
    ],
    ids=["fast", "slow", "slow, of an fp32 run"],
)
def test_fp64_takes_no_more_time_than_there_is(
    precision: str, slowdown: int, formats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Slow(monkeypatch, slowdown)
    report = mantissa.examine(Own(), error, regression(rows=ROWS), precision, checks=["formats"])
    assert (report.verdict, str(report).splitlines()[1]) == (HEALTHY, formats)
    assert clock.now < 60


def test_fp64_says_of_a_part_nothing_about_a_step_that_fp32_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slow(monkeypatch, 64)
    beyond = Own(lambda own, x: x * 1e30 * 1e30)
    report = mantissa.examine(beyond, error, regression(rows=ROWS), "bf16", checks=["formats"])
    assert "fp64 left out · fp32 BREAKS" in str(report)
    assert "it takes about 64 s" in report.diagnosis.budget.left_out[0]
    assert "beyond fp32's range" not in str(report)
    assert clock.now < 60


@pytest.mark.parametrize(
    ("kind", "capability", "slowdown"),
    [("cpu", None, 2), ("cuda", (9, 0), 2), ("cuda", (8, 0), 2), ("cuda", (8, 9), 64), ("cuda", (7, 5), 64)],
)
def test_how_much_slower_fp64_is(
    kind: str, capability: tuple[int, int] | None, slowdown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    step = LoopStep.copied(Own(), error, regression(), FORMATS["bf16"])
    assert replace(step, device=torch.device(kind)).fp64_slowdown == slowdown


def overflowing() -> nn.Module:
    return Own(lambda own, x: F.softsign(x * 3e6))


def entering(dtype: torch.dtype) -> Callable[[nn.Module, Batch], Tensor]:
    @torch.autocast("cpu", dtype=dtype)
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return error(model, batch)

    return loss


class Entering(Own):
    """A model whose forward enters autocast itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return super().forward(x)


@pytest.mark.parametrize(
    ("build", "loss"),
    [
        (overflowing, entering(torch.float16)),
        (lambda: Entering(lambda own, x: F.softsign(x * 3e6)), error),
        (lambda: Entering(lambda own, x: checkpoint(F.softsign, x * 3e6, use_reentrant=False)), error),
    ],
)
def test_autocast_of_the_loss_itself_says_the_precision(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Tensor]
) -> None:
    report = mantissa.examine(build(), loss, regression(), "bf16")
    assert [(trial.name, trial.status) for trial in report.diagnosis.formats][:4] == [
        *(("fp64", "ok"), ("fp32", "ok"), ("bf16", "ok"), ("fp16", "BREAKS"))
    ]
    finding = report.findings[0]
    assert (finding.kind, finding.format) == (OVERFLOW, "fp16"), str(report)
    assert any("fp32_ops(['mul'])" in cure or "keep_fp32" in cure for cure in finding.cure), str(report)
    said = (
        "note: the loss or the model enters autocast itself: precision='fp16' is examined, with no autocast around it"
    )
    assert said in str(report).splitlines()


def test_weights_in_16_bits_hide_no_other_fault() -> None:
    model = Own(lambda own, x: own.get_submodule("extra")(x + 1000) - own.get_submodule("extra")(0 * x + 1000))
    model.extra = nn.Linear(32, 32)
    batches = [{"x": batch["x"].bfloat16(), "y": batch["y"].bfloat16()} for batch in regression()]
    report = mantissa.examine(model.bfloat16(), error, batches, "bf16")
    assert {finding.kind for finding in report.findings} == {DTYPE, ERROR}, str(report)
    assert [trial.status for trial in report.diagnosis.formats] == ["ok", "ok", "ok"]


class Looking(nn.Module):
    """A sparse embedding and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table((x[:, :4].abs() * 20).long().clamp(max=49))).mean(1).squeeze(-1)


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        raise AssertionError


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), 1e-5),
        lambda model: torch.optim.SparseAdam([model.table.weight], 1e-5),
        lambda model: torch.optim.Adagrad([model.table.weight], 1e-5),
        lambda model: Wrapped(torch.optim.SGD(model.parameters(), 1e-5)),
    ],
)
def test_lost_updates_of_sparse_gradients_are_found(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = Looking()
    checks = ["formats", "updates"]
    report = mantissa.examine(model, error, regression(), "bf16_pure", optimizer(model), checks=checks)
    assert "table" in [finding.place for finding in report.findings if finding.kind == LOST], str(report)
    assert report.diagnosis.budget.left_out == []


def test_sparse_gradients_count_in_the_norm_of_a_step() -> None:
    norms = []
    for sparse in (True, False):
        model = Looking()
        model.table.sparse = sparse
        norms.append(mantissa.examine(model, error, regression(), checks=["formats"]).diagnosis.taken.grad_norm)
    assert norms[0] == pytest.approx(norms[1])


def test_updates_that_are_not_measured_are_not_healthy() -> None:
    class Lamb(torch.optim.SGD):
        """One that treats elements together, by its name."""

    model = Own()
    report = mantissa.examine(model, error, regression(), "bf16_pure", Lamb(model.parameters(), 1e-1))
    left_out = report.diagnosis.budget.left_out
    assert (report.verdict, left_out) == ("INCOMPLETE", ["updates (Lamb treats elements together)"]), str(report)


def test_a_command_that_is_printed_can_be_pasted(tmp_path: Path) -> None:
    """And the first line comes before torch is loaded."""
    (tmp_path / "mine.py").write_text("from tests.mantissa.doctor.faults import Own, error, regression\n\n\n" + MINE)
    given = ["doctor", "mine:made", "--report", str(tmp_path / "my report")]
    command = [sys.executable, "-m", "mantissa", *given]
    paths = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
    assert (ended.returncode, ended.stderr.decode().splitlines()[0]) == (0, "loading torch …"), ended.stderr
    written = json.loads((tmp_path / "my report" / "verdict.json").read_text())["command"]
    assert shlex.split(written)[1:] == command[1:]


MINE = """def made():
    return Own(), error, regression()
"""


def test_a_file_in_the_place_of_its_module_is_answered_with_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tools/train.py:example"]) == 2
    assert capsys.readouterr().err.endswith(": tools.train:example\n")
