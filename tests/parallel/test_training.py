"""Frozen weights and optimizers under DDP and FSDP2: real processes, gloo."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.test_gradients import MODES, Ranks
from tests.parallel.training import RULES

FROZEN = [f"0.{layer}.{kind}" for layer in (0, 2, 4, 6) for kind in ("weight", "bias")] + ["2.4.bias"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_two_processes_train_as_one_does_and_resume_exactly(rule: str, mode: str, ranks: Ranks) -> None:
    (alone,) = ranks("training", 1)
    expected = alone["training"]["single"][rule]
    assert expected["resumed alike"]
    assert expected["moved in the last step"]
    tolerance = 0.02 if "bf16" in rule else 1e-3
    change = torch.tensor(expected["change"])
    for found in (rank["training"][mode][rule] for rank in ranks("training", 2)):
        if (rule, mode) == ("adafactor", "fsdp"):
            assert "use parallel=ddp, or another optimizer" in found
            continue
        assert found["model_flops"] == expected["model_flops"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert (torch.tensor(found["change"]) - change).norm() < tolerance * change.norm()
        assert found["score"] == pytest.approx(
            expected["score"], rel=tolerance
        )  # of averaged weights, if there are any
        assert found["resumed alike"]
        assert found["unchanged"] == expected["unchanged"]
        if rule.startswith("lora"):
            assert len(found["unchanged"]) > 40
            assert not [name for name in found["unchanged"] if ".lora_" in name]
        else:
            assert found["unchanged"] == (FROZEN if rule.startswith("freeze") else [])
        assert found["saved"] == expected["saved"]
        assert not set(found["saved"]) & {f"optimizer/{name}" for name in found["unchanged"]}
