from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.composing import compose_quickly
from trainer.hardware import NATIVE, Hardware
from trainer.precision import kernels
from trainer.profiling import rates

PROJECT = Path(__file__).resolve().parents[1]

# A shell starts background processes with Ctrl-C ignored, and processes that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
compose_quickly()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that no worker is left alone with them at the end."""
    items.sort(key=lambda item: PROJECT / "tests" / "parallel" not in item.path.parents)


@pytest.fixture(scope="session", autouse=True)
def no_timing() -> Iterator[None]:
    """The processor's instructions decide about kernels: measuring takes time, and between equals chance decides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "times", lambda dtype, hardware: made_up_times(dtype, hardware))
        yield


@pytest.fixture(autouse=True)
def own_kernels() -> Iterator[None]:
    """A test leaves torch's own kernels behind."""
    yield
    kernels.clear()


@pytest.fixture(scope="session", autouse=True)
def no_product_rates() -> Iterator[None]:
    """The rates of matrix products are given, not measured: every run shows them, and measuring them takes time."""
    given = {"fp32": 0.1, "tf32": 0.4, "bf16": 0.8, "fp16": 0.001, "fp8": 1.6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "remembered", lambda kind, of, work: given[of["format"]])
        yield


def made_up_times(dtype: torch.dtype, hardware: Hardware) -> dict[str, dict[str, dict[str, float]]]:
    """As ``kernels.times`` on a machine whose processor is ten times faster in formats that it has instructions for."""
    native = hardware.support({torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]) == NATIVE
    took = {"native": 0.1 if native else 10.0, "fp32": 1.0}
    return {name: dict.fromkeys(operator.examples(), took) for name, operator in kernels.OPERATORS.items()}


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data that the repository does not hold: Shakespeare, MNIST's test images, GPT-2's tokenizer."""
    folder = Path(os.environ.get("MANTISSA_TEST_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real test data in {folder} (set MANTISSA_TEST_DATA to a folder that has it)")
    return folder
