from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu.pretended import Pretended, pretended_cuda
from trainer.hardware import NATIVE, detect
from trainer.precision.modes import Precision

HERE = torch.cuda.is_available()

IMAGES = (
    "recipe=resnet",
    "recipe.arch=shufflenet_v2_x0_5",
    "recipe.image_size=32",
    "data=synthetic",
    "data.classes=10",
)


def real(reason: str) -> Any:
    """Mark a test that a pretended device cannot pass, and say why."""
    return lambda test: pytest.mark.gpu(pytest.mark.skipif(not HERE, reason=f"no CUDA device, and {reason}")(test))


class Gpu:
    """The GPU that is here."""

    def step(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in which a wait of the host is an error."""
        try:
            self._mode("error")
            return function(*args)
        finally:
            self._mode("default")

    def _mode(self, mode: str) -> None:
        with warnings.catch_warnings():  # torch says once in a process that this is a prototype
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode(mode)


def waits(gpu: Gpu | Pretended, function: Callable[[], object]) -> bool:
    """Call a function, and return whether the host waited for the device."""
    try:
        gpu.step(function)
    except RuntimeError as error:
        return "synchroniz" in str(error)
    seen = isinstance(gpu, Pretended) and bool(gpu.waits_in_steps)
    if isinstance(gpu, Pretended):
        gpu.waits_in_steps.clear()
    return seen


@pytest.fixture
def flags() -> Iterator[None]:
    """What the test's runs set in torch is undone."""
    benchmark, cudnn_attends = torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attends)
    Precision("fp32").apply()


@pytest.fixture
def pretended(request: pytest.FixtureRequest, flags: None) -> Iterator[Pretended]:
    """A pretended device, of the capability that an indirect parameter gives; what was seen on it fails the test."""
    with pretended_cuda(capability=getattr(request, "param", (9, 0))) as device:
        yield device
    device.check()


@pytest.fixture
def gpu(request: pytest.FixtureRequest, flags: None) -> Gpu | Pretended:
    """The GPU that is here, else a pretended one."""
    return Gpu() if HERE else request.getfixturevalue("pretended")


@pytest.fixture
def mode(request: pytest.FixtureRequest, gpu: Gpu | Pretended) -> str:
    """A precision, in the GPU's own arithmetic."""
    if detect("cuda").support(request.param) != NATIVE:
        pytest.skip(f"this GPU has no {request.param}")
    return str(request.param)
