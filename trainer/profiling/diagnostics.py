"""The ``diagnostics`` config group: what rounding does to updates, gradients and operands, logged and warned about."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mantissa.display import dtype_name, listed
from mantissa.formats import FP16
from mantissa.step.updates import Counts, UpdateMeter, is_elementwise, ratio
from trainer.errors import UserError, check_number
from trainer.files import LAYERS
from trainer.optim.optimizer import Optimizer
from trainer.optim.update import Update
from trainer.parallel.world import World
from trainer.precision import scaled, statistics

log = logging.getLogger("mantissa")

_WORST = 5
"""Parameters whose lost updates are logged one by one."""


class DiagnosticsSession:
    """The diagnostics of one run. This base class, for ``diagnostics=none``, measures nothing."""

    def begin(self, step: int) -> None:
        """Prepare for optimizer step ``step``, counted from 1."""

    def collect(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the metrics of every measurement since the last call. All ranks call it together."""
        yield from ()


@dataclass
class Diagnostics:
    """The ``diagnostics`` config group; this base is ``diagnostics=none``, which measures nothing."""

    kind: ClassVar[str] = "none"

    def check(self, optimizer: Optimizer) -> None:
        """Check that the optimizer can be measured.

        Raises:
            UserError: it cannot.
        """

    def start(self, model: nn.Module, update: Update, half: torch.dtype | None, world: World) -> DiagnosticsSession:
        """Begin a session.

        Args:
            model: in training.
            update: its update.
            half: the 16-bit dtype that layers compute in; None: there is none.
            world: the processes that train together.
        """
        return DiagnosticsSession()


@dataclass
class Numerics(Diagnostics):
    """``diagnostics=numerics``: lost updates, their quality, flushed gradients and the loss scale's headroom; and what
    scaled formats do to the operands of layers.
    """

    kind: ClassVar[str] = "numerics"
    every: int = 50
    """Measure every this many optimizer steps: those whose number is a multiple of it."""

    def __post_init__(self) -> None:
        check_number("diagnostics.every", self.every)

    def check(self, optimizer: Optimizer) -> None:
        if not is_elementwise(optimizer.name):
            raise UserError(
                f"diagnostics=numerics cannot measure optimizer.name={optimizer.name}, whose update of one element "
                "depends on other elements",
                "diagnostics=none",
                "optimizer=adamw optimizer.name=AdamW",
            )

    def start(self, model: nn.Module, update: Update, half: torch.dtype | None, world: World) -> DiagnosticsSession:
        meter = UpdateMeter(model, update.optimizer, half, update.masters, update.clip)
        return _NumericsSession(self.every, update, meter, ScaledMeter(model, world), world)


class ScaledMeter:
    """Measures the operands of the layers of a model that multiply scaled numbers, in the steps between ``begin`` and
    ``end``; which ones do may change from one to the next.

    Args:
        model: in training.
        world: the processes that train together.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._layers = scaled.linear_layers(model)
        self._world = world
        self._step: int | None = None
        """The step that is measured now."""
        self._measured: list[tuple[int, Tensor]] = []

    def begin(self, step: int) -> None:
        """Measure the training passes from now on, as of a step, counted from 1."""
        self._step = step
        for layer in self._layers.values():
            layer.statistics = statistics.new_table(layer)

    def end(self) -> None:
        """Measure no longer. The results stay on the device."""
        if self._step is not None and self._layers:
            tables = torch.stack([layer.statistics for layer in self._layers.values()])
            self._measured.append((self._step, tables))
            for layer in self._layers.values():
                layer.statistics = None
        self._step = None

    def take(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield each measured step since the last call, with its metrics. All ranks call it together.

        ``layers/<statistic>/<operand>/<layer>`` are of one layer, ``numerics/<statistic>/<operand>`` of the worst.
        """
        measured, self._measured = self._measured, []
        for step, tables in measured:
            sums, peaks = statistics.split(tables)
            of_ranks = peaks.new_zeros(self._world.size, *peaks.shape)
            of_ranks[self._world.rank] = peaks
            peaks = self._world.all_reduce_sum(of_ranks).amax(0)
            worst, layers = dict[str, float](), dict[str, float]()
            for name, operand, layer, value in statistics.measured(
                [*self._layers], self._world.all_reduce_sum(sums), peaks
            ):
                layers[f"{LAYERS}{name}/{operand}/{layer}"] = float(f"{value:.6g}")
                key, worse = f"numerics/{name}/{operand}", min if name == statistics.SQNR else max
                worst[key] = worse(worst.get(key, value), value)
            yield step, worst | layers


class _NumericsSession(DiagnosticsSession):
    def __init__(self, every: int, update: Update, meter: UpdateMeter, layers: ScaledMeter, world: World) -> None:
        self._every = every
        self._update = update
        self._meter = meter
        self._layers = layers
        self._world = world
        self._weights = meter.weights()[:, None]
        self._reported: set[str] = set()
        """Parameters that were warned about."""

    def begin(self, step: int) -> None:
        self._layers.end()
        self._update.meter = self._meter if step % self._every == 0 else None
        if self._update.meter:
            self._layers.begin(step)

    def collect(self) -> Iterator[tuple[int, dict[str, float]]]:
        self._layers.end()
        of_layers = dict(self._layers.take())
        for step, counts, peak in self._meter.take():
            # Sums over the ranks: of sharded parameters these are different rows, of others the same ones again.
            rows = self._world.all_reduce_sum(counts.cpu() * self._weights).tolist()
            measured = dict(zip(self._meter.names, (Counts(*row) for row in rows), strict=True))
            peaks = torch.zeros(self._world.size)
            peaks[self._world.rank] = peak
            of_updates = self._metrics(measured, self._world.all_reduce_sum(peaks).max().item())
            metrics = {f"numerics/{name}": value for name, value in of_updates.items()} | of_layers.get(step, {})
            if metrics:
                yield step, metrics
            if not self._meter.stochastic:
                self._warn(step, measured)

    def _metrics(self, measured: dict[str, Counts], peak: float) -> dict[str, float]:
        total = Counts(*(math.fsum(column) for column in zip(*measured.values(), strict=True)))
        metrics = {"edq": total.edq, "grad_flushed": ratio(total.flushed, total.in_half)}
        if peak:
            metrics["scale_headroom_bits"] = math.log2(FP16.largest / peak)
        if not self._meter.stochastic:
            metrics["lost_updates"] = total.lost_share
            lost = {name: counts.lost_share for name, counts in measured.items() if counts.lost}
            worst = sorted(lost, key=lambda name: -lost[name])[:_WORST]
            metrics |= {f"lost_updates/{name}": lost[name] for name in worst}
        return {name: value for name, value in metrics.items() if not math.isnan(value)}

    def _warn(self, step: int, measured: dict[str, Counts]) -> None:
        """Say which parameters do not get their updates, once for each parameter."""
        new = measured.keys() - self._reported
        losing = {name: counts for name, counts in measured.items() if name in new and counts.loses_updates}
        if not losing:
            return
        self._reported |= losing.keys()
        names = list(losing)
        share = ratio(sum(counts.lost for counts in losing.values()), sum(counts.moving for counts in losing.values()))
        dtype = self._meter.dtypes[self._meter.names.index(names[0])]
        log.warning(
            "step %d: %.0f %% of the updates of %s are lost by rounding, because they are too small for %s "
            "weights. Start a run with precision=%s_master, or precision=bf16_sr.",
            *(step, 100 * share, listed(names), dtype_name(dtype), "fp16" if dtype == torch.float16 else "bf16"),
        )
