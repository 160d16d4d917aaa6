"""Runs on token ids without a tokenizer: what they keep is enough for all that is done with a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inference.evaluate import evaluate
from inference.generate import generate
from tests.command_line.conftest import Result, Train

SMALL = ("recipe=gpt2", "batch_size=4", "eval_samples=4", "tracking=local", "profiler=none", "device=cpu")
NEW = (*SMALL, "recipe.size=nano", "recipe.context=16")
IDS = ("data=tokens", "data.path=ids.bin")


@pytest.fixture
def trained(succeed: Train, folder: Path) -> Path:
    """The run ``first``; ids.bin, and other.bin with fewer ids."""
    rng = np.random.default_rng(0)
    rng.integers(0, 99, 5000).astype(np.uint16).tofile("ids.bin")
    rng.integers(0, 50, 3000).astype(np.uint16).tofile("other.bin")
    succeed(*NEW, *IDS, "steps=2", "run_name=first", "loader.workers=1")
    return folder / "outputs" / "first"


def test_a_run_on_ids_goes_on_and_is_used(
    trained: Path, succeed: Train, train: Train, script: Callable[..., Result]
) -> None:
    succeed(*NEW, *IDS, "steps=4", "run_name=first", "resume=auto")
    assert json.loads((trained / "summary.json").read_text())["step"] == 4
    done = script(generate, f"run={trained}", "prompt=<12><7>", "max_new_tokens=3", "temperature=0")
    assert done.out.startswith("<12><7><")
    assert script(generate, f"run={trained}", "prompt=words").code == 2  # which have no ids
    assert (
        "'<99>' has what the model's tokenizer does not know" in script(generate, f"run={trained}", "prompt=<99>").err
    )
    for other in ((), ("data.path=other.bin",), ("data.path=other.bin", "split=all")):
        assert script(evaluate, f"run={trained}", *other).code == 0
    # The ids of another run are those of this one, though its own data has fewer.
    succeed(*SMALL, "data=tokens", "data.path=other.bin", f"init_from={trained}", "steps=1", "run_name=second")
    for weights in ("first", "second"):
        config = json.loads((trained.parent / weights / "best" / "config.json").read_text())
        assert config["vocab_size"] == 99
    Path("text.txt").write_text("words " * 999)
    done = train(*SMALL, "data=text", "data.path=text.txt", f"init_from={trained}", "steps=1")
    assert (done.code, "without a tokenizer" in done.err) == (2, True)


def test_ids_that_the_model_does_not_know_are_named(trained: Path, script: Callable[..., Result], train: Train) -> None:
    np.full(3000, 99, np.uint16).tofile("beyond.bin")
    assert "id number 0 is 99" in script(evaluate, f"run={trained}", "data.path=beyond.bin").err
    assert "id number 0 is 99" in train(*SMALL, "data=tokens", "data.path=beyond.bin", f"init_from={trained}").err
