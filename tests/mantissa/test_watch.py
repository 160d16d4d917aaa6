"""A loop of one's own, watched: the first step that is not finite is kept, replayed and explained; no bit changes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mantissa
from mantissa.errors import UsageError
from mantissa.watch.meters import Measured, are_finite
from mantissa.watch.passes import loss_in
from tests.helpers import same_bits

BAD = 7
"""The step whose batch has the planted fault."""


class Root(nn.Module):
    """Whose square root has no finite gradient, or no finite result, where an input is 0 or below."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.root = Root()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        hidden = self.drop(self.norm(self.first(x)))
        scores = self.head(self.root(hidden.square() + x[:, :1].clamp(max=1)))
        return scores if targets is None else (scores, F.cross_entropy(scores, targets))


class Training:
    """A loop; at step ``bad`` the data are such that ``root`` returns NaN."""

    def __init__(self, bad: int = 0, autocast: torch.dtype | None = None, passes: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.bad, self.autocast, self.passes = bad, autocast, passes
        self.called: Any = options.pop("wrap", lambda net: net)(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=options.pop("fused", False))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=options.pop("init_scale", 1024.0))
        self.scales = autocast is torch.float16
        self.said: list[str] = []
        self.watch: mantissa.Watch | None = None
        self.external = "loss" in options
        if options.pop("watched", True):
            scaler = self.scaler if self.scales else None
            self.watch = mantissa.Watch(self.called, self.optimizer, scaler, say=self.said.append, **options)
        self.generator = torch.Generator().manual_seed(1)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(6, 4, generator=self.generator) + 0.1
        if number == self.bad:
            x[2, 0] = -50.0
        return x, torch.randint(3, (6,), generator=self.generator)

    def step(self, number: int) -> None:
        for _ in range(self.passes):
            x, targets = self.batch(number)
            with torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None):
                if self.external:
                    assert self.watch is not None
                    self.watch.keep((x, targets))
                    loss = F.cross_entropy(self.called(x), targets)
                else:
                    loss = self.called(x, targets)[1]
            (self.scaler.scale(loss) if self.scales else loss).backward()
        if self.scales:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.watch is not None:
            self.watch.step(loss)

    def train(self, steps: int) -> Training:
        for number in range(1, steps + 1):
            self.step(number)
        return self


def compiled_in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_weights": True},
        {"autocast": torch.bfloat16},
        {"passes": 3},
        {"loss": lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])},
        {"wrap": lambda net: torch.compile(net, backend="eager")},
        {"wrap": compiled_in_place, "keep_weights": True},
    ],
)
def test_the_first_step_that_is_not_finite_is_replayed_and_explained(tmp_path: Path, options: dict[str, Any]) -> None:
    training = Training(BAD, folder=tmp_path, **options)
    training.train(BAD - 1)
    before = copy.deepcopy(training.net.state_dict())
    with pytest.raises(mantissa.NotFiniteError, match=f"^step {BAD}: .* is not finite.*root") as error:
        training.step(BAD)
    assert training.watch is not None
    assert training.watch.number == BAD
    text = training.said[-1]
    assert "reproduced" in text
    assert "domain" in text
    assert "aten.sqrt" in text
    assert ("its replay is eager" in text) == ("wrap" in options)
    page = tmp_path / "report.html"
    assert f"see {page}" in str(error.value)
    assert "root" in page.read_text()
    if not options:  # stopped before the update
        weights = dict(training.net.named_parameters())
        assert same_bits(weights, {name: before[name] for name in weights})


class Late:
    """An accelerator's event, which is behind the host by two steps."""

    made = 0

    def __init__(self) -> None:
        Late.made += 1
        self.number = Late.made

    def query(self) -> bool:
        return Late.made >= self.number + 2

    def synchronize(self) -> None:
        Late.made = max(Late.made, self.number + 2)


@pytest.mark.parametrize("closes", [False, True])
def test_a_bad_step_that_an_accelerator_reports_late_is_replayed_from_its_start(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host learns of it two steps later, or when it closes; weights and batch norm's statistics are NaN by then."""
    monkeypatch.setattr(mantissa.Watch, "_mark", lambda watch: Late())
    training = Training(BAD, folder=tmp_path, keep_weights=True).train(BAD if closes else BAD + 1)
    assert training.watch is not None
    with pytest.raises(mantissa.NotFiniteError, match=f"^step {BAD}: .*root"):
        training.watch.close() if closes else training.step(BAD + 2)
    assert closes or training.net.norm.running_mean.isnan().any()
    assert training.net.head.weight.isnan().any()
    assert "input" not in training.said[-1].split("FOUND")[1]


class Coin(nn.Module):
    """Divides by 0 in one of 20 calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (torch.rand(()) > 0.05)


class Counter(nn.Module):
    """Divides by 0 in its fifth call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / (self.calls != 5)


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        (Counter, {}, "step 5: "),
        (Counter, {"keep_weights": True}, "step 5: "),
        (Coin, {}, ""),
        (Coin, {"passes": 2}, ""),
    ],
)
def test_buffers_and_random_numbers_are_those_from_before_the_step(
    fault: type[nn.Module], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    def wrap(net: Net) -> Net:
        net.drop = fault()
        return net

    with pytest.raises(mantissa.NotFiniteError, match=rf"{words}.*drop; aten\.div"):
        Training(wrap=wrap, folder=tmp_path, **options).train(400)


class Bound(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("bound to a socket")


@pytest.mark.parametrize(
    ("kind", "returns_loss", "words", "note"),
    [
        (Net, False, "root", "give Watch(loss=…)"),
        (Bound, True, "cannot be replayed: .*bound to a socket", ""),
    ],
)
def test_a_replay_that_is_not_the_step_is_said_to_be_so_and_why(
    kind: type[Net], returns_loss: bool, words: str, note: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x, targets, said = kind(), torch.full((4, 4), -9.0), torch.zeros(4, dtype=torch.long), [""]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    mantissa.Watch(net, optimizer, folder=tmp_path, say=said.append)
    (net(x, targets)[1] if returns_loss else F.cross_entropy(net(x), targets)).backward()
    with pytest.raises(mantissa.NotFiniteError, match=words):
        optimizer.step()
    assert note in said[-1]


def test_what_a_closure_has_updated_is_replayed_from_after_the_update_which_is_said(tmp_path: Path) -> None:
    net, said = Net(), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    watch = mantissa.Watch(net, optimizer, folder=tmp_path, say=said.append)

    def closure() -> Tensor:
        loss: Tensor = net(torch.full((4, 4), -9.0), torch.zeros(4, dtype=torch.long))[1]
        loss.backward()
        return loss

    with pytest.raises(mantissa.NotFiniteError, match="step 1: the loss is not finite"):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert watch.number == 1
    assert "note: the replay has the weights of after the update" in said[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_sparse_and_complex_gradients_are_watched_for_what_is_not_finite(dtype: torch.dtype, tmp_path: Path) -> None:
    net = nn.ModuleList([nn.Embedding(4, 4, sparse=True), nn.Linear(4, 1)])
    net.register_parameter("phase", nn.Parameter(torch.ones(4, dtype=dtype)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    watch = mantissa.Watch(net, optimizer, every=1, folder=tmp_path, say=lambda text: None)
    for factor in (1.0, float("nan")):
        loss = net[1]((net[0](torch.tensor([1, 2])) * net.phase).abs() * factor).sum()
        loss.backward()
        if factor == 1:
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    for each in net.parameters():
        each.grad = each.grad if each is net.phase else None
    assert "1.weight.grad" in watch.history[0].overflow
    with pytest.raises(mantissa.NotFiniteError, match="a gradient is not finite"):
        optimizer.step()


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [1, 10, 5000])
def test_gradients_whose_sum_overflows_are_finite(size: int, dtype: torch.dtype, now: bool) -> None:
    numbers = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    ones, device = torch.ones(3), torch.device("cpu")
    assert are_finite([], device, now)
    assert are_finite([ones, numbers], device, now)
    for bad in (math.inf, -math.inf, math.nan):
        numbers[size // 2] = bad
        assert not are_finite([ones, numbers], device, now)
        assert not are_finite([numbers[: size // 2 + 1], -numbers, ones], device, now)  # inf - inf


def test_a_failure_is_a_warning_on_request_and_the_loop_goes_on(tmp_path: Path) -> None:
    training = Training(2, folder=tmp_path, on_failure="warn")
    with pytest.warns(UserWarning, match="step 2: the loss is not finite"):
        training.train(4)
    assert not training.net._forward_pre_hooks
    assert not training.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
def test_watching_changes_no_bit(keep_weights: bool, autocast: torch.dtype | None, fused: bool) -> None:
    options = {"autocast": autocast, "fused": fused, "init_scale": 2.0**24}  # fp16's first steps are skipped
    plain = Training(watched=False, **options).train(12)
    state = torch.get_rng_state()
    watched = Training(every=2, keep_weights=keep_weights, **options).train(12)
    assert same_bits(state, torch.get_rng_state())
    assert same_bits(plain.net.state_dict(), watched.net.state_dict())
    assert same_bits(plain.optimizer.state_dict()["state"], watched.optimizer.state_dict()["state"])
    assert watched.watch is not None
    assert (watched.watch.skipped > 0) == (autocast is torch.float16)
    assert watched.watch.history


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor's value."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_between_the_measured_steps() -> None:
    counts = []
    for watched in (False, True):
        training = Training(watched=watched, fused=True, **({"keep_weights": True} if watched else {})).train(3)
        with Reads() as reads:
            training.train(10)
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_ten_skipped_steps_in_a_row_are_a_failure(tmp_path: Path) -> None:
    training = Training(autocast=torch.float16, folder=tmp_path)
    training.train(3)
    nn.init.zeros_(training.net.norm.weight)
    nn.init.zeros_(training.net.norm.bias)  # so that root gets the 0 of the batch, and returns an infinite gradient
    training.batch = lambda number: (torch.eye(6, 4), torch.zeros(6, dtype=torch.long))  # type: ignore[method-assign]
    with pytest.raises(mantissa.NotFiniteError, match=r"step 13: the loss scaler skipped 10 steps in a row.*root"):
        training.train(20)
    assert training.watch is not None
    assert training.watch.skipped == 10


@pytest.mark.parametrize("options", [{}, {"keep_weights": True, "passes": 2}])
def test_a_scaler_skips_a_loss_that_is_not_finite_and_only_ten_in_a_row_are_a_failure(
    options: dict[str, Any], tmp_path: Path
) -> None:
    training = Training(BAD, autocast=torch.float16, folder=tmp_path, **options).train(BAD + 1)
    assert f"step {BAD}: The loss is not finite, but the update is" in training.said[-1]
    assert training.watch is not None
    assert training.watch.skipped == 1
    training.batch = lambda number: (torch.full((6, 4), -9.0), torch.zeros(6, dtype=torch.long))  # type: ignore[method-assign]
    with pytest.raises(mantissa.NotFiniteError, match=r"step 18: the loss scaler skipped 10 steps in a row.*root"):
        training.train(20)


def test_lost_updates_are_measured_by_parameter_group_and_warned_about_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.bfloat16)
    groups = [{"params": net[0].parameters(), "name": "linear"}, {"params": net[1].weight}, {"params": net[1].bias}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5)
    said: list[str] = []
    watch = mantissa.Watch(net, optimizer, every=2, precision="bf16_pure", say=said.append)
    for _ in range(6):
        loss = net(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    assert [each.step for each in watch.history] == [2, 4, 6]
    last = watch.history[-1]
    assert list(last.lost) == ["linear", "1", "2"]
    assert last.lost["1"].lost_share == 1.0  # norm weights of 1
    assert last.lost["2"].lost_share < 0.5  # and biases near 0
    assert last.weights["1"] == pytest.approx(8**0.5)
    assert sum("parameter group 1 are lost" in each for each in said) == 1
    assert not any("group 2 are lost" in each for each in said)
    assert "lost updates, group 1" in str(watch)


def scaled_step(
    net: nn.Module, x: Tensor, scaler: Any, loss_of: Callable[[Tensor], Tensor]
) -> tuple[Measured, list[str]]:
    """Take a step of weights that stay, under autocast in fp16; return what was measured, and what was said."""
    optimizer, said = torch.optim.SGD(net.parameters(), 0.0), list[str]()
    watch = mantissa.Watch(net, optimizer, scaler, every=1, say=said.append)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(net(x).float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    watch.step(loss.item())
    assert watch.history[0].loss == loss
    return watch.history[0], said


def test_headroom_is_that_of_the_outputs_and_of_the_scaled_gradients() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Identity())
    nn.init.eye_(net[0].weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    found, said = scaled_step(net, torch.full((2, 2), 2.0**15), scaler, lambda output: output.mean() / 2**10)
    assert found.overflow["0"] == pytest.approx(1.0, abs=1e-3)
    assert found.underflow["0"] == pytest.approx(15 + 14)
    # Each is 2 · 2^15 / 4 / 2^10, times the scale
    assert found.overflow["0.weight.grad"] == pytest.approx(16 - 8, abs=1e-3)
    assert found.underflow["0.weight.grad"] == pytest.approx(8 + 14)
    assert sum("within a factor of 2" in each for each in said) == 1


def test_a_scale_that_grows_at_the_measured_step_is_the_one_before_and_its_gradients_are_no_warning() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=1)
    found, said = scaled_step(nn.Linear(2, 2), torch.ones(4, 2), scaler, lambda output: output.sum(1).mean())
    assert scaler.get_scale() == 2.0**16
    assert found.overflow["bias.grad"] == pytest.approx(1 - 2**-11, abs=1e-3)
    assert not any("within a factor of 2" in each for each in said)


def test_copies_and_files_of_the_model_are_not_watched() -> None:
    training = Training().train(1)
    assert training.watch is not None
    for other in (copy.deepcopy(training.net), pickle.loads(pickle.dumps(training.net))):
        other(*training.batch(1))
        assert not training.watch._now.passes
        hooks = [*other._forward_pre_hooks.values(), *other._forward_hooks.values()]
        assert hooks
        assert not any("mantissa" in type(hook).__module__ for hook in hooks)  # it opens where that is not installed


@pytest.mark.parametrize("updates_first", [False, True])
@pytest.mark.parametrize("ends", [range(8), range(1, 16, 2), (0, 1, 3, 4, 6, 8, 9, 10)])
def test_steps_of_a_scaler_are_counted_before_and_after_its_update(ends: Sequence[int], updates_first: bool) -> None:
    net, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    watch = mantissa.Watch(net, optimizer, scaler, say=lambda text: None)
    for number in range(ends[-1] + 1):
        loss = net(torch.ones(2, 4)).square().mean()
        scaler.scale(loss * (math.inf if number in (ends[2], ends[3], ends[6]) else 1)).backward()
        if number in ends:
            scaler.step(optimizer)
        if number in ends and updates_first:
            scaler.update()
        watch.step(loss)
        assert watch.number == sum(each <= number for each in ends)
        if number in ends and not updates_first:
            scaler.update()
        if number in ends:
            optimizer.zero_grad()
    assert watch.skipped == 3


@pytest.mark.parametrize(
    "output",
    [
        lambda loss: {"aux_loss": loss + 1, "loss": loss},
        lambda loss: SimpleNamespace(aux_loss=loss + 1, loss=loss),
        lambda loss: (torch.ones(3), {"scores": [loss]}),
    ],
)
def test_the_loss_is_found_in_what_a_model_returns(output: Callable[[Tensor], Any]) -> None:
    loss = torch.ones(())
    assert loss_in(output(loss)) is loss


def test_evaluation_and_accumulation_are_no_steps() -> None:
    training = Training()
    assert training.watch is not None
    with torch.no_grad():
        training.net(*training.batch(1))
    training.watch.step()
    assert training.watch.number == 0
    assert not training.watch._now.passes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0 must be 1"),
        ({"on_failure": "stop"}, "use 'raise' or 'warn'"),
        ({"precision": "bf8"}, "precision='bf8' is unknown; use one of fp32, tf32, bf16"),
        ({"model": nn.ReLU()}, "type ReLU"),
        ({"optimizer": torch.optim.SGD}, "type type"),
        ({"scaler": "bf16"}, "type str"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], words: str) -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=words):
        mantissa.Watch(**{"model": net, "optimizer": torch.optim.SGD(net.parameters(), 0.1)} | options)


@pytest.mark.parametrize("of", ["optimizer", "loop"])
def test_an_optimizer_of_another_model_is_named_and_stops_no_training(of: str) -> None:
    net, other = nn.Linear(2, 1), nn.Linear(2, 1)
    stepped, idle = torch.optim.SGD(other.parameters(), 0.1), torch.optim.SGD(net.parameters(), 0.1)
    said: list[str] = []
    watch = mantissa.Watch(net, stepped if of == "optimizer" else idle, every=1, say=said.append)
    loss = other(torch.ones(3, 2)).square().mean()
    loss.backward()
    stepped.step()
    watch.step(loss)
    watch.close()
    words = {"optimizer": "2 of 2 tensors of the optimizer are not the model's parameters", "loop": "saw no step of"}
    assert words[of] in said[-1]


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_weights_that_a_scaler_refuses_are_named_at_once(fused: bool) -> None:
    net, said = nn.Linear(2, 2).half(), list[str]()
    optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
    mantissa.Watch(net, optimizer, torch.amp.GradScaler("cpu"), say=said.append)
    words = (
        "DIFFERS: The weights are float16, whose gradients a GradScaler refuses to unscale: load the weights in fp32"
    )
    assert [each.startswith(words) for each in said] == ([] if fused else [True])


def test_a_loss_needs_the_batches() -> None:
    training = Training(loss=lambda net, batch: net(*batch)[1])
    training.external = False
    with pytest.raises(UsageError, match=r"call watch\.keep\(batch\) before each forward pass"):
        training.step(1)


def test_metrics_are_the_numbers_of_the_last_measurement() -> None:
    training = Training(every=2)
    assert training.watch is not None
    assert training.watch.metrics() == {}
    found = training.train(5).watch.metrics()  # type: ignore[union-attr]
    assert found["precision/loss"] == training.watch.history[-1].loss
    assert {"precision/lost_updates/0", "precision/weight_norm/0", "precision/skipped_steps"} <= found.keys()
    assert found["precision/least_bits_to_overflow"] == min(training.watch.history[-1].overflow.values())
    assert all(isinstance(each, float | int) for each in found.values())


def test_the_setup_is_said_once() -> None:
    training = Training(precision="bf16").train(3)
    assert sum("requested: bf16" in each for each in training.said) == 1
    assert "DIFFERS: precision=bf16 asks for autocast" in training.said[0]
