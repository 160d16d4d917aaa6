"""Which of torch's flags a step is computed with, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mantissa.formats import FORMATS, FP32, TF32, Number
from mantissa.step.flags import flags_of, set_flags
from mantissa.step.loop import LoopStep
from mantissa.step.replay import Replay
from tests.mantissa.doctor.faults import Batch, Own, error, regression

Setting = Callable[[], None]
BACKENDS: Any = torch.backends
MATMUL, CUDNN = BACKENDS.cuda.matmul, BACKENDS.cudnn
REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    with flags_of(FP32):
        yield


def older() -> list[Any]:
    """What code that knows only the older flags reads; torch raises where they contradict the newer ones."""
    readings: list[Any] = []
    for read in (lambda: MATMUL.allow_tf32, lambda: CUDNN.allow_tf32, torch.get_float32_matmul_precision):
        try:
            readings.append(read())
        except RuntimeError:
            readings.append("contradiction")
    return readings


def newer() -> list[str]:
    """What the newer flags read as, and what they read as with nothing set outside of all of them."""
    operators = [getattr(BACKENDS.mkldnn, name) for name in ("matmul", "conv", "rnn")]
    places = [CUDNN, MATMUL, CUDNN.conv, CUDNN.rnn, *operators]
    readings, outermost = [place.fp32_precision for place in places], BACKENDS.fp32_precision
    BACKENDS.fp32_precision = "none"
    readings += [place.fp32_precision for place in places]
    BACKENDS.fp32_precision = outermost
    return [outermost, *readings]


def sums() -> list[bool]:
    return [getattr(MATMUL, f"{name}{part}") for name in REDUCTIONS for part in ("", "_split_k")]


SETTINGS: dict[str, Setting] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older": lambda: setattr(CUDNN, "allow_tf32", True),
    "conv": lambda: setattr(CUDNN.conv, "fp32_precision", "none"),
    "matmul": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "everything": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "sums": lambda: setattr(MATMUL, REDUCTIONS[1], True),
}


@pytest.mark.parametrize("names", list(permutations(SETTINGS, 2)), ids="-".join)
@pytest.mark.parametrize("number", [FP32, TF32], ids=lambda number: number.name)
def test_flags_of_a_number_agree_and_those_of_before_come_back(number: Number, names: tuple[str, str]) -> None:
    """Also those that contradict each other, as a loop may have set them."""
    for name in names:
        SETTINGS[name]()
    before = older(), newer(), sums()
    with flags_of(number):
        tf32 = number is TF32
        assert older() == [tf32, tf32, "high" if tf32 else "highest"]
        assert {place.fp32_precision for place in (MATMUL, CUDNN, CUDNN.conv, CUDNN.rnn)} == {
            "tf32" if tf32 else "ieee"
        }
        assert sums() == [False, True] * 2  # parts of a sum may be added up, in fp32
    assert (older(), newer(), sums()) == before


def test_a_format_has_its_own_flags_and_the_run_those_that_it_has() -> None:
    seen: list[tuple[str, str, bool]] = []

    def note() -> None:
        seen.append((MATMUL.fp32_precision, CUDNN.conv.fp32_precision, getattr(MATMUL, REDUCTIONS[1])))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        note()
        result = error(model, batch)
        result.register_hook(lambda gradient: note())
        return result

    def taken(replay: Any) -> set[tuple[str, str, bool]]:
        seen.clear()
        replay.train(replay.step.following(1))
        return set(seen)

    model = Own()
    step = LoopStep.copied(model, loss, regression(), FORMATS["bf16"], torch.optim.SGD(model.parameters(), 0.1))
    MATMUL.allow_tf32, CUDNN.allow_tf32 = True, True
    setattr(MATMUL, REDUCTIONS[1], True)
    loops = ("tf32", "tf32", True)
    assert taken(Replay.as_run(step)) == {loops}
    for replay in (
        Replay.reference(step),
        Replay.exact(step),
        Replay.in_format(step, FORMATS["fp32"]),
        Replay.in_format(step, FORMATS["bf16"]),
    ):
        assert taken(replay) == {("ieee", "ieee", False)}
    assert taken(Replay.as_run(step.in_format(FORMATS["fp32"]))) == {("ieee", "ieee", False)}  # a cure
    set_flags(FP32)
    tf32 = LoopStep.copied(model, loss, regression(), FORMATS["tf32"])
    for replay in (Replay.in_format(step, FORMATS["tf32"]), Replay.as_run(tf32)):
        assert taken(replay) == {("tf32", "tf32", False)}
    assert taken(Replay.as_run(step)) == {("ieee", "ieee", False)}
