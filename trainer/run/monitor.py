"""The results of each step, copied from the device once per log interval and checked."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mantissa.tensors import wide_dtype
from trainer.errors import NonFiniteError
from trainer.hardware import kind_of, peak_memory_bytes, reserved_memory_bytes, reset_peak_memory
from trainer.precision.scaler import Scaling
from trainer.profiling.utilisation import Utilisation
from trainer.recipe import UserRecipe
from trainer.run.step_metrics import STEP_METRICS
from trainer.trainer import StepRecord, Trainer

_MEMORY_READ_S = 0.25
"""Seconds between two readings of the peak memory: one takes as long as a step of a tiny model."""
_OF_FAILURE = ("loss", "grad_norm", "loss_scale")
"""Metrics of the step that ends a run, for who looks for the cause."""


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
    """The time of one line of the log, as this process took its steps."""

    began: float
    """Time of the start by the clock, without what was paused."""
    seconds: float = 0.0
    units: int = 0
    steps: int = 0
    stall_s: float = 0.0
    disturbed: bool = False


class Monitor:
    """Collects step records, turns those of a log interval into metrics, and ends a run that is no longer finite.

    Between log steps nothing here touches the device. Which metrics there are is a table, ``STEP_METRICS``.

    Args:
        trainer: whose steps they are.
        warn: hears of the first loss that is not finite in a step whose update is.
    """

    def __init__(self, trainer: Trainer, warn: Callable[[str], Any] = warnings.warn) -> None:
        config = trainer.config
        self.trainer = trainer
        self._warn, self._warned = warn, False
        self.log_every = config.log_every
        self.unit = config.recipe.unit
        self.scaler = config.scaler
        self.utilisation = Utilisation()
        """What turns a throughput into MFU."""
        self.units = 0
        """Units trained since this process started or resumed the run."""
        self.first_loss = math.nan
        """Loss of the run's first step, over all ranks."""
        self.last_loss = math.nan
        """Loss of its last one."""
        self.trained_s = 0.0
        """Seconds since ``start``, without what was paused, until ``collect`` was called last."""
        self._pending: list[tuple[StepRecord, dict[str, Tensor | float]]] = []
        """Steps whose tensors the host has not read, with their values of each metric."""
        self._interval: dict[str, list[float]] = {name: [] for name in STEP_METRICS}
        """The values since the last line of the log; a resumed run begins with those of its checkpoint."""
        self._totals = {name: 0.0 for name, metric in STEP_METRICS.items() if metric.combine is None}
        self._skipped_in_a_row = 0
        self._memory, self._memory_read = 0, -math.inf
        self._peak, self._reserved, self._added = 0, 0, 0
        self._timed_until = time.perf_counter()
        """The time up to which ``trained_s`` has counted, or left out, on the clock."""
        self._window = _Window(self._timed_until)
        self._measured: list[_Window] = []

    @property
    def recovers(self) -> bool:
        """Whether a step with non-finite gradients is skipped, and training goes on."""
        return self.trainer.loss_scale.recovers

    @property
    def ever_scaled(self) -> bool:
        """Whether the loss is scaled in this format or another one of the run."""
        config, device = self.trainer.config, self.trainer.device
        return any(config.scaler.build(each.format, device).recovers for each in config.precision.phases)

    @property
    def skipped_steps(self) -> int:
        """Steps of the whole run whose gradients were not finite, and which changed nothing."""
        return int(self._totals["skipped_steps"])

    def start(self) -> None:
        """Start the clock of the first window, and measure the peak memory from here on."""
        reset_peak_memory(self.trainer.device)
        self._timed_until = time.perf_counter()
        self._window = _Window(self._timed_until)

    @torch.no_grad()  # a metric of the weights needs no graph
    def add(self, record: StepRecord) -> dict[str, float] | None:
        """Take a step's record; at a log step, return the metrics of the window that it ends.

        Raises:
            NonFiniteGradients: see ``collect``.
        """
        if self._added < 2:
            # The first step tries kernels, whose memory counts only where no other step follows.
            self._added, self._peak = self._added + 1, 0
            if self._added == 1:
                self._keep_peak()
        values = {name: metric.value(record, self.trainer) for name, metric in STEP_METRICS.items()}
        self._pending.append((record, values))
        # The first step alone makes a window, so that what it warms up is not in the throughput of the others.
        if record.step != 1 and record.step % self.log_every and record.step != self.trainer.plan.steps:
            return None
        self.collect()
        return self._line()

    def collect(self) -> None:
        """Copy the pending values to the host and check them. Nowhere else does training wait for the device.

        Raises:
            NonFiniteGradients: they were not finite and no loss scale can recover, or it has reached its limit.
        """
        before, self._timed_until = self._timed_until, time.perf_counter()
        self.trained_s += self._timed_until - before
        if not self._pending:
            return
        records, values = zip(*self._pending, strict=True)
        self._pending = []
        columns: dict[str, list[Any]] = {name: [of_step[name] for of_step in values] for name in STEP_METRICS}

        # One copy of all tensors: a row for each metric, a column for each step.
        names = [name for name, column in columns.items() if isinstance(column[0], Tensor)]
        stacked = [torch.stack(columns[name]) for name in names]
        numbers = torch.stack([each.to(wide_dtype(stacked)) for each in stacked]).cpu()

        # What each rank knows its own share of is added up; the shares tell which rank was not finite.
        shares = numbers[names.index("loss")].clone()
        for place, name in enumerate(names):
            if STEP_METRICS[name].of_ranks:
                numbers[place] = self.trainer.world.all_reduce_sum(numbers[place])
        columns |= zip(names, numbers.tolist(), strict=True)

        # The step with which training cannot go on is the last one that counts.
        problem, taken = None, 0
        for taken, skipped in enumerate(columns["skipped_steps"], 1):
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
            if skipped and (problem := self._problem({name: column[taken - 1] for name, column in columns.items()})):
                break
        self._count(records[:taken], {name: column[:taken] for name, column in columns.items()})
        pairs = zip(records[:taken], columns["loss"], columns["skipped_steps"], strict=False)
        if spoilt := [record.step for record, loss, skipped in pairs if not (skipped or math.isfinite(loss))]:
            self._warn_once(spoilt[0])
        if problem is not None:
            record = records[taken - 1]
            failure = {"step": record.step} | {name: columns[name][taken - 1] for name in _OF_FAILURE}
            failure["rank"] = self._not_finite(shares[taken - 1])
            failure["later_updates"] = sum(not skipped for skipped in columns["skipped_steps"][taken:])
            raise NonFiniteGradients(f"step {record.step}: {problem}", failure, self._line())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what runs inside (evaluation, saving) out of the step time, the throughput and the peak of a step.

        Raises:
            NonFiniteGradients: see ``collect``.
        """
        self.collect()  # steps still queued on the device belong to the time before
        self._keep_peak()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._keep_peak(of_steps=False)
        self._timed_until = time.perf_counter()
        self._window.began += self._timed_until - began

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

    def peak_memory(self) -> int:
        """Return the peak bytes of a step since the start: allocated on a GPU; elsewhere those of this process."""
        return max(self._peak, peak_memory_bytes(self.trainer.device))

    def reserved_memory(self) -> int | None:
        """Return the most bytes that torch has taken of a GPU since the start, freed blocks included."""
        reserved = reserved_memory_bytes(self.trainer.device)
        return reserved and max(self._reserved, reserved)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to report the same numbers, as JSON types; call ``collect`` first."""
        losses = {"first": self.first_loss, "last": self.last_loss}
        sums = {"interval": self._interval, "totals": self._totals, "skipped_in_a_row": self._skipped_in_a_row}
        return sums | {"losses": losses}

    def state_before_failure(self) -> dict[str, Any]:
        """Return ``state_dict`` without the step that has just ended the run."""
        totals = self._totals | {"skipped_steps": self._totals["skipped_steps"] - 1}
        empty: dict[str, list[float]] = {name: [] for name in self._interval}
        sums = {"interval": empty, "totals": totals, "skipped_in_a_row": self._skipped_in_a_row - 1}
        return self.state_dict() | sums

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        # A metric may be newer than the checkpoint.
        self._interval = {name: list(state["interval"].get(name, ())) for name in self._interval}
        self._totals = {name: state["totals"].get(name, 0.0) for name in self._totals}
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.first_loss, self.last_loss = state["losses"]["first"], state["losses"]["last"]

    def _keep_peak(self, of_steps: bool = True) -> None:
        """Measure the memory of a GPU anew from here on, and keep the peak until now where it is one of steps."""
        if kind_of(self.trainer.device).own_memory:
            self._peak = self.peak_memory() if of_steps else self._peak
            self._reserved = self.reserved_memory() or 0
            reset_peak_memory(self.trainer.device)

    def _count(self, records: Sequence[StepRecord], columns: dict[str, list[float]]) -> None:
        """Add steps to the interval of the log and to the sums of the run."""
        for name, column in columns.items():
            self._interval[name] += column
            if name in self._totals:
                self._totals[name] += sum(column)
        if math.isnan(self.first_loss):
            self.first_loss = columns["loss"][0]
        self.last_loss = columns["loss"][-1]
        units = sum(record.units for record in records)
        self.units += units
        self._window.units += units
        self._window.steps += len(records)

    def _line(self) -> dict[str, float]:
        """Return the metrics of the window that ends now, and begin the next one."""
        # The time: of the window, and where it counts, of the run's throughput.
        window, now = self._window, time.perf_counter()
        window.seconds = now - window.began
        self._window = _Window(now)
        if not window.disturbed:
            self._measured.append(window)
        # The values of every step become one number: the mean, the last, or what the whole run has added up.
        metrics = {
            name: metric.combine(self._interval[name]) if metric.combine else self._totals[name]
            for name, metric in STEP_METRICS.items()
        }
        self._interval = {name: [] for name in STEP_METRICS}
        # What the window took: throughput, time, memory.
        device = self.trainer.device
        if now > self._memory_read + _MEMORY_READ_S:
            self._memory, self._memory_read = self.peak_memory(), now
        metrics |= {
            f"{self.unit}_per_s": window.units / window.seconds,
            "step_time_s": window.seconds / window.steps,
            "memory_bytes" if kind_of(device).own_memory else "process_memory_bytes": float(self._memory),
        }
        if (mfu := self.utilisation.mfu(metrics[f"{self.unit}_per_s"])) is not None:
            metrics["mfu"] = mfu
        if window.stall_s:
            metrics["checkpoint_stall_s"] = window.stall_s
        return metrics

    def _problem(self, values: dict[str, float]) -> str | None:
        """Return why training cannot continue after a skipped step; None: it can."""
        loss = values["loss"]
        if not self.recovers:
            return (
                f"the gradients are not finite (loss {loss:g}, gradient norm {values['grad_norm']:g}); the update was "
                "not applied and the weights are those before this step"
            )
        assert isinstance(self.scaler, Scaling)
        if values["loss_scale"] <= self.scaler.floor:
            return (
                f"the gradients overflow at the smallest loss scale allowed (scaler.floor_scale={self.scaler.floor:g})"
            )
        if self._skipped_in_a_row > self.scaler.max_consecutive_skips:
            return (
                f"{self._skipped_in_a_row} steps in a row were skipped for non-finite gradients "
                f"(scaler.max_consecutive_skips={self.scaler.max_consecutive_skips}, loss {loss:g})"
            )
        return None

    def _warn_once(self, step: int) -> None:
        """Say that a step has trained though its loss is not finite."""
        recipe = self.trainer.config.recipe
        text = f"step {step}: the loss is not finite, but the update is: the training goes on"
        if isinstance(recipe, UserRecipe) and recipe.targets is None:
            text += "; a mean over no targets is NaN: count them with Recipe.of(targets=…), or leave such batches out"
        if not self._warned:
            self._warned = True
            self._warn(text)

    def _not_finite(self, share: Tensor) -> list[int]:
        """Return the ranks whose own ``share`` of a step's loss is not finite; every rank has to ask."""
        world = self.trainer.world
        flags = torch.zeros(world.size)
        flags[world.rank] = ~share.isfinite()
        ranks: list[int] = world.all_reduce_sum(flags).nonzero().flatten().tolist()
        return ranks
