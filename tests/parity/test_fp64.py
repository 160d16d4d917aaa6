"""precision=fp64 against a loop in plain torch with a double model: nothing on the way from data to weights is fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.helpers import compose, fit, start
from trainer.data.contract import Batch, SampleId
from trainer.trainer import Trainer

STEPS, LR = 3, 1e-3
TEXT = ("recipe.context=16", "data=synthetic", "data.vocab_size=90", "batch_size=6", "micro_batch_size=3")
JOBS = {
    "gpt2": ("recipe=gpt2", "recipe.size=nano", *TEXT),
    "gpt2 in chunks": ("recipe=gpt2", "recipe.size=nano", "recipe.chunked_loss=true", *TEXT),
    "llama": ("recipe=llama", "recipe.size=nano", *TEXT),
    "bert": ("recipe=bert", "recipe.size=nano", "recipe.dropout=0", *TEXT),
    "t5": ("recipe=t5", "recipe.size=nano", "recipe.dropout=0", *TEXT),
    "resnet": (
        "recipe=resnet",
        "recipe.arch=resnet18",
        "data=synthetic",
        "recipe.image_size=32",
        "batch_size=6",
        "micro_batch_size=3",
    ),
    "bignet": ("recipe=bignet", "recipe.layers=3", "recipe.width=16", "batch_size=6", "micro_batch_size=3"),
}


class Uncast(TorchFunctionMode):
    """Leaves out what a model of transformers casts to fp32, as its norms and rotary positions do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        of = {torch.float32: torch.float64}
        args = [of.get(each, each) if isinstance(each, torch.dtype) else each for each in args]
        kwargs = {
            key: of.get(each, each) if isinstance(each, torch.dtype) else each for key, each in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def next_token(model: Any, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    logits = model.network(tokens[:, :-1], use_cache=False).logits[..., :90]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def masked_tokens(model: Any, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["tokens"]).logits
    places = batch["places"][..., None].expand(-1, -1, logits.shape[-1])
    return F.cross_entropy(logits.gather(1, places).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def spans(model: Any, batch: Batch) -> Tensor:
    before = F.pad(batch["labels"][:, :-1], (1, 0), value=model.config.decoder_start_token_id)
    logits = model(input_ids=batch["inputs"], decoder_input_ids=before).logits[..., : model.vocabulary]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def images(model: Any, batch: Batch) -> Tensor:
    norm = model.normalise
    logits = model((batch["image"].double() - norm.mean.double()) * norm.factor.double())
    return F.cross_entropy(logits, batch["label"], reduction="sum")


def vectors(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"].double()) - batch["y"].double()).square().sum() / 16


LOSSES: dict[str, Callable[[Any, Batch], Tensor]] = {
    "gpt2": next_token,
    "gpt2 in chunks": next_token,
    "llama": next_token,
    "bert": masked_tokens,
    "t5": spans,
    "resnet": images,
    "bignet": vectors,
}


def trainer_of(precision: str, *overrides: str) -> Trainer:
    options = ("optimizer.weight_decay=0", f"optimizer.lr={LR}", "schedule=constant", "clip=norm")
    return start(compose("device=cpu", f"precision={precision}", f"steps={STEPS}", *options, *overrides))


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


def first_gradients(trainer: Trainer, microbatches: list[Batch]) -> tuple[Tensor, Tensor]:
    """The loss and the gradients of a step that is not taken."""
    buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    loss = trainer.gradients(microbatches).loss
    found = flat(parameter.grad for parameter in trainer.model.parameters())
    trainer.model.zero_grad()
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(buffers[name])
    return loss, found


@pytest.mark.parametrize("job", JOBS)
def test_loss_gradients_and_weights_are_those_of_a_double_model(job: str) -> None:
    trainer, in_fp32 = (trainer_of(precision, *JOBS[job]) for precision in ("fp64", "fp32"))
    steps = list(trainer.batches())
    before = flat(trainer.model.parameters())
    loss, own = first_gradients(trainer, steps[0])
    loss_in_fp32, rounded = first_gradients(in_fp32, steps[0])
    records = fit(trainer)

    torch.manual_seed(trainer.config.seed)
    model = trainer.config.recipe.build_model(trainer.datasets).double().train()
    betas = tuple(trainer.config.optimizer.options["betas"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=betas, weight_decay=0.0, foreach=False)
    for number, (microbatches, record) in enumerate(zip(steps, records, strict=True)):
        targets = sum(map(trainer.recipe.count_targets, microbatches))
        with Uncast():
            exact = torch.stack([LOSSES[job](model, batch) / targets for batch in microbatches]).sum()
        exact.backward()
        assert abs(record.loss - exact) < 1e-10 * exact
        if not number:
            gradients = flat(parameter.grad for parameter in model.parameters())
            assert abs(loss - exact) < 1e-14 * exact
            assert error(own, gradients) < 1e-12
            assert 1e-9 < error(rounded, gradients) < 2e-2  # of fp32: rounding, which batch norm and ReLU magnify
            assert abs(loss_in_fp32 - exact) < 1e-5 * exact
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = flat(model.parameters())
    assert error(flat(trainer.model.parameters()) - before, after - before) < 1e-9


def test_what_an_optimizer_computes_in_bf16_is_fp64_and_so_are_averages() -> None:
    trainer = trainer_of("fp64", *JOBS["bignet"], "optimizer=muon", "ema=default", "ema.decay=0.5")
    weights = dict(trainer.model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    exact: dict[str, Tensor] = {}
    microbatches = next(trainer.batches())
    trainer.gradients(microbatches)
    total = flat(weight.grad for weight in weights.values()).norm()
    for name, weight in weights.items():
        if weight.ndim == 2 and weight.grad is not None:  # Nesterov's first step, as in torch.optim.Muon
            gradient = weight.grad * min(1.0, float(1 / (total + 1e-6)))
            moved = gradient * (1 - 0.95)
            x = gradient + 0.95 * (moved - gradient)
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            exact[name] = before[name] - LR * 0.2 * 16**0.5 * x
    trainer.model.zero_grad()
    trainer.train_step(microbatches)
    averages = trainer.average.persistent_weights()
    for name, expected in exact.items():
        change = expected - before[name]
        assert error(weights[name].detach() - before[name], change) < 1e-10
        decay = 2 / 11  # after one step, at most 0.5
        assert error(averages[name] - before[name], (1 - decay) * change) < 1e-10
    assert len(exact) == 3


def test_an_evaluation_is_that_of_a_double_model() -> None:
    trainer = trainer_of("fp64", *JOBS["bignet"], "data.samples=64")
    model = trainer.config.recipe.build_model(trainer.datasets).double()
    model.load_state_dict(trainer.model.state_dict())
    count = len(trainer.datasets.valid)
    batch = trainer.datasets.valid.batch([SampleId(index, None) for index in range(count)])
    assert trainer.evaluate()["loss"] == pytest.approx(vectors(model, batch).item() / count, rel=1e-14)
