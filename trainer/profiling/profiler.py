"""The ``profiler`` config group: time by operator and by kernel, or memory by category, of a few steps."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from mantissa.step.ledger import Ledger, MemoryLedger
from mantissa.tensors import synchronise
from trainer.errors import check_number
from trainer.hardware import kind_of

log = logging.getLogger("mantissa")

Recorder = Callable[[], MemoryLedger]


class ProfilerSession:
    """The profiler of one run. This base class, for ``profiler=none``, does nothing.

    Steps are counted from the start of this process, so a resumed run is profiled like a fresh one.
    """

    ledger: Ledger | None = None
    summary: str | None = None
    """One line for the end of the run, where there is no ledger."""
    _started = 0

    def step(self, step_index: int) -> AbstractContextManager[None] | None:
        """Return the context in which optimizer step ``step_index`` is recorded; None: it is not."""
        return None

    def finish(self) -> None:
        """Write what is not written yet. May be called after a failed step."""


class _TorchSession(ProfilerSession):
    _kept = 0
    """Active steps so far."""
    _profile: torch.profiler.profile | None = None

    def __init__(self, config: TorchProfiler, folder: Path, device: torch.device) -> None:
        self._config, self._folder, self._device = config, folder, device

    def step(self, step_index: int) -> AbstractContextManager[None] | None:
        self._started += 1
        return self._traced() if self._config.wait < self._started <= self._config.steps else None

    @contextmanager
    def _traced(self) -> Iterator[None]:
        config = self._config
        if self._profile is None:
            self._profile = new_profile(
                self._device,
                schedule=torch.profiler.schedule(wait=0, warmup=config.warmup, active=config.active, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
            )
            synchronise(self._device)  # kernels of the steps before would land in the window
            self._profile.start()
        yield
        synchronise(self._device)
        self._kept = max(0, self._started - config.wait - config.warmup)
        self._profile.step()  # after the last active step this writes the files
        if self._kept == config.active:
            self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()  # writes the files, if an active step was reached and they are not written

    def finish(self) -> None:
        self._stop()
        if self._kept < self._config.active:
            log.warning(
                "profiler=torch needs %d steps (wait, warmup and active together), but this run made %d: "
                "%d of %d steps are in the profile. Use a smaller profiler.wait or a larger steps.",
                *(self._config.steps, self._started, self._kept, self._config.active),
            )

    def _write(self, profile: torch.profiler.profile) -> None:
        if not self._kept:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._folder / "trace.json"))
        where = "device" if self._device.type != "cpu" and kind_of(self._device).profiled else "cpu"
        column, rows = f"self_{where}_time_total", profile.key_averages()
        table = rows.table(sort_by=column, row_limit=60, max_name_column_width=70)
        (self._folder / "operators.txt").write_text(table)
        self.summary = f"profiled steps: {self._kept}; operator time on {self._device.type}: {_shares(rows, column)}"


def _shares(rows: Iterable[Any], column: str) -> str:
    """Return the three operators that take most, by their ``column`` of the rows of a profile, with their shares."""
    # Rows of the host's own operators: on CUDA each carries the time of the kernels it launched.
    host, times, on_device = torch.autograd.DeviceType.CPU, {}, 0.0
    for row in rows:
        if row.device_type != host:
            on_device += 0.0 if row.is_user_annotation else getattr(row, column)
        elif row.key.startswith("aten::"):
            times[row.key.removeprefix("aten::")] = getattr(row, column)
    # Kernels that no operator launched: of torch.compile, of an extension, between devices.
    if (others := on_device - sum(times.values())) > 0:
        times["compiled and other kernels"] = others
    total, top = sum(times.values()), sorted(times, key=lambda key: -times[key])[:3]
    return ", ".join(f"{key} {times[key] / total:.0%}" for key in top if total)


class _MemorySession(ProfilerSession):
    def __init__(self, at_step: int, folder: Path, device: torch.device, recorder: Recorder) -> None:
        self._at_step, self._folder, self._device, self._recorder = at_step, folder, device, recorder

    def step(self, step_index: int) -> AbstractContextManager[None] | None:
        self._started += 1
        return self._recorded(step_index) if self._started == self._at_step else None

    @contextmanager
    def _recorded(self, step_index: int) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._allocator_history(), self._recorder() as recorder:
            yield
        self.ledger = recorder.report()
        record = {"step": step_index} | asdict(self.ledger)
        (self._folder / "ledger.json").write_text(json.dumps(record, indent=1))
        (self._folder / "ledger.txt").write_text(self.ledger.text())

    @contextmanager
    def _allocator_history(self) -> Iterator[None]:
        memory: Any = getattr(torch.get_device_module(self._device), "memory", None)
        if not hasattr(memory, "_record_memory_history"):
            yield
            return
        memory._record_memory_history(stacks="python", max_entries=1_000_000)
        try:
            yield
            memory._dump_snapshot(str(self._folder / "memory_snapshot.pickle"))
        finally:
            memory._record_memory_history(enabled=None)


@dataclass
class Profiler:
    """The ``profiler`` config group; this base is ``profiler=none``, which measures nothing."""

    kind: ClassVar[str] = "none"

    def start(self, folder: Path, device: torch.device, recorder: Recorder, steps: int) -> ProfilerSession:
        """Begin a session whose files go to ``folder/profile``; ``recorder`` makes a ledger of one of its ``steps``."""
        return ProfilerSession()


@dataclass
class TorchProfiler(Profiler):
    """Profile a few steps with ``torch.profiler``: a Chrome trace and a table of operators.

    Writes ``profile/trace.json`` (open it at https://ui.perfetto.dev or chrome://tracing) and
    ``profile/operators.txt``, sorted by the time spent in each operator itself, on the device.
    """

    kind: ClassVar[str] = "torch"
    wait: int = 3
    """Steps to skip first, while caches, autotuning and memory settle."""
    warmup: int = 2
    """Steps to trace and discard, at least 1, because the tracer is slow at first."""
    active: int = 3
    """Steps to record."""

    def __post_init__(self) -> None:
        check_number("profiler.wait", self.wait, 0)
        check_number("profiler.warmup", self.warmup)
        check_number("profiler.active", self.active)

    @property
    def steps(self) -> int:
        """The number of steps until the profile is complete."""
        return self.wait + self.warmup + self.active

    def start(self, folder: Path, device: torch.device, recorder: Recorder, steps: int) -> ProfilerSession:
        return _TorchSession(self, folder / "profile", device)


@dataclass
class MemoryProfiler(Profiler):
    """Record the memory ledger of one step.

    Writes ``profile/ledger.json`` and ``profile/ledger.txt``, and where torch has it the allocator's history over the
    same step, ``profile/memory_snapshot.pickle`` (open it at https://pytorch.org/memory_viz).
    """

    kind: ClassVar[str] = "memory"
    at_step: int = 3
    """Step to record, from 1, at most the last: by the third, the optimizer state exists and caches are warm."""

    def __post_init__(self) -> None:
        check_number("profiler.at_step", self.at_step)

    def start(self, folder: Path, device: torch.device, recorder: Recorder, steps: int) -> ProfilerSession:
        return _MemorySession(min(self.at_step, steps), folder / "profile", device, recorder)


def new_profile(device: torch.device, **options: Any) -> torch.profiler.profile:
    """Return a profile of a device that is not started; ``options`` are torch's."""
    # Kineto prints a line at every start and stop, and an error where a CUDA build finds no driver. Its log level can
    # be set in the environment only.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activity = torch.profiler.ProfilerActivity
    activities = {activity.CPU, getattr(activity, device.type.upper() if kind_of(device).profiled else "CPU")}
    # With one cycle there is nothing to drop, of which torch 2.11 warns without acc_events.
    return torch.profiler.profile(activities=activities, acc_events=True, **options)
