"""Loops as people write them: watched and unwatched they train the same, bit for bit, and nothing ends them.

A loop is a function of what makes its watch, and a row of ``LOOPS``.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mantissa
from tests.mantissa.bits import same_bits

Watching = Callable[..., Any]
"""Takes the arguments of ``mantissa.Watch``."""
Trained = tuple[list[Any], Iterable[nn.Module]]
"""The losses of a loop, and what it has trained."""
Loop = Callable[[Watching], Trained]


class Unwatched:
    def step(self, loss: Any = None) -> None: ...

    def keep(self, batch: Any) -> Any:
        return batch

    def before_update(self) -> None: ...


class Net(nn.Module):
    """Returns its loss beside its scores; dropout and batch norm are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.head(self.body(x))
        return scores if targets is None else (F.cross_entropy(scores, targets), scores)


def data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)


def adam(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in net.parameters() if weight.requires_grad], lr=1e-2, **options)


def taken_by(step: Callable[..., Any], build: Callable[[], nn.Module] = Net, made: Any = adam) -> Loop:
    """A loop of 6 steps, each taken by ``step(number, net, optimizer, watch)``, which returns the loss."""

    def loop(watching: Watching) -> Trained:
        net = build()
        optimizer = made(net)
        watch = watching(net, optimizer)
        return [step(number, net, optimizer, watch) for number in range(6)], [net]

    return loop


def simple(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    return update(optimizer, net(*data(number))[0], watch)


def update(optimizer: Any, loss: Tensor, watch: Any) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    watch.step(loss)
    return loss.item()


def two_optimizers(watching: Watching) -> Trained:
    """A GAN with a watch for each, and one watch for the whole of it."""
    maker, critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 1)
    one, other = adam(maker), adam(critic)
    watches = watching(maker, one), watching(critic, other), watching(nn.ModuleList([maker, critic]), one)
    losses = []
    for number in range(6):
        real, made = data(number)[0], maker(torch.randn(6, 2))
        loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(real)).mean()
        other.zero_grad()
        loss.backward()
        other.step()
        losses.append(F.softplus(-critic(made)).mean())
        one.zero_grad()
        losses[-1].backward()
        one.step()
        for watch in watches:
            watch.step(loss)
    return losses, [maker, critic]


def several_updates(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    for part in range(3):
        optimizer.zero_grad()
        loss = net(*data(10 * number + part))[0]
        loss.backward()
        optimizer.step()
    watch.step(loss)
    return loss


def by_hand(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    loss = net(*data(number))[0] / 2
    loss.backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=number == 3)
    watch.step(loss)
    return loss


def closure(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    def call() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(*data(number))[0]
        loss.backward()
        return loss

    loss = optimizer.step(call)
    watch.step(loss)
    return loss


def skipped(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    x, targets = data(number)
    loss = net.eval()(x * (float("nan") if number == 2 else 1), targets)[0]
    return update(optimizer, loss, watch) if loss.isfinite() else 0.0


def evaluated(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    for forget in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with forget:
            net.eval()(*data(100))
    return update(optimizer, net.train()(*data(number))[0], watch)


def caught(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    try:
        if number == 1:
            net(torch.ones(2, 3))
        if number == 2:
            net(*data(number))[0].backward()
            raise KeyboardInterrupt
        return simple(number, net, optimizer, watch)
    except (RuntimeError, KeyboardInterrupt):
        optimizer.zero_grad()


def copied(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    loss = net(*data(number))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            other(*data(number))  # is not watched, and opens where this package is not installed
            hooks = [*other._forward_pre_hooks.values(), *other._forward_hooks.values()]
            assert not any("mantissa" in type(hook).__module__ for hook in hooks)
        copy.deepcopy(optimizer)
        torch.save([loss, net, optimizer.state_dict()], io.BytesIO())
        torch.optim.swa_utils.AveragedModel(net)(*data(number))
    return update(optimizer, loss, watch)


def replaced(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    if number == 2:
        net.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        optimizer.add_param_group({"params": net.head.parameters()})
    if number == 4:
        net.body = nn.Linear(4, 8)
    return simple(number, net, optimizer, watch)


def frozen(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    net.body.requires_grad_(number >= 3)
    if number == 4:
        optimizer.add_param_group({"params": list(net.body.parameters())})
    return simple(number, net, optimizer, watch)


def rebuilt(watching: Watching) -> Trained:
    net, losses = Net(), []
    optimizer = adam(net)
    watch = watching(net, optimizer)
    for number in range(6):
        optimizer = adam(net) if number == 3 else optimizer
        losses.append(simple(number, net, optimizer, watch))
    return losses, [net]


def several_backwards(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    loss, scores = net(*data(number))
    loss.backward(retain_graph=True)
    scores.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    watch.step(loss)
    return loss


def penalty(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    x = data(number)[0].requires_grad_()
    scores = net.eval()(x)
    (gradient,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
    return update(optimizer, scores.square().mean() + (gradient.norm() - 1).square(), watch)


def scaled(
    watching: Watching,
    clips: bool = False,
    given: bool = True,
    early: bool = False,
    steps: int = 1,
    **options: Any,
) -> Trained:
    """With a scaler that Watch may be ``given``; ``early``: a step is said to be over before the scaler's update."""
    net, scaler, losses = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2), []
    optimizer = adam(net, **options)
    watch = watching(net, optimizer, scaler if given else None)
    for number in range(24):
        with torch.autocast("cpu", torch.float16):
            loss = net(*data(number))[0] * 100
        scaler.scale(loss).backward()
        if (number + 1) % steps == 0:
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            if early:
                watch.step(loss)
            scaler.update()
            optimizer.zero_grad()
        if not early or (number + 1) % steps:
            watch.step(loss)
        losses.append(loss)
    return losses, [net]


def mixed(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(*data(number))[0]
    return update(optimizer, loss, watch)


def any_loss(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def step(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
        loss = net(*data(number))[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(change(loss))
        return loss

    return step


def outputs(wrap: Callable[[Tensor], Any], loss_of: Callable[[Any], Tensor]) -> Loop:
    """A model that returns anything."""

    class Other(Net):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
            return wrap(super().forward(x, targets)[0])

    return taken_by(lambda n, net, optimizer, watch: update(optimizer, loss_of(net(*data(n))), watch), Other)


def functional(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    weights, batch = dict(net.named_parameters()), data(number)
    loss = torch.func.functional_call(net, weights, batch)[0]

    def other(weights: Any) -> Tensor:
        result: Tensor = torch.func.functional_call(net.eval(), weights, batch)[0]
        return result

    gradients = torch.func.vmap(torch.func.grad(other))(
        {name: weight.detach()[None] for name, weight in weights.items()}
    )
    net.train()
    return update(optimizer, loss + 0 * sum(gradient.sum() for gradient in gradients.values()), watch)


def sparse() -> Loop:
    return taken_by(
        lambda n, net, optimizer, watch: update(optimizer, net(torch.tensor([[n, 1], [1, 2]])).square().mean(), watch),
        lambda: nn.EmbeddingBag(8, 4, sparse=True, mode="sum", dtype=torch.bfloat16),
        lambda net: torch.optim.SGD(net.parameters(), 0.1),
    )


def masters(watching: Watching) -> Trained:
    net, losses = Net().to(torch.bfloat16), []
    wide = [nn.Parameter(weight.detach().float()) for weight in net.parameters()]
    optimizer = torch.optim.AdamW(wide, 1e-2)
    watch = watching(net, optimizer)
    for number in range(6):
        x, targets = data(number)
        loss = net(x.bfloat16(), targets)[0]
        loss.backward()
        for master, weight in zip(wide, net.parameters(), strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(wide, net.parameters(), strict=True):
                weight.copy_(master)
        watch.step(loss)
        losses.append(loss)
    return losses, [net]


class Noisy(torch.optim.AdamW):
    """An optimizer of one's own, which draws, and calls that of a base class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None if weight.grad is None else weight.grad + torch.randn_like(weight) * 1e-3
        return super().step(closure)


class Mine(Noisy):
    """One that cannot be made from its groups alone."""

    def __init__(self, parameters: Any, secret: int) -> None:
        super().__init__(parameters, lr=1e-2)
        self.secret = secret


def threads(watching: Watching) -> Trained:
    net, losses = Net().eval(), []
    optimizer = adam(net)
    watch = watching(net, optimizer)
    others = [threading.Thread(target=lambda: [net(*data(9)) for _ in range(20)]) for _ in range(2)]
    for thread in others:
        thread.start()
    rows = TensorDataset(*data(0))
    for batch in DataLoader(rows, 2, num_workers=1):
        losses.append(update(optimizer, net(*batch)[0], watch))
    for thread in others:
        thread.join()
    return losses, [net]


def compiled(watching: Watching, kind: str) -> Trained:
    torch._dynamo.reset()
    net = Net()
    optimizer = adam(net)
    called: Any = torch.compile(net, backend="aot_eager") if kind == "model" else net
    watch = watching(called, optimizer)
    if kind == "function":
        called = torch.compile(lambda *batch: net(*batch), backend="eager", fullgraph=True)
    if kind == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    return [update(optimizer, called(*data(number))[0], watch) for number in range(6)], [net]


class Unusual(Net):
    """Has a module whose outputs no meter knows."""

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged), x.to_sparse()

    def __init__(self) -> None:
        super().__init__()
        self.nested = self.Nested()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        self.nested(self.body(x))
        return super().forward(x, targets)


def parts(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    """The loop calls submodules, and never the model; batches are kept."""
    x, targets = watch.keep(data(number))
    return update(optimizer, F.cross_entropy(net.head(net.body(x)), targets), watch)


def recomputed(number: int, net: Any, optimizer: Any, watch: Any) -> Any:
    x, targets = data(number)
    loss = torch.utils.checkpoint.checkpoint(net, x.requires_grad_(), targets, use_reentrant=number % 2 == 0)[0]
    return update(optimizer, loss, watch)


class Double(Net):
    """Computes in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        return super().forward(x.double(), targets)


LOOPS: dict[str, Loop] = {
    "two optimizers": two_optimizers,
    "several updates a step": taken_by(several_updates),
    "accumulation by hand": taken_by(by_hand),
    "closure": taken_by(closure),
    "skipped batches": taken_by(skipped),
    "evaluation": taken_by(evaluated),
    "caught exceptions": taken_by(caught),
    "copies": taken_by(copied),
    "replaced layers": taken_by(replaced),
    "unfrozen": taken_by(frozen, made=lambda net: adam(net.head)),
    "rebuilt optimizer": rebuilt,
    "several backwards": taken_by(several_backwards),
    "gradient penalty": taken_by(penalty),
    "scaler": scaled,
    "scaler, clip before": lambda watching: scaled(watching, clips=True),
    "scaler, fused": lambda watching: scaled(watching, fused=True),
    "scaler, not given": lambda watching: scaled(watching, given=False),
    "scaler, early": lambda watching: scaled(watching, early=True),
    "scaler, accumulation, early": lambda watching: scaled(watching, early=True, steps=2),
    "loss of several elements": taken_by(any_loss(lambda loss: loss.expand(3))),
    "nan for a log": taken_by(any_loss(lambda loss: float("nan"))),
    "dict output": outputs(lambda loss: {"a": [loss], "b": None, "c": "text"}, lambda output: output["a"][0]),
    "functional_call": taken_by(functional),
    "sparse, sgd, bf16": sparse(),
    "masters": masters,
    "noisy optimizer": taken_by(simple, made=lambda net: Noisy(net.parameters(), lr=1e-2)),
    "optimizer of one's own": taken_by(simple, made=lambda net: Mine(net.parameters(), 1)),
    "threads": threads,
    "compiled model": lambda watching: compiled(watching, "model"),
    "compiled function": lambda watching: compiled(watching, "function"),
    "compiled optimizer": lambda watching: compiled(watching, "optimizer"),
    "unusual modules": taken_by(simple, Unusual),
    "only parts are called": taken_by(parts),
    "recomputed": taken_by(recomputed),
    "fp64": taken_by(simple, Double),
    "bf16": taken_by(mixed),
}


STEPS = {
    "accumulation by hand": (3, 0),
    "skipped batches": (5, 0),
    "caught exceptions": (4, 0),
    "rebuilt optimizer": (3, 0),
    "threads": (3, 0),
    "compiled optimizer": (0, 0),  # its hooks are compiled with it: only Watch.close says so
    **{name: (24, 12) for name in LOOPS if name.startswith("scaler")},
    "scaler, not given": (12, 0),
    "scaler, accumulation, early": (12, 9),
}
"""Steps that Watch counts, and those of them that the scaler skips, where it is not 6 and 0."""
SAID = {
    "optimizer of one's own": "Not all can be measured",
    "several updates a step": "DIFFERS: The optimizer stepped 3 times before watch.step",
    "scaler, clip before": "DIFFERS: The gradients were clipped to 1 while they were multiplied by the loss scale of",
    "rebuilt optimizer": "step 3: The optimizer did not step, and weights have changed: give a new optimizer",
    "sparse, sgd, bf16": "sparse or complex, and their updates not measured: 1 parameter (weight)",
    "nan for a log": "The loss is not finite, but the update is",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_the_same_bit_for_bit_with_a_watch(name: str) -> None:
    def trained(**options: Any) -> Any:
        """Losses, weights and buffers, optimizers' state, and the generator of a loop; unwatched without options."""
        optimizers = []

        def watching(model: Any, optimizer: Any, *args: Any) -> Any:
            optimizers.append(optimizer)
            if not options:
                return Unwatched()
            watches.append(mantissa.Watch(model, optimizer, *args, say=said.append, **options))
            return watches[-1]

        torch.manual_seed(0)
        losses, nets = LOOPS[name](watching)
        generator = None if name == "threads" else torch.get_rng_state()
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        return list(map(str, losses)), [net.state_dict() for net in nets], states, generator

    watches, said = list[mantissa.Watch](), list[str]()
    plain = trained()
    for options in ({"every": 1}, {"every": 3}, {"every": 2, "keep_weights": True}):
        assert same_bits(plain, trained(**options)), options
    assert not [text for text in said if "cannot follow this loop" in text]
    assert any(SAID.get(name, "") in text for text in said), said
    setups = [text for text in said if text.startswith("requested: ")]
    assert len(setups) == sum(watch.number > 0 for watch in watches), said
    assert {(watch.number, watch.skipped) for watch in watches} == {STEPS.get(name, (6, 0))}
