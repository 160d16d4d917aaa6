"""The number of processes does not change the training: real processes, gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.parallel.conftest import Found
from tests.parallel.ranks import flag_obeyed
from trainer.data.loader import Batching, DataOrder

Ranks = Callable[[str, int], Found]
MODES = ("ddp", "fsdp")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("processes", [2, 4])
def test_gradient_loss_norm_and_score_are_those_of_one_process(processes: int, mode: str, ranks: Ranks) -> None:
    """1 × 4, 2 × 2 and 4 × 1 microbatches of 2 samples with unequal numbers of targets, fp64, clipped by norm."""
    (alone,) = ranks("all", 1)
    expected = alone["gradient"]["single"]["fp64 2"]
    assert expected["norm"] > 0.1  # far above the clip
    for found in ranks("gradient" if processes == 4 else "all", processes):
        for case, step in found["gradient"][mode].items():
            if not case.startswith("fp64"):
                continue
            for key in ("gradient", "clipped", "weights"):
                assert step[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-15), (case, key)
            assert step["norm"] == pytest.approx(expected["norm"], rel=1e-12)
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-12)
            assert step["valid"]["loss"] == pytest.approx(expected["valid"]["loss"], rel=1e-12)
            assert step["units"] == expected["units"]


@pytest.mark.parametrize("mode", MODES)
def test_an_infinity_on_one_rank_skips_the_step_everywhere(mode: str, ranks: Ranks) -> None:
    """Also where the fused optimizer is given the flag, as on CUDA; under FSDP a plain tensor among DTensors."""
    for found in ranks("all", 2):
        assert found["flag"][mode] == flag_obeyed(mode)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_exchanged_once_a_step(mode: str, ranks: Ranks) -> None:
    for rank in ranks("all", 2):
        assert rank["communication"][mode] == {"microbatches": 4, "exchanged": 1}


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_of_16_bit_weights_add_up_in_fp32_on_every_rank(mode: str, ranks: Ranks) -> None:
    """64 a rank. What ranks exchange is rounded to 16 bits a few times, not once for each microbatch (1 %)."""
    (alone,) = ranks("all", 1)
    expected = torch.tensor(alone["accumulation"]["single"]["gradient"])
    for found in ranks("all", 2):
        step = found["accumulation"][mode]
        assert step["cleared"]
        assert (torch.tensor(step["gradient"]) - expected).norm() < 3e-3 * expected.norm()


@pytest.mark.skipif(
    "param_dtype_override_fn" not in MixedPrecisionPolicy.__dataclass_fields__, reason="this torch gathers in one dtype"
)
def test_weights_are_gathered_as_autocast_rounds_them_and_no_bit_changes(ranks: Ranks) -> None:
    for rank in ranks("all", 2):
        found = rank["gathered"]["bf16"]
        assert found["same bits"]
        assert found["rounded"]["bytes"] < 0.6 * found["fp32"].pop("bytes")  # embeddings are small here
        assert found["rounded"]["mlp.c_fc.weight"] == "torch.bfloat16"
        assert {found["rounded"]["ln_1.weight"], *found["fp32"].values()} == {"torch.float32"}


def test_a_run_that_changes_its_format_gathers_whole_weights(ranks: Ranks) -> None:
    for rank in ranks("all", 2):
        found = rank["gathered"]["bf16 precision.then=fp32 precision.until=1"]
        assert found["rounded"] == found["fp32"]
        assert found["fp32"]["mlp.c_fc.weight"] == "torch.float32"


def test_results_and_errors_of_rank_0_reach_all_ranks(ranks: Ranks) -> None:
    first, second = (rank["exchange"] for rank in ranks("all", 2))
    assert second.pop("bug") == ["RunError", "rank 0 failed: x", 1]
    assert first.pop("bug") == ["ValueError", "x", None]
    same = {"result": "from 0", "mistake": ["UserError", "no; set a=1", 2], "signal": ["Interrupted", "enough", 143]}
    same["remedies"] = ["no", ["a=1"], "b=2", True]
    assert first == second == same


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_step_takes_the_same_samples_whatever_the_number_of_processes(processes: int) -> None:
    def steps(ranks: int, micro: int) -> list[set[tuple[int, int | None]]]:
        hands = [list(Batching(8, micro, ranks, rank).microbatches(DataOrder(21, 5), 1, 4)) for rank in range(ranks)]
        in_a_step = 8 // (micro * ranks)
        assert all(len(hand) == 4 * in_a_step for hand in hands)
        return [
            {sample for hand in hands for batch in hand[n * in_a_step : (n + 1) * in_a_step] for sample in batch}
            for n in range(4)
        ]

    assert steps(processes, 2) == steps(1, 8)
    assert all(len(step) == 8 for step in steps(processes, 1))
