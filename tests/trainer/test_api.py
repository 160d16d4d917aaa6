"""What a Python program trains with, and what that leaves of the program's own settings."""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler

from tests.helpers import PROJECT, copied, same_bits
from trainer import Interrupted, LossOutput, Recipe, UserError, compare, compose, evaluate, generate, train
from trainer.config.registration import flatten
from trainer.data.loader import DataOrder
from trainer.data.user_dataset import UserDataset
from trainer.run.run import Run
from trainer.trainer import Trainer

SAMPLES, STEPS, BATCH = 48, 9, 16
OPTIONS: Any = {"tracking": "local", "steps": STEPS, "batch_size": BATCH, "eval_every": 4, "log_every": 1}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Whether losses differ by more than the tolerance of a warning depends on what is drawn."""
    torch.manual_seed(0)


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples that are dictionaries, with noise from every global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x + 0.1 * torch.randn(6) + np.random.randn() + random.random(), "y": (x[0] > 0).long()}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


OUTSIDE = [{"x": torch.ones(6), "y": torch.tensor(1 + index % 2)} for index in range(SAMPLES)]
"""Samples of which every other one has a label that no output is for."""


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def over_tokens(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def own(loss: Callable[..., Any] = mean, data: Any = None, model: Any = None, **more: Any) -> Recipe:
    return Recipe.of(model or net(), loss, data or Noisy(), data or Noisy(), **more)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_batch_norm_is_told_before_a_run_which_microbatch_it_can_have(batch_size: int) -> None:
    options: Any = {"tracking": "local", "steps": 1, "batch_size": batch_size, "micro_batch_size": 1}
    with pytest.raises(UserError, match="micro_batch_size=1: batch norm") as refused:
        train(own(model=normed()), **options)
    assert not Path("outputs").exists()
    (remedy,) = refused.value.remedies
    train(
        own(model=normed()), **options | {key: int(size) for key, _, size in (w.partition("=") for w in remedy.split())}
    )


PROGRAM = """
import torch
from trainer import Recipe, UserError, train

model, data = torch.nn.Linear(2, 1), torch.randn(8, 2)
recipe = Recipe.of(model, lambda model, batch: model(batch).square().mean(), data, data)
try:
    train(recipe, steps=1, batch_size=4, tracking="local", **{"loader.workers": 1})
except UserError as error:
    print("refused:", error.remedies)
"""


def test_a_program_that_each_loading_process_would_repeat_is_told_so(tmp_path: Path) -> None:
    Path("program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    ended = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, env=environment)
    assert ended.stdout.splitlines()[-1:] == ["refused: ('loader.workers=0',)"], ended.stderr
    assert "Traceback" not in ended.stderr


def settings() -> dict[str, Any]:
    """What a program may have set for its process, and a run does not need otherwise."""
    return {
        "folder": os.getcwd(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "torch": [torch.get_num_threads(), torch.get_default_dtype()],
        "exit": atexit._ncallbacks(),  # type: ignore[attr-defined]
        "garbage": gc.get_freeze_count(),  # which a run does not walk
    }


def test_a_programs_handlers_threads_and_model_are_as_before_training() -> None:
    program_s, seen = signal.signal(signal.SIGTERM, print), set()
    gc.unfreeze()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.add((torch.get_num_threads(), signal.getsignal(signal.SIGTERM)))
        return mean(model, batch)

    try:
        model = net()
        recipe = own(loss, model=model)
        train(recipe, "debug=fast", "tracking=local")  # imports what registers functions of its own for the exit
        before, weights = settings(), copied(dict(model.state_dict()))
        train(recipe, precision="bf16", threads=3, **OPTIONS)
        now = settings()
        assert [name for name in before if not same_bits(now[name], before[name])] == []
    finally:
        signal.signal(signal.SIGTERM, program_s)
        gc.freeze()
    assert (3, print) in seen  # in training; the program's own handler stays
    assert same_bits(weights, dict(model.state_dict()))  # a copy is trained
    assert model.training
    assert [each for each in gc.get_objects() if type(each) is Trainer] == []  # its memory is free


def test_the_memory_of_a_run_is_free_when_train_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[weakref.ref[Run]] = []
    held: list[bool] = []

    def started(run: Run) -> dict[str, Any]:
        runs.append(weakref.ref(run))
        return taken(run)

    taken = Run.train
    monkeypatch.setattr(Run, "train", started)
    monkeypatch.setattr("trainer.api.release_memory", lambda: held.append(runs[0]() is not None))
    train(own(), **OPTIONS)
    assert held == [False]


@pytest.mark.parametrize("micro_batch_size", [16, 4])
def test_a_given_model_is_trained_as_by_a_bare_loop(micro_batch_size: int) -> None:
    """Bit for bit: the mean over a batch, and of accumulation the mean of means; the dropout is the same, too."""
    samples = [Noisy()[index] for index in range(SAMPLES)]
    x, y = (torch.stack([each[name] for each in samples]) for name in "xy")
    recipe = own(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), TensorDataset(x, y))
    plain = {"schedule": "constant", "schedule.warmup_steps": 0, "optimizer": "sgd", "optimizer.weight_decay": 0.0}
    run = train(recipe, checkpoint="none", micro_batch_size=micro_batch_size, device="cpu", **plain, **OPTIONS)
    model = net()
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, fused=True)
    for step in range(STEPS):
        rows = torch.tensor([sample.index for sample in DataOrder(SAMPLES, 0).samples(BATCH * step, BATCH)])
        for part in rows.split(micro_batch_size):
            (F.cross_entropy(model(x[part]), y[part]) / (BATCH // micro_batch_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(dict(run.model.state_dict()), dict(model.state_dict()))


def test_the_line_that_loads_the_weights_of_a_given_model_does(capsys: pytest.CaptureFixture[str]) -> None:
    run, model = train(own(), **OPTIONS), net()
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "load_model(" in each)
    exec(line, {"safetensors": safetensors, "model": model})
    assert same_bits(dict(run.model.state_dict()), dict(model.state_dict()))


def test_an_interrupted_run_continues_as_if_it_had_not_been(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def interrupting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls.append(signal.raise_signal(signal.SIGINT) if len(calls) == 25 else None)  # type: ignore[func-returns-value, arg-type]
        return mean(model, batch)

    with pytest.raises(KeyboardInterrupt, match=r'train\(Recipe.of\(…\), resume="outputs/own-fp32-s0"\)') as stopped:
        train(own(interrupting), deterministic=True, **OPTIONS)
    assert isinstance(stopped.value, Interrupted)
    run = train(own(), resume=stopped.value.folder)
    assert "resumed after step" in capsys.readouterr().out
    whole = train(own(), run_name="whole", deterministic=True, **OPTIONS)
    assert whole["final"] == run["final"]
    assert same_bits(dict(run.model.state_dict()), dict(whole.model.state_dict()))
    assert evaluate(run)["metrics"]["loss"] == pytest.approx(run["final"]["valid/loss"])
    renamed = run.folder.rename(run.folder.with_name("renamed"))
    complete = train(own(), resume=renamed)
    assert (complete.model, complete.folder) == (None, renamed)


def test_a_run_that_is_interrupted_before_it_has_begun_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.run.run.observed", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted) as stopped:
        train(own(), **OPTIONS)
    assert stopped.value.folder is None


def test_a_recipe_of_files_is_trained_evaluated_sampled_and_compared(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    small: Any = {"recipe": "gpt2", "recipe.size": "nano", "recipe.context": 16, "data": "text", "tracking": "local"}
    small |= {"data.path": "text.txt", "data.cache_dir": "cache", "data.tokenizer": "bytes", "batch_size": 4}
    run = train(precision="bf16", steps=2, **small)
    assert evaluate(run, precision=["fp32", "bf16"], eval_samples=56)["precisions"].keys() == {"fp32", "bf16"}
    (text,) = generate(run, "The ", max_new_tokens=3)
    assert text.startswith("The ")
    compared = compare(arms="fp32,bf16", seeds=2, steps=3, log_every=1, **small)
    verdicts = {arm["label"]: arm["quality"]["verdict"] for arm in compared["arms"]}
    assert verdicts == {"fp32": "", "bf16": "NOT JUDGED"}  # of two seeds


def test_an_interrupted_comparison_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.runs.shell.run", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match="the runs that have ended are kept, and the same call") as stopped:
        compare("recipe=bignet", arms=["fp32", "bf16"], steps=100, tracking="local")
    assert stopped.value._render_traceback_() == [f"Interrupted: {stopped.value}"]  # what a notebook shows


def test_what_a_sample_draws_at_random_is_a_function_of_its_microbatch() -> None:
    data, samples = UserDataset(Noisy(), None), DataOrder(SAMPLES, 0).samples(5, 4)
    first = data.batch(samples)
    _ = torch.rand(1), np.random.rand(), random.random()
    assert same_bits(data.batch(samples), first)
    assert not same_bits(data.batch([sample._replace(seed=1) for sample in samples]), first)


def test_a_mean_over_other_targets_than_samples_is_weighted_by_their_number() -> None:
    x, y = torch.randn(SAMPLES, 5, 6, dtype=torch.float64), torch.randint(2, (SAMPLES, 5))
    for sample in range(2, SAMPLES):
        y[sample, sample % 5 :] = -100  # some have no targets
    data, model = TensorDataset(x, y), nn.Linear(6, 2).double()

    with pytest.warns(UserWarning, match="depends on micro_batch_size"):
        own(over_tokens, data, model)
    recipe = own(
        over_tokens,
        DataLoader(data, 12, collate_fn=lambda rows: list(map(torch.stack, zip(*rows, strict=True)))),
        model,
        targets=lambda batch: (batch[1] != -100).sum(),
    )
    options = OPTIONS | {"checkpoint": "none", "batch_size": "auto"}
    runs = [train(recipe, micro_batch_size=size, **options) for size in (1, 12)]
    one, other = (run.model.weight for run in runs)
    assert (one - other).norm() < 1e-10 * one.norm()
    alone, together = (run["final"]["valid/loss"] for run in runs)
    assert alone == pytest.approx(together)
    assert json.loads((runs[0].folder / "config.json").read_text())["batch_size"] == 12  # the DataLoader's


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: mean(model, batch) * len(batch["y"]),
        lambda model, batch: LossOutput(mean(model, batch), {}),
    ],
    ids=["a sum", "a mean as sums"],
)
def test_a_loss_that_is_no_mean_is_warned_of(loss: Callable[[Any, Any], Any]) -> None:
    with pytest.warns(UserWarning, match="depends on micro_batch_size"):
        own(loss)


def test_a_metric_that_is_a_mean_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the metric size of 8 samples is no sum"):
        own(lambda model, batch: LossOutput(mean(model, batch) * len(batch["y"]), {"size": mean(model, batch)}))


def test_samples_that_cannot_be_batched_are_refused() -> None:
    with pytest.raises(UserError, match="samples cannot be batched"):
        own(mean, [{"x": torch.ones(number + 1), "y": number} for number in range(SAMPLES)])


def test_a_mean_over_tokens_is_warned_of_where_only_some_samples_have_other_lengths() -> None:
    x, y = torch.randn(SAMPLES, 5, 6), torch.randint(2, (SAMPLES, 5))
    for sample in range(SAMPLES):
        if sample % (SAMPLES // 2):
            y[sample, 1 + sample % 4 :] = -100
    with pytest.warns(UserWarning, match="depends on micro_batch_size"):
        own(over_tokens, TensorDataset(x, y))


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_samples_that_are_not_finite_are_named(value: float, word: str) -> None:
    rows = [{"x": torch.full((6,), value), "y": torch.tensor(1)}] * 12
    with pytest.raises(UserError, match=rf"list: sample \d+ has {word} in \['x'\]"):
        Recipe.of(net(), mean, Noisy(), rows)


def test_infinity_that_the_loss_leaves_out_is_no_mistake(recwarn: pytest.WarningsRecorder) -> None:
    rows = [{"x": torch.ones(6), "y": torch.tensor(1), "mask": torch.tensor(-math.inf)}] * 12
    Recipe.of(net(), mean, rows, rows)
    assert not recwarn.list


def test_a_step_without_targets_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    train(own(targets=lambda batch: 0 * len(batch["y"])), **OPTIONS | {"checkpoint": "none"})
    assert "".join(capsys.readouterr()).count("has no targets") == 1


MISTAKES: dict[str, Callable[[], object]] = {
    "stpes is not a key": lambda: train("recipe=gpt2", stpes=3),
    "give options, as": lambda: train(200),  # type: ignore[arg-type]
    "steps=<object": lambda: compose(steps=object()),
    "or a config alone": lambda: train(compose(), steps=3),
    "cannot read data=synthetic": lambda: train(own(), data="synthetic"),
    "recipe.width=3 has no effect": lambda: train(own(), recipe={"width": 3}),
    "give them there": lambda: train("recipe=own"),
    "is a fresh process": lambda: compare(own(), arms=["fp32", "bf16"]),  # type: ignore[arg-type]
    "a scalar tensor": lambda: own(lambda model, batch: model(batch["x"])),
    "the loss raises ZeroDivisionError: division by zero": lambda: train(own(lambda m, b: 1 / 0), **OPTIONS),
    "raises IndexError: Target 2 is out of bounds": lambda: train(own(data=OUTSIDE, model=normed()), **OPTIONS),
    "weight has 16 bits": lambda: own(model=net().half()),
    "give a map-style dataset": lambda: own(data=iter([])),
    "WeightedRandomSampler of a": lambda: own(data=DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0], 1))),
    "RandomSampler of a": lambda: own(data=DataLoader(Noisy(), sampler=RandomSampler(Noisy(), replacement=True))),
    "the list of a": lambda: own(data=DataLoader(Noisy(), batch_sampler=[[0, 1], [2]])),
    "hold 'a text'": lambda: own(data=["a text", "another"]),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_exceptions_with_the_sentence_of_the_command_line(message: str) -> None:
    with pytest.raises(UserError, match=message):
        MISTAKES[message]()


@pytest.mark.parametrize("around", [torch.autocast("cpu"), torch.no_grad()], ids=["autocast", "no_grad"])
def test_training_inside_of_what_changes_it_is_refused(around: Any) -> None:
    with around, pytest.raises(UserError, match="train is called inside of"):
        train(own(), **OPTIONS)


def test_python_values_arrive_as_they_are() -> None:
    name = 'it\'s "a run", [b] ${c} \\ {d}: 1e3 = null'
    numbers = {"lr": np.float32(0.25), "options": {"betas": (0.5, 0.75)}}
    config = compose("recipe=bignet", precision="bf16", run_name=name, optimizer=numbers, freeze=["a.*"], threads=None)
    flat = flatten(config)
    wanted = {"precision.mode": "bf16", "run_name": name, "optimizer.lr": 0.25, "freeze": ["a.*"], "threads": None}
    assert {key: flat[key] for key in wanted} == wanted
    assert flat["optimizer.options"]["betas"] == [0.5, 0.75]


def test_a_password_is_in_no_file_of_a_run() -> None:
    given = {"tracking": "mlflow", "tracking.uri": "http://me:s3cret@127.0.0.1:9", "tracking.upload_timeout_s": 0}
    run = train(own(), **OPTIONS | given)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert any(path.name == "state.json" for path in files)
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
