from __future__ import annotations

import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from mantissa.tensors import random_state, set_random_state
from tests.helpers import same_bits
from trainer import files
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import evaluated_weights, load
from trainer.checkpoint.schema import WEIGHTS_SINCE, best_step, write_manifest
from trainer.checkpoint.store import CheckpointNotWritten, Snapshot
from trainer.errors import UserError
from trainer.optim.optimizer import Optimizer
from trainer.optim.state import training_state
from trainer.parallel.world import World
from trainer.run_folder import RunFolder
from trainer.tracking import fetch

CPU = torch.device("cpu")


class Net(nn.Module):
    """A convolution in channels_last, batch norm's buffers, a tied weight, a number without dimensions, an integer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(0.5 + seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3))) * self.temperature


OPTIMIZERS = {
    "adamw": Optimizer("AdamW", weight_decay=0.1, options={"betas": [0.9, 0.95]}),
    "adamw unfused": Optimizer("AdamW", fused=False),
    "adamw with bf16 state": Optimizer("AdamW", weight_decay=0.1, state="bf16"),
    "sgd": Optimizer("SGD", lr=0.1, options={"momentum": 0.9, "nesterov": True}),
    "plain sgd": Optimizer("SGD", lr=0.1),
    "rmsprop": Optimizer("RMSprop", options={"momentum": 0.9}),
    **{
        name: Optimizer(name)
        for name in ["Rprop", "Adafactor", "NAdam", "ASGD", "Adagrad", "Adadelta", "Adamax", "RAdam", "Lamb"]
    },
}


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(5, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, step: int, net: nn.Module, optimizer: Any, progress: Any, score: float | None = None) -> Path:
    snapshot = Snapshot.of(training_state(step, net, optimizer, None, {}, random_state(CPU)), progress, World())
    return checkpoint.write(folder, snapshot, score, World())


def write(folder: Path, step: int = 1, net: nn.Module | None = None, **progress: Any) -> Path:
    net = net or Net(0)
    optimizer = OPTIMIZERS["adamw"].build(net, CPU)
    steps(net, optimizer, 1)
    return save(folder, step, net, optimizer, progress)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_optimizer_continue_bit_for_bit(name: str, tmp_path: Path) -> None:
    net, other = Net(0), Net(1)
    optimizer, other_optimizer = (OPTIMIZERS[name].build(each, CPU) for each in (net, other))
    steps(net, optimizer, 3)
    progress = {"best": None, "losses": [0.1, 1 / 3], "infinite": float("inf")}
    assert save(tmp_path, 3, net, optimizer, progress) == tmp_path / "step-00000003"
    saved = load(tmp_path)
    saved.restore(other, other_optimizer)
    assert (saved.step, saved.progress) == (3, progress)
    for _ in range(2):
        assert same_bits(dict(other.state_dict()), dict(net.state_dict()))
        assert same_bits(other_optimizer.state_dict(), optimizer.state_dict())
        steps(net, optimizer, 3, seed=1)
        steps(other, other_optimizer, 3, seed=1)


def test_tied_weights_are_saved_once_and_tied_again(tmp_path: Path) -> None:
    with safe_open(write(tmp_path) / "model.safetensors", "pt") as file:
        assert len({"embedding.weight", "head.weight"} & set(file.keys())) == 1
    net = Net(5)
    load(tmp_path).restore(net, None)
    assert net.head.weight is net.embedding.weight


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        one = [torch.rand(3), np.random.rand(3).tolist(), random.random()]
        return [*one, torch.randn(3), np.random.randn(), random.gauss(0, 1)]

    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    draw()  # leaves half a pair of normal numbers behind in numpy's and Python's generators
    write(tmp_path)
    expected = draw()
    draw()
    saved = load(tmp_path)
    assert saved.rng(1) is None
    set_random_state(saved.rng(0), CPU)
    assert same_bits(draw(), expected)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "model.safetensors": lambda file: os.truncate(file, file.stat().st_size - 10),
    "state.json": Path.unlink,
    "manifest.json": Path.unlink,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_of_damaged_checkpoints_the_newest_before_them_is_taken(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    for step in (3, 2):
        DAMAGE[name](tmp_path / f"step-0000000{step}" / name)
        caplog.clear()
        assert load(tmp_path).step == step - 1
        assert "step-00000003 is damaged" in caplog.messages[0]
        assert name in caplog.messages[0]
    with pytest.raises(UserError, match="step-00000002 is damaged"):
        load(tmp_path, 2)
    checkpoint.set_aside(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("*.damaged")) == [
        f"step-0000000{step}.damaged" for step in (2, 3)
    ]
    assert checkpoint.steps(tmp_path) == [1]
    DAMAGE[name](tmp_path / "step-00000001" / name)
    with pytest.raises(UserError, match="step-00000001 is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(("number", "weights"), [(WEIGHTS_SINCE, "/run"), (WEIGHTS_SINCE - 1, "/run/best")])
def test_another_format_is_no_damage_and_not_resumed(number: int, weights: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = tmp_path / "run/checkpoints"
    manifest = write(folder) / "manifest.json"
    write_manifest(manifest.parent, files.read_json(manifest) | {"format": number})
    with pytest.raises(UserError, match=rf"format {number},.* from its weights with init_from=.*{weights}$"):
        load(folder)


def test_a_new_run_starts_from_the_weights_of_the_format_before(tmp_path: Path) -> None:
    manifest = write(tmp_path, 1) / "manifest.json"
    expected = evaluated_weights(tmp_path, 1)
    content = files.read_json(manifest)
    write_manifest(manifest.parent, content | {"format": WEIGHTS_SINCE, "score": 1.0})
    assert best_step(tmp_path) == 1
    assert same_bits(evaluated_weights(tmp_path, 1), expected)


def test_a_run_in_mlflow_of_the_format_before_is_found_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write(tmp_path / "checkpoints", 1) / "manifest.json"
    write_manifest(manifest.parent, files.read_json(manifest) | {"format": WEIGHTS_SINCE})
    files.write_json(tmp_path / files.TRACKING_FILE, {"run_id": "7" * 32})
    there = SimpleNamespace(
        info=SimpleNamespace(run_name="run"), data=SimpleNamespace(tags={fetch.FOLDER_TAG: str(tmp_path)})
    )
    monkeypatch.setattr(fetch, "fetched_run", lambda *given: nullcontext((None, there)))
    monkeypatch.setattr(fetch, "complete_steps", lambda *given: [1])
    assert fetch.fetch("init_from", f"mlflow:{'7' * 32}", None, str(tmp_path)) == tmp_path


def test_an_interrupted_save_is_invisible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    for module, broken in ((checkpoint, "sha256"), (files, "flush"), (Path, "rename")):

        def pull_the_plug(*of: object) -> str:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module, broken, pull_the_plug)
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path, 2)
        assert checkpoint.steps(tmp_path) == [1]
        assert load(tmp_path).step == 1
    write(tmp_path, 2)  # the remains of the previous attempt do not matter
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_step_that_is_saved_already_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, 1, note="first")
    with pytest.raises(CheckpointNotWritten, match="step-00000001"):
        write(tmp_path, 1, note="second")
    assert load(tmp_path, 1).progress["note"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_files_and_their_names_are_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parents of new folders too: else a power cut could take the whole of checkpoints/."""
    flushed: dict[Path, set[str]] = defaultdict(set)

    def note(path: Path) -> None:
        flushed[path] |= {entry.name for entry in path.iterdir()} if path.is_dir() else {str(path.stat().st_size)}

    monkeypatch.setattr(files, "flush", note)
    folder = RunFolder.create(str(tmp_path / "outputs"), "run")
    folder.write_config({"seed": 0})
    written = write(folder.checkpoints, 1)
    assert "outputs" in flushed[tmp_path]
    assert "run" in flushed[tmp_path / "outputs"]
    assert {"config.json", "checkpoints"} <= flushed[folder.path]
    assert "step-00000001" in flushed[folder.checkpoints]
    assert flushed[folder.path / ".config.json.partial"] == {str((folder.path / "config.json").stat().st_size)}
    whole = {path.name: sizes for path, sizes in flushed.items() if written.name in path.parent.name}
    assert {path.name: {str(path.stat().st_size)} for path in written.iterdir()}.items() <= whole.items()


@pytest.mark.parametrize("name", ["step-original", "step-00000009x", "step-9", "step-٠٠٠٠٠٠٠٩", ".step-a.old"])
def test_what_a_person_or_a_system_leaves_among_checkpoints_is_ignored(name: str, tmp_path: Path) -> None:
    shutil.copytree(write(tmp_path, 3), tmp_path / name)
    (tmp_path / "step-00000003/._state.json").write_bytes(b"x")
    assert (checkpoint.steps(tmp_path), checkpoint.best_step(tmp_path), load(tmp_path).step) == ([3], None, 3)
    write(tmp_path, 4)
    checkpoint.prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "step-00000004"])


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(0, 2, [2, 5]), (1, None, [5]), (2, None, [4, 5]), (1, 2, [2, 5]), (1, 5, [5]), (9, 1, [1, 2, 3, 4, 5])],
)
def test_prune_keeps_the_newest_and_the_best(keep: int, best: int | None, left: list[int], tmp_path: Path) -> None:
    for rest in (".step-00000009.partial", ".step-00000001.old"):  # of a process that was killed
        (tmp_path / rest).mkdir()
    net = Net(0)
    for step in range(1, 6):
        save(tmp_path, step, net, OPTIMIZERS["sgd"].build(net, CPU), {}, best and float(step != best))
    checkpoint.prune(tmp_path, keep)
    assert checkpoint.steps(tmp_path) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in left]
