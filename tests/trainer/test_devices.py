"""Each kind of device, as a fake of torch's accelerator that notes what is called."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from mantissa.step.memory import available_bytes
from mantissa.tensors import synchronise
from trainer.data.loader import Batches, PinnedLoader
from trainer.errors import UserError
from trainer.hardware import (
    CPU,
    CUDA,
    DEVICE_KINDS,
    MPS,
    ROCM,
    XPU,
    DeviceKind,
    detect,
    peak_memory_bytes,
    reserved_memory_bytes,
    reset_peak_memory,
    select,
)
from trainer.parallel.wrap import DDP
from trainer.profiling.profiler import new_profile

GPUS = [kind for kind in DEVICE_KINDS if kind.own_memory]
every_kind = pytest.mark.parametrize("kind", DEVICE_KINDS, ids=lambda kind: kind.name)


@dataclass
class Accelerator:
    """Two devices of a kind, of which the second is the current one."""

    calls: list[Any] = field(default_factory=list)

    def note(self, name: str, result: Any = None) -> Any:
        def called(*given: Any) -> Any:
            self.calls.append((name, *given))
            return result

        return called

    def taken(self) -> list[Any]:
        calls, self.calls[:] = self.calls[:], []
        return calls


@pytest.fixture
def fake(kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    here = Accelerator()
    properties = SimpleNamespace(name="made up", total_memory=2**34, major=9, minor=4)
    module = SimpleNamespace(
        get_device_properties=lambda device: properties,
        get_rng_state=here.note("get_rng_state", torch.zeros(1)),
        set_rng_state=here.note("set_rng_state"),
    )
    monkeypatch.setattr(torch.version, "hip", "7.0" if kind is ROCM else None)
    if kind is ROCM:
        monkeypatch.setattr(torch.version, "cuda", None)
    found = None if kind is CPU else torch.device(kind.type)
    replaced = {
        "current_accelerator": lambda check_available=False: found,
        "device_count": lambda: 2,
        "current_device_index": lambda: 1,
        "get_memory_info": here.note("get_memory_info", (5, 9)),
        "max_memory_allocated": here.note("max_memory_allocated", 7),
        "max_memory_reserved": here.note("max_memory_reserved", 8),
        "memory_reserved": here.note("memory_reserved", 4),
        "memory_allocated": here.note("memory_allocated", 3),
        **{name: here.note(name) for name in ("set_device_index", "synchronize", "reset_peak_memory_stats")},
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    real = torch.get_device_module
    chosen = {torch.device("cpu"): real("cpu"), "cpu": real("cpu")}
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: chosen.get(device, module))
    return here


@every_kind
@pytest.mark.usefixtures("fake")
def test_a_device_is_found_by_its_type_and_by_auto(kind: DeviceKind) -> None:
    found = detect(kind.type)
    assert found == detect("auto")
    assert (found.kind, found.is_gpu) == (kind, kind in GPUS)
    assert str(found.device) == ("cpu" if kind is CPU else f"{kind.type}:1")
    assert found.capability == ((9, 4) if kind is CUDA else None)
    if kind in GPUS:
        assert (found.name, found.memory_bytes) == ("made up", 2**34)
    if kind is not CPU:
        with pytest.raises(UserError, match=f"device={kind.type}:2"):
            detect(f"{kind.type}:2")


@every_kind
@pytest.mark.usefixtures("fake")
def test_what_is_not_here_is_refused_in_one_sentence(kind: DeviceKind) -> None:
    for device in {each.type for each in DEVICE_KINDS} - {"cpu", kind.type}:
        with pytest.raises(UserError, match=rf"device={device}: .*set device=cpu"):
            detect(device)
    for device, why in (("cuda:x", "is not a device"), ("tpu", "is not a device"), ("hpu", "is not supported")):
        with pytest.raises(UserError, match=f"device={device} {why} .*; set device=auto"):
            detect(device)


@pytest.fixture
def beside_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVIDIA GPU that the driver sees, and torch, built for CUDA 13.2, does not."""
    words = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver."

    def init() -> None:
        raise RuntimeError(words)

    for where, name, value in (
        (torch.version, "hip", None),
        (torch.version, "cuda", "13.2"),
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "init", init),
        (torch.accelerator, "current_accelerator", lambda check_available=False: None),
        (pynvml, "nvmlInit", lambda: None),
        (pynvml, "nvmlSystemGetDriverVersion", lambda: "550.54.15"),
    ):
        monkeypatch.setattr(where, name, value)


@pytest.mark.usefixtures("beside_a_driver")
def test_several_processes_are_told_of_the_driver_before_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    for device in ("auto", "cuda"):
        with pytest.raises(UserError, match="too old"):
            DDP().world(device)


@pytest.mark.usefixtures("beside_a_driver")
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("auto", "cuda", "cuda:0"):
        with pytest.raises(UserError, match=r"too old .found version 12040.*550\.54\.15.*13\.2.*device=cpu"):
            detect(device)
    assert detect("cpu").kind is CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # CUDA_VISIBLE_DEVICES= hides it
    assert detect("auto").kind is CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for CPUs
    assert detect("auto").kind is CPU


@every_kind
def test_memory_and_the_queue_are_the_devices(kind: DeviceKind, fake: Accelerator) -> None:
    device = detect(kind.type).device
    reset_peak_memory(device)
    peak, reserved, left = peak_memory_bytes(device), reserved_memory_bytes(device), available_bytes(device)
    names = ["reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"]
    names += ["memory_reserved", "memory_allocated", "get_memory_info"]  # what torch caches is free for its own tensors
    assert fake.taken() == ([(name, device) for name in names] if kind in GPUS else [])
    assert ((peak, reserved, left) == (7, 8, 6)) == (kind in GPUS)
    select(device)
    synchronise(device)
    expected = [("set_device_index", device), ("synchronize", device)]
    assert fake.taken() == ([] if kind is CPU else expected)


@every_kind
@pytest.mark.usefixtures("fake")
def test_tensors_of_several_processes_go_through_the_devices_backend(
    kind: DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[tuple[str, torch.device | None]] = []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda *given, **options: iter([(None, 0, 2)]))
    monkeypatch.setattr(dist, "PrefixStore", lambda *given: None)
    monkeypatch.setattr(dist, "new_group", lambda **options: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, device_id, **options: joined.append((backend, device_id))
    )
    if kind is MPS:
        with pytest.raises(UserError, match="set device=cpu"):
            DDP().world("mps")
        return
    DDP().world(kind.type)
    DDP().world("auto")
    backend = {CPU: "gloo", CUDA: "cpu:gloo,cuda:nccl", ROCM: "cpu:gloo,cuda:nccl", XPU: "cpu:gloo,xpu:xccl"}[kind]
    assert joined == [(backend, None if kind is CPU else torch.device(kind.type, 1))] * 2


@every_kind
@pytest.mark.usefixtures("fake")
def test_pinning_and_profiling_are_asked_only_where_they_exist(
    kind: DeviceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = detect(kind.type)
    batches = PinnedLoader(0).batches(range(1), [], found)
    assert isinstance(batches, Batches)
    assert batches.pins == (kind in GPUS)
    asked: list[set[ProfilerActivity]] = []
    monkeypatch.setattr(torch.profiler, "profile", lambda activities, **options: asked.append(set(activities)))
    new_profile(found.device)
    times = {CUDA: ProfilerActivity.CUDA, ROCM: ProfilerActivity.CUDA, XPU: ProfilerActivity.XPU}
    assert asked == [{ProfilerActivity.CPU, times.get(kind, ProfilerActivity.CPU)}]
