"""The results of each step, copied from the device once per log interval and checked."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.errors import NonFiniteError
from trainer.hardware import kind_of, peak_memory_bytes, reset_peak_memory
from trainer.parallel.world import World
from trainer.precision.scaler import Scaler, Scaling
from trainer.profiling.utilisation import Utilisation
from trainer.trainer import StepRecord


class NonFiniteGradients(NonFiniteError):
    """Training turned non-finite.

    Args:
        message: for the user.
        failure: of the step: ``step``, ``loss``, ``grad_norm`` and ``loss_scale``; ``rank``, the ranks whose own share
            of the loss was not finite; ``later_updates``, how many steps had changed the weights since, by the time
            that the host read the step's flag.
        metrics: the last line of the log.
    """

    def __init__(self, message: str, failure: dict[str, Any], metrics: dict[str, float]) -> None:
        super().__init__(message)
        self.failure = failure
        self.metrics = metrics


@dataclass
class _Window:
    """The steps of one line of the log, as this process took them."""

    began: float
    """Time of the start by the clock, without what was paused."""
    seconds: float = 0.0
    units: int = 0
    steps: int = 0
    stall_s: float = 0.0
    disturbed: bool = False


@dataclass(kw_only=True)
class Monitor:
    """Collects step records, turns those of a log interval into metrics, and ends a run that is no longer finite.

    Between log steps nothing here touches the device.
    """

    log_every: int
    last_step: int
    unit: str
    scaler: Scaler
    recovers: bool
    device: torch.device
    world: World = field(default_factory=World)
    utilisation: Utilisation = field(default_factory=Utilisation)
    skipped_steps: int = 0
    units: int = 0
    """Units trained since this process started or resumed the run."""
    first_loss: float = math.nan
    """Loss of the first step since then, over all ranks."""
    last_loss: float = math.nan
    """Loss of the last one."""

    def __post_init__(self) -> None:
        self._skipped_in_a_row = 0
        self._on_device: list[StepRecord] = []
        self._losses: list[float] = []
        self._last: dict[str, float] = {}
        self._memory, self._memory_read = 0, -math.inf
        self._window = _Window(time.perf_counter())
        self._measured: list[_Window] = []
        self._counted = time.perf_counter()
        self.trained_s = 0.0
        """Seconds since ``start``, without what was paused, until ``collect`` was called last."""

    def start(self) -> None:
        """Start the clock of the first window, and measure the peak memory from here on."""
        reset_peak_memory(self.device)
        self._counted = time.perf_counter()
        self._window = _Window(self._counted)

    def add(self, record: StepRecord) -> dict[str, float] | None:
        """Take a step's record; at a log step, return the metrics of the window that it ends.

        Raises:
            NonFiniteGradients: see ``collect``.
        """
        self._on_device.append(record)
        # The first step alone makes a window, so that what it warms up is not in the throughput of the others.
        if record.step != 1 and record.step % self.log_every and record.step != self.last_step:
            return None
        self.collect()
        return self._metrics()

    def collect(self) -> None:
        """Copy the pending records to the host and check them.

        Raises:
            NonFiniteGradients: they were not finite and no loss scale can recover, or it has reached its limit.
        """
        before, self._counted = self._counted, time.perf_counter()
        self.trained_s += self._counted - before
        if not self._on_device:
            return
        records, self._on_device = self._on_device, []
        names = ("loss", "grad_norm", "loss_scale", "skipped")
        columns = [torch.stack([getattr(record, name) for record in records]).float() for name in names]
        numbers = torch.stack(columns).cpu()
        shares = numbers[0].clone()
        numbers[0] = self.world.all_reduce_sum(numbers[0])  # each rank knows its own share of the loss
        rows = numbers.T.tolist()
        for number, (record, (loss, norm, scale, skipped)) in enumerate(zip(records, rows, strict=True)):
            self._losses.append(loss)
            self.last_loss = loss
            if math.isnan(self.first_loss):
                self.first_loss = loss
            self._last = {"lr": record.lr, "grad_norm": norm, "loss_scale": scale}
            self.units += record.units
            self._window.units += record.units
            self._window.steps += 1
            if problem := self._problem(bool(skipped), loss, norm, scale):
                failure = {"step": record.step, "loss": loss, "grad_norm": norm, "loss_scale": scale}
                failure["rank"] = self._not_finite(shares[number])
                failure["later_updates"] = sum(not later for *_, later in rows[number:])
                raise NonFiniteGradients(f"step {record.step}: {problem}", failure, self._metrics())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what runs inside (evaluation, saving) out of the step time and the throughput.

        Raises:
            NonFiniteGradients: see ``collect``.
        """
        self.collect()  # steps still queued on the device belong to the time before
        began = time.perf_counter()
        yield
        self._counted = time.perf_counter()
        self._window.began += self._counted - began

    def stalled(self, seconds: float) -> None:
        """Add the seconds that training waited for a checkpoint to the next line."""
        self._window.stall_s += seconds

    def leave_out(self) -> None:
        """Exclude the current window from ``throughput``: something other than training slows it."""
        self._window.disturbed = True

    def throughput(self) -> tuple[float, float] | None:
        """Return units per second and seconds per step: the medians over steps, each of which counts as its window.

        So what slows a few of them, such as the start of MLflow, does not count; nor the first window of several.
        """
        windows = [window for window in self._measured[1:] or self._measured for _ in range(window.steps)]
        if not windows:
            return None
        seconds = statistics.median(window.seconds / window.steps for window in windows)
        return statistics.median(window.units / window.seconds for window in windows), seconds

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to report the same numbers; call ``collect`` first."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "losses": self._losses,
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.skipped_steps = state["skipped_steps"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self._losses = list(state["losses"])
        self._last = dict(state["last"])

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of the window that ends now, and begin the next one."""
        window, now = self._window, time.perf_counter()
        window.seconds = now - window.began
        self._window = _Window(now)
        if not window.disturbed:
            self._measured.append(window)
        if now > self._memory_read + 0.25:  # reading it takes as long as a step of a tiny model
            self._memory, self._memory_read = peak_memory_bytes(self.device), now
        losses, self._losses = self._losses, []
        metrics = {
            "loss": math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan,
            **self._last,
            "skipped_steps": float(self.skipped_steps),
            f"{self.unit}_per_s": window.units / window.seconds,
            "step_time_s": window.seconds / window.steps,
            "memory_bytes" if kind_of(self.device).own_memory else "process_memory_bytes": float(self._memory),
        }
        if (mfu := self.utilisation.mfu(metrics[f"{self.unit}_per_s"])) is not None:
            metrics["mfu"] = mfu
        if window.stall_s:
            metrics["checkpoint_stall_s"] = window.stall_s
        return metrics

    def _problem(self, skipped: bool, loss: float, norm: float, scale: float) -> str | None:
        """Count a skipped step; return why training cannot continue after it."""
        if not skipped:
            self._skipped_in_a_row = 0
            return None
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if not self.recovers:
            return (
                f"the gradients are not finite (loss {loss:g}, gradient norm {norm:g}); the update was not applied "
                "and the weights are those before this step"
            )
        assert isinstance(self.scaler, Scaling)
        if scale <= self.scaler.floor:
            return (
                f"the gradients overflow at the smallest loss scale allowed "
                f"(scaler.floor_scale={self.scaler.floor:g}); lower the learning rate or use precision=bf16"
            )
        if self._skipped_in_a_row > self.scaler.max_consecutive_skips:
            return (
                f"{self._skipped_in_a_row} steps in a row were skipped for non-finite gradients "
                f"(scaler.max_consecutive_skips={self.scaler.max_consecutive_skips}, loss {loss:g}); "
                "lower the learning rate or use precision=bf16"
            )
        return None

    def _not_finite(self, share: torch.Tensor) -> list[int]:
        """Return the ranks whose own ``share`` of a step's loss is not finite; every rank has to ask."""
        flags = torch.zeros(self.world.size)
        flags[self.world.rank] = ~share.isfinite()
        ranks: list[int] = self.world.all_reduce_sum(flags).nonzero().flatten().tolist()
        return ranks
