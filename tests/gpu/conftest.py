from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.pretended import Pretended, pretended_cuda
from trainer.precision.modes import Precision


@pytest.fixture
def pretended(request: pytest.FixtureRequest) -> Iterator[Pretended]:
    """A pretended device, of the capability that an indirect parameter gives; what was seen on it fails the test."""
    benchmark, cudnn_attends = torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with pretended_cuda(capability=getattr(request, "param", (9, 0))) as device:
            yield device
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attends)
        Precision("fp32").apply()
    device.check()
