"""The measured rates of matmuls: what is measured, and the cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pynvml
import pytest
import torch
from torch import Tensor

from mantissa.formats import FP32, NUMBERS, Number
from tests.helpers import CPU, GPU
from trainer.cache import cached
from trainer.hardware import detect
from trainer.precision import kernels
from trainer.profiling import rates


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path))
    monkeypatch.setattr(rates, "cached", cached)
    return tmp_path / "products"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[str]:
    """What is measured, instead of measuring it."""
    calls: list[str] = []

    def measure(number: Number, device: torch.device) -> float:
        calls.append(number.name)
        return {"fp64": 0.05, "fp32": 0.09, "bf16": 0.0091, "fp16": 0.0009}[number.name]

    monkeypatch.setattr(rates, "measure", measure)
    return calls


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_a_rate_is_measured_on_this_machine(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_ENOUGH_IN_ALL_S", 0.05)
    generators = torch.get_rng_state()
    backend = torch.backends.mkldnn.matmul.fp32_precision
    hardware = detect("cpu")
    found = rates.matmul_rates(hardware, [name])
    assert list(found) == [name]
    assert 1e-5 < found[name] < 1000
    assert rates.matmul_rates(hardware, [name]) == found  # to the last bit: from the cache
    assert torch.equal(torch.get_rng_state(), generators)
    assert torch.backends.mkldnn.matmul.fp32_precision == backend


@pytest.mark.parametrize(("there", "driver"), [(True, "580.65.06"), (False, None)])
def test_a_rate_of_an_nvidia_gpu_is_that_of_its_driver(
    there: bool, driver: str | None, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if not there:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65.06")
    given: list[dict[str, object]] = []
    monkeypatch.setattr(rates, "cached", lambda name, of, measure: given.append(of) or measure())
    assert rates.matmul_rates(GPU, ["bf16"]) == {"bf16": 0.0091}
    assert [each["driver"] for each in given] == [driver]


def rate_of_a_device(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> tuple[float, int]:
    """The rate of a device by the seconds that it takes for a matmul of some size, and the largest size."""
    now, largest = 0.0, 0

    def matmuls(number: Number, device: torch.device, size: int) -> list[Callable[[], Tensor]]:
        nonlocal largest
        largest = size

        def matmul() -> Tensor:
            nonlocal now
            now += seconds(size)
            return torch.zeros(1, 1)

        return [matmul] * 3

    monkeypatch.setattr(rates, "_ENOUGH_IN_ALL_S", 0.0)
    monkeypatch.setattr(rates, "_matmuls", matmuls)
    monkeypatch.setattr(rates.time, "perf_counter", lambda: now)
    return rates.measure(FP32, CPU.device), largest


def test_the_rate_counts_three_matmuls_of_the_shortest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that takes n³ / 10^11 s for the three matmuls; some take three times as long."""
    slow = cycle([1] * 8 + [3])
    rate, size = rate_of_a_device(monkeypatch, lambda size: next(slow) * size**3 / 3e11)
    assert rate == pytest.approx(0.6)
    assert size == 1024  # 5 ms are reached at 1024, and the rate was as high before
    assert rate_of_a_device(monkeypatch, lambda size: 2.0 * size**3 / 0.001e12)[1] == 256  # of a slow format


def test_the_cache_knows_what_the_rates_depend_on(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(variable, raising=False)
    found = rates.matmul_rates(CPU, NUMBERS)
    assert found == {"fp64": 0.05, "fp32": 0.09, "bf16": 0.0091, "fp16": 0.0009}  # the CPU has no other one
    assert rates.matmul_rates(CPU, ["fp8", "fp16", "tf32"]) == {"fp16": 0.0009}
    assert measured == ["fp64", "fp32", "bf16", "fp16"]
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    rates.matmul_rates(CPU, ["fp32"])
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    rates.matmul_rates(CPU, ["fp32"])
    kernels.use(torch.bfloat16, kernels.choose(torch.bfloat16, "fp32", CPU))  # in fp32 arithmetic
    for _ in range(2):
        rates.matmul_rates(CPU, ["bf16"])
    assert measured[3:] == ["fp32", "fp32", "bf16"]
