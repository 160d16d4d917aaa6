"""A watched loop on two ranks: both stop at the same step, and each replays its own batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forks
from tests.parallel.conftest import FORKED_TORCHRUN, PROJECT, Found, forked_environment


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind of loop, with what its ranks found."""
    folder = tmp_path_factory.mktemp("watched")
    command = [*FORKED_TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "tests.parallel.watched", str(folder)]
    ended = forks.run(command, cwd=PROJECT, env=forked_environment(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


def found(folder: Path) -> Found:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_stop_at_the_bad_step_and_the_guilty_one_names_the_module(kind: str, watched: Path) -> None:
    innocent, guilty = found(watched / kind)
    assert [innocent["same"], guilty["same"]] == [True, True]  # as without a watch, and before the bad update
    assert guilty["error"].startswith("step 3: the loss is not finite (rank1")
    assert "root" in guilty["error"]
    assert "fp32 BREAKS · bf16 BREAKS" in guilty["said"][-1]  # with the batches as they were before FSDP2 cast them
    assert innocent["error"].startswith("step 3: a gradient is not finite (rank0, which replays its own batches); its")
    assert (watched / kind / "pages" / "rank1" / "report.html").exists()
    assert {"first.weight.grad", "head.weight.grad"} <= {*innocent["overflow"]}
    assert innocent["lost"] == [0.0]
    assert innocent["differences"] == []
    assert "requested: bf16" in innocent["said"][0]
    assert not any("requested" in each for each in guilty["said"])  # once, not on every rank
    if kind == "fsdp":
        expected = "shards float32, computes in bfloat16, sums gradients in float32"
        assert innocent["effective"]["FSDP2"] == expected


def test_one_rank_alone_can_be_watched(watched: Path) -> None:
    alone, other = found(watched / "ddp_alone")
    assert [alone["same"], other["same"]] == [True, True]
    assert "requested: bf16" in alone["said"][0]
    assert not other["said"]


def test_fsdp2_of_16_bit_weights_is_a_silent_difference(watched: Path) -> None:
    """The policy asks for bf16 and gets what is bf16 already (accelerate's upcast that does nothing)."""
    innocent, guilty = found(watched / "fsdp_low")
    text = " ".join(innocent["differences"])
    assert "FSDP2 shards weights that are bfloat16 already" in text
    assert "call model.float() before fully_shard" in text
    assert "sums the ranks' gradients in bfloat16" in text
    assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in text
    assert "cannot be replayed: FSDP2 shards its weights; give Watch(build=…)" in guilty["error"]


def test_an_optimizer_made_before_fsdp2_changes_nothing(watched: Path) -> None:
    innocent, _ = found(watched / "fsdp_early")
    assert "4 of 4 tensors of the optimizer are not the model's parameters" in innocent["differences"][0]
