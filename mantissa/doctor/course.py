"""Training on for some steps: whether fp32 from the same start explodes as well, and with which cures it learns."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from mantissa.doctor.budget import Budget, LeftOutError, cannot_compute
from mantissa.doctor.explosion import SEARCH, at_end, explodes, explosion, losses_of
from mantissa.doctor.finding import Cure, Finding
from mantissa.formats import FP32
from mantissa.step.batch import Batch
from mantissa.step.replay import Replay
from mantissa.step.step import Step

STEPS, MOST_STEPS = 20, 50
"""Numbers of steps that are trained: the second one where they are small."""
_FEWEST = 8
"""Steps from which on training says something."""
_SMALL = 3e8
"""Multiplications of a small step."""
_REPLAYS = 3
_TRAININGS = 4
"""How often the steps are trained in a format: with some cures, and as the run does."""
_TIMES = 4.0
_IN_A_ROW = 3
_LEAST = 0.003
"""Share of the loss up to which a difference is none: the margin with which ``compare`` calls losses equivalent."""
_WORSE, _ALIKE = 0.25, 0.1
"""Shares of what fp32 has learned that a format may lose, and that one may differ by whose losses leave the spread."""
NOT_TRAINED = "the step is finite; training was not tried"


def steps_to_train(step: Step) -> int:
    """Return how many steps show whether a format trains worse."""
    count = MOST_STEPS if step.multiplications <= _SMALL else STEPS
    return min(count, step.different or count)


def seconds_to_train(step: Step, budget: Budget, trainings: int = 1) -> float:
    """Return how long one step takes in all trainings, about: some in the run's format, and those of the standard."""
    taken = budget.step_seconds
    if step.format.half is None:  # the reference is in fp64
        references = 1 if step.format.number is FP32 else _REPLAYS + 2  # see ``Standard.spread``
        return taken * (1 + trainings) + budget.fp64_seconds * references
    return taken * trainings + budget.spent.get(FP32.name, taken) * (_REPLAYS + 2)  # the exact one, and one that rests


class Standard:
    """What a format is compared with: the same steps in the reference, and how much rounding changes them.

    Args:
        step: the first one.
        batches: the microbatches of each step.
    """

    def __init__(self, step: Step, batches: list[list[Batch]]) -> None:
        self._step, self.batches = step, batches
        replay = Replay.exact(step)
        self.exact = losses_of(replay, batches)
        """Losses of the reference, fp64."""
        self.weights = {name: weight.detach().clone() for name, weight in replay.model.named_parameters()}
        """What they have become."""

    @cached_property
    def spread(self) -> tuple[Tensor, Tensor]:
        """The middle of the losses of references that are changed by the rounding error, and how far from it a loss
        may be; infinite: anything is rounding.
        """
        if self._step.format.number is FP32:  # whose chaos soon leaves any spread
            return self.exact, torch.full_like(self.exact, math.inf)
        unit = self._step.unit_roundoff
        references = torch.stack([_perturbed(self._step, self.batches, unit, seed) for seed in range(_REPLAYS)])
        spread = (references.max(0).values - references.min(0).values).cummax(0).values
        return references.mean(0), _TIMES * spread.clamp(min=unit * unit)

    def is_worse(self, losses: Tensor, step: Step) -> bool:
        """Return whether losses lose a quarter of what was learned, and more than by a change of the last bit."""
        share = lost(losses, self.exact)
        # What a change of the last bit does, too, is the chaos of the training.
        chaos = abs(lost(_perturbed(step, self.batches, FP32.unit_roundoff, 0), self.exact)) if share > _WORSE else 0.0
        return share > max(_WORSE, _TIMES * chaos)


def _perturbed(step: Step, batches: list[list[Batch]], unit: float, seed: int) -> Tensor:
    replay = Replay.exact(step)
    return torch.tensor(replay.train(replay.perturb(unit, seed, batches)), dtype=torch.float64)


class Course:
    """Trains on with one cure or another, from where a run left its course.

    Args:
        start: the first step.
        budget: of the examination, half of which is for this.
    """

    def __init__(self, start: Step, budget: Budget) -> None:
        self.start, self._budget = start, budget
        self._standards: dict[Hashable, Standard] = {}

    @cached_property
    def count(self) -> int:
        """Steps that are trained with each cure; 0: too few fit into half of the time, or nothing changes weights."""
        if self.start.different is not None:
            return 0
        seconds = seconds_to_train(self.start, self._budget, _TRAININGS)
        fitting = self._budget.seconds / 2 / seconds if seconds else math.inf
        return int(min(fitting, steps_to_train(self.start))) if fitting >= _FEWEST else 0

    def explosion(self) -> Finding | None:
        """Return why fp32 goes wrong as well, of a run that did; None: it does not.

        Raises:
            LeftOutError: there is no time to train.
        """
        if self.start.different is not None:  # nothing changes weights
            return None
        if not self.count:
            seconds = 2 * _FEWEST * seconds_to_train(self.start, self._budget, _TRAININGS)
            raise LeftOutError(f"set {self.start.remedies.time_budget.format(max(seconds, self._budget.seconds + 1))}")
        standard = self._standard(Cure("", self.start), self.start)
        return explosion(
            self.start, standard.batches, standard.exact, lambda: self._budget.goes_on(SEARCH), failed=True
        )

    def learned(self, cure: Cure, base: Step) -> Cure | None:
        """Return a cure with which the step is finite, and training learns as fp32 does with the same change.

        Args:
            cure: of a step.
            base: the step without it.

        Returns:
            The cure, which says where training was not tried; None: it does not hold.
        """
        try:
            with cure.applied():
                return self._learned(cure, base)
        except Exception as error:  # of any kind: a module that cannot compute in fp32 alone
            if cannot_compute(error):
                return None
            raise

    def _learned(self, cure: Cure, base: Step) -> Cure | None:
        # It is finite as the run takes it.
        if Replay.as_run(cure.step).run_with_backoff().nonfinite:
            return None
        if not self.count:
            return replace(cure, about=cure.about or NOT_TRAINED)

        # It trains as fp32 does, which learns.
        standard, changed = self._standard(cure, base), self.start.changed_as(cure.step, base)
        if not standard.exact.isfinite().all() or explodes(standard.exact, standard.exact[:1]):
            return None
        losses = losses_of(Replay.as_run(changed), standard.batches)
        # A constant that rounding adds to the loss is not what training learns.
        learned = losses - (losses - standard.exact)[0]
        # Where numbers are large, a format that rounds in every operator leaves the spread, and learns as much.
        alike = leaves(losses, *standard.spread) is None or abs(lost(learned, standard.exact)) <= _ALIKE
        holds = bool(losses.isfinite().all()) and alike and not standard.is_worse(learned, changed)
        return replace(cure, about="") if holds else None

    def end(self, cure: Cure, base: Step) -> float:
        """Return the loss at which fp32 ends with a cure; 0: training was not tried."""
        return self._standard(cure, base).exact[-_FEWEST:].mean().item() if self.count else 0.0

    def _standard(self, cure: Cure, base: Step) -> Standard:
        """Return what training with a cure is compared with: fp32 with the same data, rate, factor and state."""
        changed = self.start.changed_as(cure.step, base)
        key = (
            cure.data,
            cure.results,
            changed.lr_factor,
            changed.loss_factor,
            bool(changed.moments),
            id(changed.weights),
        )
        if key not in self._standards:
            self._standards[key] = Standard(changed, cure.of(changed.following(self.count)))
        return self._standards[key]


def leaves(losses: Tensor, middle: Tensor, limit: Tensor) -> int | None:
    """Return the index of the first of three losses in a row that are beyond the limit, or None.

    Steps in which fp32 is not finite are not judged: a format cannot be worse than that.

    Args:
        losses: of each step, fp64.
        middle: the mean of the fp32 losses of each step.
        limit: how far from it a loss may be.
    """
    away = (losses - middle).abs()
    beyond = (~(away <= limit.clamp(min=_LEAST * middle.abs())) & limit.isfinite()).tolist()
    starts = range(len(beyond) - _IN_A_ROW + 1)
    return next((start for start in starts if all(beyond[start : start + _IN_A_ROW])), None)


def lost(losses: Tensor, exact: Tensor) -> float:
    """Return which share of what fp32 has learned other losses have not, both in the mean of the last third.

    NaN where fp32 has not learned anything; infinite where the losses are not finite.
    """
    learned = (exact[:3].mean() - at_end(exact).mean()).item()
    if not 0 < learned < math.inf:
        return math.nan
    share = (at_end(losses - exact).mean() / learned).item()
    return share if math.isfinite(share) else math.inf
