"""The comparison of a certificate finds one bit, one batch, one rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evidence.certificate.differences import differences_between
from mantissa.generators import random_state
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.store import Snapshot
from trainer.files import flush
from trainer.optim.state import training_state
from trainer.parallel.world import World

Change = Callable[[Any], None]


def run(folder: Path, change_line: Change = lambda lines: None, change_state: Change = lambda state: None) -> Path:
    """A run folder of three steps with a trace, a log and a checkpoint."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rng = random_state(torch.device("cpu"))
    scale = {"scale": 4.0}
    change_state({"model": model, "optimizer": optimizer, "progress": {"loss_scale": scale}, "rng": rng})
    state = training_state(3, model, optimizer, None, scale, rng)
    folder.mkdir()
    checkpoint.write(folder / "checkpoints", Snapshot.of(state, {}, World()), None, World(), flush)
    lines = [
        {"step": step, "data": "d", "lr": (0.1).hex(), "loss": (1.5).hex(), "skipped": False} for step in (1, 2, 3)
    ]
    change_line(lines)
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "time": 5}\n')
    return folder


def flip(tensor: Tensor) -> None:
    tensor.detach().flatten().view(torch.uint8)[0] ^= 1


def test_equal_runs_are_bitwise_also_with_steps_that_were_trained_twice(tmp_path: Path) -> None:
    def again(lines: list[dict[str, Any]]) -> None:
        lines[2:2] = [{"killed": "step", "after_step": 2, "count": 0}, {"resumed_after": 1}, dict(lines[1])]

    result = differences_between(run(tmp_path / "whole"), run(tmp_path / "killed", again), 3)
    assert result.judge(0)[0] == "BITWISE"
    assert (result.steps, result.repeated_steps) == (3, 1)
    assert result.tensors > 8


@pytest.mark.parametrize(
    ("change", "verdict", "named"),
    [
        (lambda s: flip(s["model"].weight), "ULP <= 1", "weights/weight, by up to 1 ULPs"),
        (lambda s: flip(s["optimizer"].state[s["model"].bias]["exp_avg_sq"]), "ULP <= 1", "optimizer/bias.exp_avg_sq"),
        (lambda s: s["model"].weight.data.add_(1), "DIVERGED IN tensor: weights/weight", "weights/weight, by up to"),
        (lambda s: s["model"].weight.data[0].fill_(torch.nan), "DIVERGED IN tensor: weights/weight", "more than"),
        (lambda s: flip(s["rng"]["torch"]), "DIVERGED IN tensor: rng/0/torch", "rng/0/torch, in more than rounding"),
        (lambda s: s["progress"]["loss_scale"].update(scale=2.0), "DIVERGED IN progress: loss_scale.scale", ", by"),
    ],
)
def test_a_difference_in_the_state_is_found(change: Change, verdict: str, named: str, tmp_path: Path) -> None:
    result = differences_between(run(tmp_path / "whole"), run(tmp_path / "killed", change_state=change), 3)
    assert result.judge(4)[0].startswith(verdict)
    assert named in result.lost[0]
    assert result.judge(0)[0].startswith("DIVERGED")


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1].update(lr=(0.1000001).hex()),
        lambda lines: lines[1].update(data="e"),
        lambda lines: lines[1].update(skipped=True),
        lambda lines: lines.insert(1, lines[1] | {"loss": (1.25).hex()}),  # the step was trained again, and right
    ],
)
def test_a_difference_in_a_step_is_found(change: Change, tmp_path: Path) -> None:
    result = differences_between(run(tmp_path / "whole"), run(tmp_path / "killed", change), 3)
    assert result.judge(1e9)[0] == "DIVERGED AT step 2"
    assert "at step 2 it is" in result.lost[0] or "1 step (2) taken once too often" in result.lost[0]
