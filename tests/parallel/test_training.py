"""Frozen weights and optimizers under DDP and FSDP2: real processes, gloo."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.test_gradients import MODES, Ranks
from tests.parallel.training import REFUSED_BY_FSDP, RULES

LOSES_UPDATES = ("bf16_sr", "bf16_pure")
"""Modes in which a gradient that is rounded once more moves a weight by a whole number more or less."""
FROZEN = [f"0.{layer}.{kind}" for layer in (0, 2, 4, 6) for kind in ("weight", "bias")] + ["2.4.bias"]


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        (mode, rule)
        for mode in MODES
        for rule in RULES
        if (mode, rule) not in {("fsdp", name) for name in REFUSED_BY_FSDP}
    ],
)
def test_two_processes_train_as_one_does_and_resume_exactly(rule: str, mode: str, ranks: Ranks) -> None:
    (alone,) = ranks("all", 1)
    expected = alone["training"]["single"][rule]
    assert expected["resumed alike"]
    assert expected["moved in the last step"]
    tolerance = 0.02 if "16" in rule else 1e-10 if rule == "fp64" else 1e-3
    change = torch.tensor(expected["change"])
    first, second = (rank["training"][mode][rule] for rank in ranks("all", 2))
    for key in ("losses", "change", "numerics"):  # bf16_sr rounds by the same random numbers
        assert first[key] == second[key]
    for found in (first, second):
        assert found["model_flops"] == expected["model_flops"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        if rule not in LOSES_UPDATES:
            assert (torch.tensor(found["change"]) - change).norm() < tolerance * change.norm()
        for step, metrics in expected["numerics"].items():  # of sharded weights the sums over the ranks
            for name in ("edq", "grad_flushed", "lost_updates", "scale_headroom_bits"):
                other = found["numerics"][step].get(f"numerics/{name}")
                assert other == pytest.approx(metrics.get(f"numerics/{name}"), abs=0.1), name
        assert found["score"] == pytest.approx(expected["score"], rel=tolerance)  # of averaged weights, if any
        assert found["resumed alike"]
        assert found["unchanged"] == expected["unchanged"]
        if rule.startswith("lora"):
            assert len(found["unchanged"]) > 40
            assert not [name for name in found["unchanged"] if ".lora_" in name]
        else:
            assert found["unchanged"] == (FROZEN if rule.startswith("freeze") else [])
        assert found["saved"] == expected["saved"]
        kept = {key.removeprefix("optimizer/").rpartition(".")[0] for key in found["saved"]}
        assert kept.isdisjoint(found["unchanged"])
        masters = sum(key.endswith(".master_weight") for key in found["saved"])
        assert (masters > 0) == rule.endswith("_master")


@pytest.mark.parametrize("rule", REFUSED_BY_FSDP)
def test_what_shards_cannot_do_is_refused(rule: str, ranks: Ranks) -> None:
    for rank in ranks("all", 2):
        assert REFUSED_BY_FSDP[rule][1] in rank["refusals"][rule]
