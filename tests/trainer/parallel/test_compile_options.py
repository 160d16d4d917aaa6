from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor
from torch.torch_version import TorchVersion

from trainer.parallel.compile import Compile

VARIABLE = "TORCHINDUCTOR_MIX_ORDER_REDUCTION"


@pytest.mark.parametrize(
    ("version", "typed", "mode", "fused"),
    [
        ("2.10.0", None, "default", False),
        ("2.11.0+cu130", None, "max-autotune", False),
        ("2.13.1", None, "default", False),
        ("2.14.0", None, "default", True),
        ("2.15.0", None, "default", True),
        ("2.11.0", None, "off", True),
        ("2.11.0", "1", "default", True),  # inductor has read it by itself
    ],
)
def test_the_fusion_that_gives_wrong_gradients_is_off_where_torch_has_the_bug(
    version: str, typed: str | None, mode: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch issue 193061: what counts is inductor's own flag, which no longer reads the environment."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if typed is not None:
        monkeypatch.setenv(VARIABLE, typed)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with inductor.patch({"triton.mix_order_reduction": True}):
        Compile(mode).apply([torch.nn.Linear(1, 1)], torch.device("cuda"))
        assert inductor.triton.mix_order_reduction is fused
