"""Saving in the background, a full disk, and which checkpoints are kept."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers import same_bits
from trainer import files
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint import writer
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import Checkpoint, CheckpointNotWritten
from trainer.checkpoint.writer import CheckpointWriter, infinite_buffers
from trainer.errors import NonFiniteError
from trainer.hardware import CUDA
from trainer.optim.state import training_state
from trainer.parallel.world import World


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def save(writer: CheckpointWriter, step: int, *job: Any, progress: Any = None, score: float | None = None) -> float:
    """How long the training waited."""
    return writer.save(training_state(step, *job, None, {}, {}), progress or {}, score)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back whatever is written until it is set."""
    event = threading.Event()
    write = checkpoint.write

    def held(*given: Any) -> Path:
        assert event.wait(300)
        return write(*given)

    monkeypatch.setattr(writer.checkpoint, "write", held)
    return event


def test_the_written_state_is_that_of_the_save_while_training_continues(tmp_path: Path, gate: threading.Event) -> None:
    model, optimizer = job()
    background = CheckpointWriter(Checkpoint(), tmp_path, World())
    for step in (1, 2):  # the second one into the first one's host memory
        gate.clear()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moment = optimizer.state[next(model.parameters())]["exp_avg"].clone()
        progress = {"losses": [1.0]}
        assert save(background, step, model, optimizer, progress=progress) > 0
        assert checkpoint.steps(tmp_path) == list(range(1, step))[-1:]  # not yet
        train(model, optimizer)
        progress["losses"].append(2.0)
        gate.set()
        background.finish()
        saved = load(tmp_path)
        assert (saved.step, saved.progress) == (step, {"losses": [1.0]})
        tensors = saved.tensors()
        assert same_bits({name: tensors[f"weights/{name}"] for name in before}, before)
        assert same_bits(tensors["optimizer/weight.exp_avg"], moment)
        assert not same_bits(dict(model.state_dict()), before)
    assert background.facts()["saved"] == 2


@pytest.mark.parametrize("block", [2**13, 2**28], ids=["several blocks", "one block"])
def test_page_locked_memory_is_little_more_than_the_state(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch rounds each allocation up to a power of two, which would take 1.9 times as much for each of these."""
    empty, locked = torch.empty, 0

    def noted(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        nonlocal locked
        found = empty(*size, **options)
        locked += pin_memory * (1 << (found.nbytes - 1).bit_length())
        return found

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(writer, "kind_of", lambda device: CUDA)
    monkeypatch.setattr(writer, "_BLOCK", block)
    state = {f"large {number}": torch.randn(3, 89) for number in range(20)}
    state |= {"half": torch.randn(5).half(), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2)}
    snapshot = checkpoint.Snapshot(1, {"model.safetensors": state}, "", {})
    ours = CheckpointWriter(Checkpoint(), tmp_path, World())
    for _ in range(2):
        copy = ours._copy(snapshot).files["model.safetensors"]
        assert same_bits(copy, state)
    size = sum(tensor.nbytes for tensor in state.values())
    assert size <= locked <= 1.6 * size
    save_file(copy, tmp_path / "copy.safetensors")
    assert same_bits(load_file(tmp_path / "copy.safetensors"), state)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_loses_only_that_checkpoint(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("mantissa").propagate = True
    ours = CheckpointWriter(Checkpoint(background=background), tmp_path, World())
    spare = checkpoint.SPARE_BYTES
    for step, score, spared in ((1, 0.5, spare), (2, 0.1, 1 << 60), (3, 0.7, spare)):
        monkeypatch.setattr(checkpoint, "SPARE_BYTES", spared)
        save(ours, step, *job(), score=score)
        ours.finish()
        assert (ours.saved, ours.failed) == {1: (1, 0), 2: (1, 1), 3: (2, 1)}[step]
    for words in ("the checkpoint of step 2 was not saved (", " are needed, ", "training continues"):
        assert words in caplog.text
    # The best that was kept stays: the better one of step 2 is not on the disk.
    assert (checkpoint.steps(tmp_path), checkpoint.best_step(tmp_path)) == ([1, 3], 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_log_is_on_the_disk_before_a_manifest_has_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    ours = CheckpointWriter(Checkpoint(background=False), tmp_path / "checkpoints", World())
    flushed: list[str] = []
    monkeypatch.setattr(files, "flush", lambda path: flushed.append(path.name))
    run = {"config": None, "log": {"bytes": 0, "sha256": ""}}
    ours.save(training_state(1, *job(), None, {}, {}), {}, None, run)
    assert flushed.index("metrics.jsonl") < flushed.index("manifest.json")
    flushed.clear()
    ours.rate(1, 0.5, run)
    assert flushed[:2] == ["metrics.jsonl", ".manifest.json.partial"]


def test_a_bug_in_the_thread_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(writer.checkpoint, "write", broken)
    ours = CheckpointWriter(Checkpoint(), tmp_path, World())
    save(ours, 1, *job())
    with pytest.raises(ZeroDivisionError):
        ours.finish()


class Others(World):
    """This process is one of two, and notes what it tells the other, which has written its part."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.told: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [value, ({}, None)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [OSError("full"), ValueError("a bug")])
def test_a_rank_tells_the_others_of_any_error_and_nothing_is_left(
    error: Exception, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for its part; of an error that nobody expects they would wait until the job times out."""
    monkeypatch.setattr(checkpoint, "save_file", Mock(side_effect=error))
    temporary = tmp_path / ".step-00000001.partial"
    temporary.mkdir()  # as another rank has made it
    snapshot = checkpoint.Snapshot(1, {"rng.safetensors": {}}, "", {})
    with pytest.raises(ValueError if isinstance(error, ValueError) else CheckpointNotWritten):
        checkpoint.write(tmp_path, snapshot, None, others := Others(rank))
    assert others.told[-1] == (None, f"rank {rank}: {error}")
    assert temporary.exists() == (rank == 1)  # rank 0 removes it


class Masked(nn.Linear):
    """A layer with a mask for attention: -inf above the diagonal, kept in the checkpoint."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("mean", torch.zeros(4))


def test_a_mask_of_infinities_is_saved_and_restored_and_other_infinities_are_refused(tmp_path: Path) -> None:
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters())
    ours = CheckpointWriter(Checkpoint(background=False), tmp_path, World(), infinite_buffers(model))
    save(ours, 1, model, optimizer)
    other = Masked()
    nn.init.zeros_(other.weight)
    load(tmp_path).restore(other, None)
    assert same_bits(dict(other.state_dict()), dict(model.state_dict()))
    model.state_dict()["mean"][0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"mean is not finite after step 2"):
        save(ours, 2, model, optimizer)
