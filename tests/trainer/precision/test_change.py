"""The format changes during a run: weights, optimizer, data order and generators go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mantissa.formats import FORMATS
from tests.helpers import GPT2, copied, same_bits, trainer_of
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.store import Snapshot
from trainer.parallel.world import World
from trainer.trainer import Trainer

STEPS, UNTIL = 6, 3
RUN = (*GPT2, "recipe.dropout=0.1", f"steps={STEPS}", "deterministic=true", "ema=default")
PAIRS = [
    *(("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "nvfp4"), ("nvfp4", "bf16"), ("nvfp4", "fp32")),
    *(("bf16", "fp16"), ("fp16", "bf16"), ("fp8", "bf16"), ("nvfp4", "mxfp8")),
]


def changing(first: str, then: str, *more: str) -> Trainer:
    return trainer_of(*RUN, f"precision={first}", f"precision.then={then}", f"precision.until={UNTIL}", *more)


def steps(trainer: Trainer, until: int = STEPS, folder: Path | None = None) -> list[Any]:
    """Each step's record and the state after it, up to a step; with a folder, a checkpoint of each, too."""
    batches, taken = trainer.batches(), []
    while trainer.step < until:
        taken.append((trainer.train_step(next(batches)), copied(trainer.state_dict())))
        if folder is not None:
            checkpoint.write(folder, Snapshot.of(trainer.state_dict(), {}, World()), None, World())
    return taken


def saved(folder: Path, step: int) -> CheckpointReader:
    return CheckpointReader(checkpoint.find_verified(folder, step))


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=[f"{a} {b}" for a, b in PAIRS])
def test_each_step_is_that_of_a_run_in_its_format(first: str, then: str, tmp_path: Path) -> None:
    """In the first format up to the change; from the same state on, in the second one after it."""
    if "fp8" in f"{first}{then}":
        pytest.importorskip("torchao", reason="torchao is optional")
    taken = steps(trainer := changing(first, then), folder=tmp_path)
    assert same_bits(taken[:UNTIL], steps(trainer_of(*RUN, f"precision={first}"), UNTIL))
    other = trainer_of(*RUN, f"precision={then}")
    scale = other.loss_scale.state_dict()
    other.restore(saved(tmp_path, UNTIL))
    other.loss_scale.load_state_dict(scale)  # a new one, where there is one
    assert same_bits(taken[UNTIL:], steps(other))
    assert trainer.precision.format is FORMATS[then]


@pytest.mark.parametrize("step", [UNTIL - 1, UNTIL, UNTIL + 1])
def test_a_resume_across_the_change_is_the_same_run(step: int, tmp_path: Path) -> None:
    whole = steps(changing("fp16", "nvfp4"), folder=tmp_path)
    resumed = changing("fp16", "nvfp4")
    resumed.restore(saved(tmp_path, step))
    assert resumed.precision.mode == ("fp16" if step <= UNTIL else "nvfp4")
    assert same_bits(steps(resumed), whole[step:])
