"""The hold-out faults: what the doctor names, and that the list of what it does not name is exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torchvision
from torchvision.models import resnet
from torchvision.models.resnet import BasicBlock, ResNet

from mantissa.doctor.diagnosis import FOUND
from recipes import bert, gpt2_model, t5
from tests.mantissa.doctor.accuracy import examine
from tests.mantissa.doctor.faults.holdout import HOLDOUT, MISSED, HeldOut


def small_resnet(num_classes: int, **_: Any) -> ResNet:
    """One block at each resolution instead of two."""
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes)


small_resnet.__module__ = resnet.__name__  # recipe.arch takes what torchvision.models has


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torchvision.models._api.BUILTIN_MODELS, "resnet18", small_resnet)
        patch.setitem(gpt2_model.SHAPES, "nano", gpt2_model.Shape(3, 2, 32, 64))
        patch.setitem(bert.SHAPES, "nano", bert.Shape(2, 64, 2, 64))
        patch.setitem(t5.SHAPES, "nano", t5.Shape(2, 32, 2, 16, 64, 64))
        yield


@pytest.mark.parametrize("fault", HOLDOUT, ids=lambda fault: str(fault.number))
def test_a_hold_out_fault_is_named_unless_it_is_listed_as_missed(fault: HeldOut) -> None:
    outcome = examine(fault)
    assert outcome.named == (fault.number not in MISSED), f"expected {fault.expected}; said: {outcome.text()}"
    assert outcome.diagnosis.verdict == FOUND or not outcome.named
