from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mantissa.step import memory
from mantissa.step.memory import available_bytes, control_groups
from tests.helpers import BIGNET, PROJECT, trainer_of
from trainer import hardware
from trainer.hardware import EMULATED, NATIVE, UNAVAILABLE, Hardware, detect, set_determinism


def made_up(device: str, capability: tuple[int, int] | None = None, *flags: str) -> Hardware:
    return Hardware(torch.device(device), "made up", 2**30, 4, capability, frozenset(flags))


# n: native, e: emulated, -: not available
@pytest.mark.parametrize(
    ("hardware", "support"),
    [
        # of             tf32 bf16 fp16 fp8 mxfp8 nvfp4
        (made_up("cuda", (6, 1)), "-eeeee"),
        (made_up("cuda", (7, 0)), "-eneee"),
        (made_up("cuda", (7, 5)), "-eneee"),
        (made_up("cuda", (8, 0)), "nnneee"),
        (made_up("cuda", (8, 9)), "nnnnee"),
        (made_up("cuda", (9, 0)), "nnnnee"),
        (made_up("cuda", (10, 0)), "nnnnne"),
        (made_up("cuda", (10, 3)), "nnnnne"),
        (made_up("cuda", (12, 0)), "nnnnee"),
        (made_up("cpu"), "-eeeee"),
        (made_up("cpu", None, "amx_bf16"), "-neeee"),
        (made_up("cpu", None, "avx512_bf16"), "-neeee"),
        (made_up("cpu", None, "amx_bf16", "amx_fp16"), "-nneee"),
        (made_up("cpu", None, "avx512_fp16"), "-eneee"),
        (made_up("cpu", None, "bf16", "fp16"), "-nneee"),  # ARM
        (made_up("mps"), "-nneee"),
        (made_up("cuda"), "-nneee"),  # ROCm
    ],
)
def test_which_formats_hardware_multiplies(hardware: Hardware, support: str) -> None:
    words = {"n": NATIVE, "e": EMULATED, "-": UNAVAILABLE}
    formats = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
    assert [hardware.support(name) for name in formats] == [words[letter] for letter in "n" + support]
    assert hardware.support("fp64") == (UNAVAILABLE if hardware.device.type == "mps" else NATIVE)


PEAKS = """
import torch
from trainer.hardware import peak_memory_bytes, reset_peak_memory

cpu = torch.device("cpu")
peaks = []
for megabytes in (0, 256, 128, 0):
    reset_peak_memory(cpu)
    block = torch.ones(megabytes * 2**20, dtype=torch.uint8)
    del block
    peaks.append(peak_memory_bytes(cpu) // 2**20)
print(*peaks)
"""


def test_the_peak_of_the_process_is_remembered_after_the_memory_is_given_back_and_forgotten_on_reset() -> None:
    # In a process of its own: what other tests leave behind may be given back at any time.
    command = [sys.executable, "-c", PEAKS]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    start, large, small, end = map(int, done.stdout.split())
    assert large - start == pytest.approx(256, abs=32)
    assert small - start == pytest.approx(128, abs=32)
    assert end - start == pytest.approx(0, abs=32)


FAULTS = """
import resource, sys
import torch
from mantissa.step.memory import held_bytes
from trainer.hardware import keep_freed_memory, release_kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**22)  # 16 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(2**20)  # starts torch's threads
first = faults()
for _ in range(2):  # the runs of a sweep
    keep_freed_memory(2**28)
    faults()
    kept, held = faults(), held_bytes("VmRSS")
    release_kept_memory()
print(first, kept, (held - held_bytes("VmRSS")) // 2**20, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory when told to")
@pytest.mark.parametrize("tuned", [{}, {"MALLOC_MMAP_THRESHOLD_": "131072"}], ids=["", "to return"])
def test_new_tensors_take_the_memory_of_freed_ones_unless_the_user_tunes_the_allocator(tuned: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_"))}
    environment |= tuned
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, env=environment)
    first, kept, released, after = map(int, done.stdout.split())
    if tuned:
        assert min(kept, after) > first / 2
    else:
        # Pages went back. A free block that lies below one in use may still serve more than one of the eight tensors.
        assert after > first / 10
        assert kept < first / 50
        assert released >= 15


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["default", "a count", "a policy"],
)
def test_threads_spin_as_the_user_says_or_else_for_a_short_time(given: dict[str, str], found: str) -> None:
    variables = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in variables} | given
    command = [sys.executable, "-c", "import os, trainer; print(os.environ.get('GOMP_SPINCOUNT'))"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == found


def control_group(folder: Path, names: tuple[str, str, str], limit: str, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {files}\nactive_file 7\n")


def test_limits_of_control_groups_of_both_versions_count(tmp_path: Path) -> None:
    new = ("memory.max", "memory.current", "inactive_file")
    control_group(tmp_path / "fs", new, "8000", 3000, 1000)  # as a container sees its own
    control_group(tmp_path / "fs" / "slice", new, "max", 500, 0)
    control_group(tmp_path / "fs" / "slice" / "job", new, "4000", 900, 400)
    (tmp_path / "self").write_text("3:cpu:/\n0::/slice/job\n")
    assert control_groups(tmp_path / "self", tmp_path / "fs") == [(4000, 500), (8000, 2000)]
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    control_group(tmp_path / "fs" / "memory" / "job", old, "6000", 100, 200)
    (tmp_path / "self").write_text("4:memory:/job\n2:cpuset:/job\n")
    assert control_groups(tmp_path / "self", tmp_path / "fs") == [(6000, 0)]
    assert control_groups(tmp_path / "none", tmp_path) == []


def test_a_control_group_is_less_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hardware, memory):
        monkeypatch.setattr(module, "control_groups", lambda: [(3 * 2**30, 2**30), (2**60, 0)])
    assert detect("cpu").memory_bytes == 3 * 2**30
    assert available_bytes(torch.device("cpu")) <= 2 * 2**30


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_has_the_kernels_that_it_asks_for(deterministic: bool) -> None:
    try:
        trainer_of(*BIGNET, f"deterministic={deterministic}")
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cudnn.benchmark is not deterministic
    finally:
        set_determinism(False)
