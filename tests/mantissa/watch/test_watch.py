"""The first step that is not finite is replayed and explained, from what it started from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mantissa
from mantissa.errors import NotFiniteError, UsageError
from mantissa.formats import FORMATS
from mantissa.tensors import innermost
from mantissa.watch.meters import are_finite
from mantissa.watch.passes import loss_in
from mantissa.watch.snapshot import Snapshot
from mantissa.watch.watch import UNREACHED
from tests.mantissa.bits import same_bits

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
    """A watched loop; at step ``bad`` the data are such that ``root`` returns NaN."""

    def __init__(self, bad: int = 0, autocast: torch.dtype | None = None, passes: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.bad, self.autocast, self.passes = bad, autocast, passes
        self.called: Any = options.pop("wrap", lambda net: net)(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=options.pop("fused", False))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=autocast is torch.float16)
        self.said: list[str] = []
        self.keeps = "loss" in options
        options = {"scaler": self.scaler if autocast is torch.float16 else None, "say": self.said.append} | options
        self.watch = mantissa.Watch(self.called, self.optimizer, **options)
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
                if self.keeps:
                    self.watch.keep((x, targets))
                    loss = F.cross_entropy(self.called(x), targets)
                else:
                    loss = self.called(x, targets)[1]
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
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
    training = Training(BAD, folder=tmp_path, **options).train(BAD - 1)
    before = {name: weight.detach().clone() for name, weight in training.net.named_parameters()}
    with pytest.raises(mantissa.NotFiniteError, match=f"^step {BAD}: .* is not finite.*root") as error:
        training.step(BAD)
    assert training.watch.number == BAD
    text = training.said[-1]
    assert "reproduced" in text
    assert "aten.sqrt" in text
    assert ("its replay is eager" in text) == ("wrap" in options)
    page = tmp_path / "report.html"
    assert f"see {page}" in str(error.value)
    assert "root" in page.read_text()
    if not options:  # stopped before the update
        assert same_bits(dict(training.net.named_parameters()), before)


def test_an_operator_of_a_model_without_code_has_no_line(tmp_path: Path) -> None:
    """The line of the loop is where the step was replayed, and not where the model was called."""
    model = nn.Sequential(nn.Linear(4, 2))
    watch = mantissa.Watch(model, torch.optim.SGD(model.parameters(), 0.1), folder=tmp_path)
    model(torch.full((3, 4), math.inf)).mean().backward()
    with pytest.raises(mantissa.NotFiniteError, match=r"batch\[0\]\[0\]"):
        watch.optimizer.step()
    assert Path(__file__).name not in (tmp_path / "verdict.json").read_text()


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
    with pytest.raises(mantissa.NotFiniteError, match=f"^step {BAD}: .*root"):
        training.watch.close() if closes else training.step(BAD + 2)
    assert closes or training.net.norm.running_mean.isnan().any()
    assert training.net.head.weight.isnan().any()
    assert "input" not in training.said[-1].split("FOUND")[1]


def test_without_a_copy_of_the_weights_a_step_is_learnt_of_before_the_next_one_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mantissa.Watch, "_mark", lambda watch: Late())
    training = Training(2, torch.float16, keep_weights=False).train(2)
    assert training.said[-1].startswith("step 2: The loss is not finite, and its scaler skips the step")


def test_weights_that_no_update_has_changed_need_no_copy_for_the_replay() -> None:
    net = Net()
    start = Snapshot(net, torch.optim.SGD(net.parameters()), later=False)
    start.device = torch.device("cuda")
    with start.given_back(None) as model:
        assert model is net


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor's value."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_between_the_measured_steps() -> None:
    training = Training(fused=True, keep_weights=True).train(3)
    with Reads() as reads:
        training.train(10)
    assert reads.count == 0


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
    ("fault", "options"), [(Counter, {}), (Counter, {"keep_weights": True}), (Coin, {}), (Coin, {"passes": 2})]
)
def test_buffers_and_random_numbers_are_those_from_before_the_step(
    fault: type[nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    def wrap(net: Net) -> Net:
        net.drop = fault()
        return net

    step = "step 5" if fault is Counter else "step"
    with pytest.raises(mantissa.NotFiniteError, match=rf"{step}.*drop; aten\.div"):
        Training(wrap=wrap, folder=tmp_path, **options).train(400)


class Bound(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("bound to a socket")


def stepped(net: nn.Module, optimizer: Any) -> None:
    net(torch.full((4, 4), -9.0), torch.zeros(4, dtype=torch.long))[1].backward()
    optimizer.step()


def with_a_loss_of_its_own(net: nn.Module, optimizer: Any) -> None:
    net(torch.full((4, 4), -9.0)).sum().backward()
    optimizer.step()


def with_a_loss_of_its_own_over_nothing(net: nn.Module, optimizer: Any) -> None:
    scores = net(torch.full((4, 4), 9.0))
    (scores.sum() / scores.detach().new_zeros(())).backward()
    optimizer.step()


def in_a_closure(net: nn.Module, optimizer: Any) -> None:
    def closure() -> Tensor:
        loss: Tensor = net(torch.full((4, 4), -9.0), torch.zeros(4, dtype=torch.long))[1]
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize(
    ("net", "step", "error", "note"),
    [
        (Net, with_a_loss_of_its_own, "root", "give Watch(loss=…)"),
        (Net, with_a_loss_of_its_own_over_nothing, r"cannot be replayed: .* give Watch\(loss=…\).*watch.keep", ""),
        (Net, in_a_closure, "step 1: the loss is not finite", "the replay has the weights of after the update"),
        (Bound, stepped, "cannot be replayed: .*bound to a socket", ""),
    ],
)
def test_a_replay_that_is_not_the_step_is_said_to_be_so_and_why(
    net: type[Net], step: Callable[..., None], error: str, note: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, said = net(), [""]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = mantissa.Watch(model, optimizer, folder=tmp_path, say=said.append)
    with pytest.raises(mantissa.NotFiniteError, match=error):
        step(model, optimizer)
    assert watch.number == 1
    assert note in said[-1]


@pytest.mark.parametrize("options", [{}, {"keep_weights": True, "passes": 2}])
def test_a_scaler_skips_a_loss_that_is_not_finite_and_only_ten_such_steps_are_a_failure(
    options: dict[str, Any], tmp_path: Path
) -> None:
    training = Training(BAD, autocast=torch.float16, folder=tmp_path, **options).train(BAD + 1)
    assert f"step {BAD}: The loss is not finite, and its scaler skips the step" in training.said[-1]
    assert training.watch.skipped == 1
    training.batch = lambda number: (torch.full((6, 4), -9.0), torch.zeros(6, dtype=torch.long))  # type: ignore[method-assign]
    with pytest.raises(
        mantissa.NotFiniteError, match=r"step 17: the loss scaler skipped 10 of the last 17 steps.*root"
    ):
        training.train(20)


def test_steps_of_which_a_few_are_not_skipped_are_a_failure_but_a_few_skipped_ones_are_not(tmp_path: Path) -> None:
    training = Training(BAD, autocast=torch.float16, folder=tmp_path)
    batch = training.batch
    training.batch = lambda number: batch(0 if number % 3 else BAD)  # type: ignore[method-assign]
    training.train(40)
    assert training.watch.skipped == 13
    training.batch = lambda number: batch(BAD if number % 5 else 0)  # type: ignore[method-assign]
    with pytest.raises(mantissa.NotFiniteError, match=r"the loss scaler skipped 10 of the last 19 steps.*root"):
        training.train(40)


def test_ten_steps_that_a_scale_of_1_does_not_save_are_a_failure(tmp_path: Path) -> None:
    training = Training(autocast=torch.float16, folder=tmp_path).train(3)
    nn.init.zeros_(training.net.norm.weight)
    nn.init.zeros_(training.net.norm.bias)  # so that root gets the 0 of the batch, and returns an infinite gradient
    training.batch = lambda number: (torch.eye(6, 4), torch.zeros(6, dtype=torch.long))  # type: ignore[method-assign]
    with pytest.raises(
        mantissa.NotFiniteError, match=r"step 13: the loss scaler skipped 10 of the last 13 steps.*root"
    ):
        training.train(20)


@pytest.mark.parametrize("options", [{}, {"loss": lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])}])
def test_scales_that_are_mixed_in_one_step_are_named_and_its_steps_are_counted(options: dict[str, Any]) -> None:
    training = Training(autocast=torch.float16, passes=2, **options)
    batches = training.batch

    def batch(number: int) -> tuple[Tensor, Tensor]:
        if any(weight.grad is not None for weight in training.net.parameters()):
            training.scaler.unscale_(training.optimizer)
            training.scaler.update()
        return batches(number)

    training.batch = batch  # type: ignore[method-assign]
    training.bad = 3
    training.train(4)
    assert "several scales" in training.said[0]
    assert (training.watch.number, training.watch.skipped) == (4, 1)


def test_scales_of_gradients_that_are_cleared_between_are_not_mixed() -> None:
    training = Training(autocast=torch.float16)
    training.called(*training.batch(1))[1].backward()  # such as of another network's loss
    training.optimizer.zero_grad(set_to_none=False)
    training.scaler.scale(torch.ones(()))
    training.scaler.update(512.0)
    training.train(2)
    assert "several scales" not in training.said[0]


def test_a_loss_of_16_bits_is_named() -> None:
    training = Training()
    loss = training.called(*training.batch(1))[1]
    loss.backward()
    training.optimizer.step()
    training.watch.step(loss.bfloat16())
    assert "DIFFERS: The loss is bfloat16" in training.said[0]


def test_a_batch_without_targets_is_named_where_the_loss_is_not_finite() -> None:
    training = Training().train(1)
    training.batch = lambda number: (torch.rand(6, 4), torch.full((6,), -100))  # type: ignore[method-assign]
    training.step(2)
    assert "the training goes on. A batch has no targets, or" in training.said[-1]


@pytest.mark.parametrize("change", ["none", "late", "frozen"])
def test_weights_that_no_gradient_reaches_are_named_once_and_no_others(change: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            output: Tensor = self.all[int(change == "late" and self.calls == UNREACHED)](x)
            return output.square().mean()

    net, said = Experts(), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net.all[1].requires_grad_(change != "frozen")
    watch = mantissa.Watch(net, optimizer, say=said.append)
    for _ in range(UNREACHED + 2):
        loss = net(torch.ones(2, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    watch.close()
    named = [line for line in said if "No gradient has reached" in line]
    assert len(named) == (change == "none")
    assert all("2 parameters (all.1.weight, all.1.bias)" in line for line in named)


@pytest.mark.parametrize(("steps", "words"), [(0, "saw 0 steps of its optimizer"), (3, "saw 3 steps of its optimizer")])
def test_a_loop_that_says_no_step_is_told_what_was_seen(steps: int, words: str) -> None:
    training = Training()
    for number in range(1, steps + 1):
        training.called(*training.batch(number))[1].backward()
        training.optimizer.step()
    training.watch.close()
    assert words in training.said[-1]


def test_a_step_that_is_said_before_the_optimizers_or_after_the_end_is_named() -> None:
    training = Training()
    for number in range(1, 4):
        loss = training.called(*training.batch(number))[1]
        loss.backward()
        training.watch.step(loss)
        training.optimizer.step()
    late = [line for line in training.said if "call watch.step right after" in line]
    assert len(late) == 1
    training = Training().train(2)
    training.watch.close()
    training.train(2)
    assert "step 2: This Watch is closed" in training.said[-1]


class Wrapped(torch.optim.Optimizer):
    """As SAM and others are written."""

    def __init__(self, weights: Any, inner: Any) -> None:
        super().__init__(weights, {})
        self.base_optimizer = inner(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def second_step(self) -> None:
        self.base_optimizer.step()


def test_the_optimizer_inside_of_another_is_watched_and_examined() -> None:
    net, said = Net(), list[str]()
    optimizer = Wrapped(net.parameters(), lambda groups: torch.optim.SGD(groups, 0.01))
    watch = mantissa.Watch(net, optimizer, every=1, say=said.append)
    batch = torch.rand(6, 4) + 0.1, torch.randint(3, (6,))
    loss = net(*batch)[1]
    loss.backward()
    optimizer.second_step()
    watch.step(loss)
    assert (watch.number, len(watch.history)) == (1, 1)
    report = mantissa.examine(net, lambda model, batch: model(*batch)[1], [batch], "fp32", optimizer)
    assert not report.diagnosis.budget.left_out


def test_an_optimizer_with_weights_of_its_own_is_no_wrapper() -> None:
    net = Net()
    whole = torch.optim.SGD(net.parameters(), 0.1)
    whole.fallback = torch.optim.AdamW(net.head.parameters())  # type: ignore[attr-defined]
    assert innermost(whole) is whole
    assert innermost(SimpleNamespace(a=whole, optimizer=whole)) is whole


def test_a_failure_whose_page_cannot_be_written_is_raised(tmp_path: Path) -> None:
    training = Training(2, folder=tmp_path / "report")
    (tmp_path / "report").touch()
    with pytest.raises(NotFiniteError, match=r"step 2: .* its page cannot be written"):
        training.train(2)


def test_a_failure_is_a_warning_on_request_and_the_loop_goes_on(tmp_path: Path) -> None:
    training = Training(2, folder=tmp_path, on_failure="warn")
    with pytest.warns(UserWarning, match="step 2: the loss is not finite"):
        training.train(4)
    assert not training.net._forward_pre_hooks
    assert not training.optimizer._optimizer_step_pre_hooks


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
        assert not are_finite([ones, numbers.to_sparse()], device, now)
        assert not are_finite([numbers[: size // 2 + 1], -numbers, ones], device, now)  # inf - inf


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


def traced() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch's, of TorchScript; their category differs between versions
        return torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0 must be more than 0"),
        ({"on_failure": "stop"}, "use 'raise' or 'warn'"),
        ({"precision": "bf8"}, f"precision='bf8' is unknown; use one of {', '.join(FORMATS)}"),
        ({"model": nn.ReLU()}, "type ReLU"),
        ({"optimizer": torch.optim.SGD}, "type type"),
        ({"optimizer": object.__new__(torch.optim.SGD)}, "of a wrapper, the one inside"),
        ({"scaler": "bf16"}, "type str"),
        ({"every": 2.5}, "every must be a whole number"),
        ({"model": nn.LazyLinear(1)}, "lazy modules"),
        ({"model": nn.Linear(2, 1, device="meta")}, "on the device meta"),
        ({"model": traced()}, "TorchScript"),
        ({"folder": __file__}, "is a file; give a folder"),
        ({"loss": 3}, "loss must be a function"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], words: str) -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=words):
        mantissa.Watch(**{"model": net, "optimizer": torch.optim.SGD(net.parameters(), 0.1)} | options)


def test_a_loss_needs_the_batches() -> None:
    training = Training(loss=lambda net, batch: net(*batch)[1])
    training.keeps = False
    with pytest.raises(UsageError, match=r"call watch\.keep\(batch\) before each forward pass"):
        training.step(1)


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
    words = {"optimizer": "2 of 2 tensors of the optimizer are not the model's parameters", "loop": "saw 0 steps of"}
    assert words[of] in said[-1]
