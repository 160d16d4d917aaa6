from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mantissa.doctor.budget import Budget
from mantissa.doctor.fp16_range import HIGHEST, LOWEST, Exponents, Range, fp16_range
from mantissa.step.replay import Replay
from mantissa.step.step import Step
from tests.mantissa.doctor.faults import WIDTH, Block, Computes, around, step_of


def test_what_a_scale_loses_is_what_fp16_rounds_to_0() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(4000, generator=generator) * 2.0 ** torch.randint(-40, -5, (4000,), generator=generator)
    gradient[:7] = 0
    layer = Exponents("layer", "weight")
    for microbatch in gradient.sort(descending=True).values.split(1000):  # the largest is in the first
        layer.add(microbatch)
    assert layer.zeros == 7
    assert layer.counts.sum() == 3993
    assert layer.amax == gradient.abs().max()
    for exponent in (0, 3, 11, 20, 30):
        flushed = ((gradient * 2.0**exponent).half() == 0) & (gradient != 0)
        assert layer.lost(2.0**exponent) == pytest.approx((gradient[flushed].norm() / gradient.norm()).item(), rel=1e-4)
    least = layer.least_scale(0.1)
    assert layer.lost(2.0**least) <= 0.1 < layer.lost(2.0 ** (least - 1))


def test_numbers_beyond_the_histogram_are_counted_at_its_ends() -> None:
    layer = Exponents("layer", "weight")
    layer.add(torch.tensor([2.0 ** (LOWEST - 20), 2.0 ** (HIGHEST + 20), torch.inf, torch.nan]))
    assert (layer.counts[0], layer.counts[-1], layer.counts.sum()) == (1, 1, 2)


class OnGpu(Tensor):
    """Numbers of a device, of which ``cpu`` makes a copy."""

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.clone().as_subclass(Tensor)


def test_gradients_are_counted_with_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.bincount

    def bincount(bins: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if torch.are_deterministic_algorithms_enabled() and isinstance(bins, OnGpu) and weights is not None:
            raise RuntimeError("bincount_cuda with weights does not have a deterministic implementation")
        return real(bins, weights, minlength)

    monkeypatch.setattr(torch, "bincount", bincount)
    gradient, alike, other = torch.tensor([0.0, 0.5, 3.0, -3.5]), Exponents("", ""), Exponents("", "")
    torch.use_deterministic_algorithms(True, warn_only=True)
    alike.add(gradient)
    other.add(gradient.as_subclass(OnGpu))
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    for mine, its in ((alike.counts, other.counts), (alike.squares, other.squares)):
        assert torch.equal(mine, its)
        assert type(its) is Tensor


def measured(step: Step) -> Range:
    return fp16_range(step, Budget(600, step))


def test_a_format_with_fp32s_range_needs_no_scale() -> None:
    scales = measured(step_of(lambda: around(nn.LayerNorm(WIDTH))))
    assert (scales.findings, scales.highest, scales.notes) == ((), None, ())
    assert sum(layer.counts.sum().item() for layer in scales.rows) > 0


def test_microbatches_and_recomputed_blocks_are_counted_once() -> None:
    block = Computes(lambda own, x: own.block(x), block=Block())
    recomputed = Computes(lambda own, x: checkpoint(own.block, x, use_reentrant=False), block=Block())
    whole = measured(step_of(lambda: around(block), "fp16"))
    parts = measured(step_of(lambda: around(recomputed), "fp16", accumulate=2))
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert (one.module, one.tensor, one.half) == (other.module, other.tensor, other.half)
        assert 2 * (one.counts.sum() + one.zeros) == other.counts.sum() + other.zeros


def test_the_highest_scale_holds_the_largest_gradient_of_any_microbatch() -> None:
    step = step_of(lambda: around(nn.Linear(WIDTH, WIDTH)), "fp16", accumulate=2)
    next(iter(step.microbatches[0].values())).mul_(64)
    highest = measured(step).highest
    assert highest is not None
    replay = Replay.as_run(step)
    replay.scale = 2.0**highest
    assert not replay.run().nonfinite
    replay.scale = 2.0 ** (highest + 2)
    assert replay.run().nonfinite
