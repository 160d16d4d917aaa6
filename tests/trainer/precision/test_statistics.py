"""What scaled formats do to operands, as it is logged: against the same in fp64, of whole matrices worked out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mantissa.formats import FORMATS, FP8, MXFP8, NVFP4, Number
from tests.helpers import GPT2, fit, mxfp8_of_torchao, same_bits, trainer_of
from tests.trainer.precision import ocp
from tests.trainer.precision.test_block_products import drawn, exact, trained
from trainer.parallel.world import World
from trainer.precision import nvfp4, scaled, statistics
from trainer.precision.statistics import AMAX, FLUSHED, OPERANDS, SATURATED, SQNR
from trainer.profiling.diagnostics import Numerics, ScaledMeter

SCALED = [name for name, row in FORMATS.items() if row.number.scaled]

Rounded = tuple[ocp.Array, ocp.Array]
"""Values of a format, and the largest of the format at the scale of each."""


@pytest.fixture(autouse=True)
def skipped_without_torchao(request: pytest.FixtureRequest) -> None:
    if "fp8" in request.node.name:
        mxfp8_of_torchao(native=False)


def expected(values: ocp.Array, rounded: ocp.Array, largest: ocp.Array) -> dict[str, float]:
    is_there = values != 0
    return {
        SQNR: 20 * math.log10(np.linalg.norm(values) / np.linalg.norm(values - rounded)),
        FLUSHED: (is_there & (rounded == 0)).sum() / is_there.sum(),
        SATURATED: (np.abs(values) > largest * (1 + 1e-6)).sum() / is_there.sum(),
        AMAX: np.abs(values).max(),
    }


def found(table: Tensor) -> dict[str, dict[str, float]]:
    """By operand."""
    result: dict[str, dict[str, float]] = {operand: {} for operand in OPERANDS}
    for name, operand, _, value in statistics.measured(["layer"], *statistics.split(table[None])):
        result[operand][name] = value
    return result


def fp8(values: ocp.Array, elements: ocp.Array, axis: int | None) -> Rounded:
    sizes = np.abs(values).max(axis, keepdims=True)
    unit = sizes / elements[-1] if axis is None else 2.0 ** np.ceil(np.log2(sizes / elements[-1]))
    unit = np.broadcast_to(unit, values.shape)
    return ocp.nearest(values, elements, unit) * unit, elements[-1] * unit


def mxfp8(values: ocp.Array) -> Rounded:
    elements, scales = ocp.mxfp8(values)
    return elements * scales, ocp.E4M3[-1] * scales


def of_torchao(scaling: str, number: Number) -> list[Callable[[ocp.Array], Rounded]]:
    """What rounds each of the operands."""
    if number is MXFP8:
        return [mxfp8] * 4
    if scaling == "rowwise":
        return [lambda values: fp8(values, ocp.E4M3, 1)] * 4
    return [lambda values: fp8(values, ocp.E4M3, None)] * 2 + [lambda values: fp8(values, ocp.E5M2, None)] * 2


@pytest.mark.parametrize(
    ("number", "scaling"), [(FP8, "tensorwise"), (FP8, "rowwise"), (MXFP8, "")], ids=["fp8", "fp8-rowwise", "mxfp8"]
)
def test_statistics_of_torchaos_formats_are_those_of_fp64(number: Number, scaling: str) -> None:
    """Another operand, dimension of scales or element format would show."""
    x, weight, upstream = drawn(4)
    table, product = torch.zeros(4, 6), scaled.ARITHMETIC[number].product(scaling, False)
    trained(lambda *operands: product(*operands, table), x, weight, upstream)
    operands = exact(x), exact(weight), exact(upstream), exact(upstream.t())
    for name, values, rounded in zip(OPERANDS, operands, of_torchao(scaling, number), strict=True):
        assert found(table)[name] == pytest.approx(expected(values, *rounded(values)), rel=1e-4), name
    assert found(table)["dgrad"][FLUSHED] > 0


def test_statistics_of_nvfp4_are_those_of_the_very_numbers_that_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, quantize = list[tuple[Tensor, bool, bool, ocp.Array]](), nvfp4.quantize

    def recorded(values: Tensor, square: bool = False, stochastic: bool = False) -> tuple[Tensor, Tensor]:
        rounded, scale = quantize(values, square, stochastic)
        calls.append((values, square, stochastic, exact(rounded) * scale.item()))
        return rounded, scale

    monkeypatch.setattr(nvfp4, "quantize", recorded)
    x, weight, upstream = drawn(2)
    table = torch.zeros(4, 6)
    trained(lambda *operands: nvfp4.product(*operands, table), x, weight, upstream)
    multiplied = {"input": calls[1], "weight": calls[0], "dgrad": calls[2], "wgrad": calls[3]}
    for name, (values, square, stochastic, rounded) in multiplied.items():
        assert stochastic == (name in ("dgrad", "wgrad"))
        scales, of_tensor = ocp.nvfp4_quotients(exact(values), 16 if square else 1)[1:]
        largest = ocp.E2M1[-1] * scales * of_tensor
        assert found(table)[name] == pytest.approx(expected(exact(values), rounded, largest), rel=1e-4), name
        assert found(table)[name][SATURATED] > 0
    assert found(table)["input"][FLUSHED] > 0


@pytest.mark.parametrize("number", [FP8, MXFP8, NVFP4], ids=lambda number: number.name)
def test_microbatches_add_up(number: Number) -> None:
    """And squares of gradients below 1e-23, which are 0 in fp32, too."""
    product = scaled.ARITHMETIC[number].product("rowwise", False)
    tables = [torch.zeros(4, 6) for _ in range(3)]
    for seed, size in enumerate((1.0, 2.0**5)):
        x, weight, upstream = drawn(1, seed)
        for table in (tables[seed], tables[2]):
            torch.manual_seed(seed)
            with_table = lambda *operands, table=table: product(*operands, table)  # noqa: E731
            trained(with_table, x * size, weight, upstream * size * 2.0**-80)
    one, other, both = (statistics.split(table) for table in tables)
    assert torch.allclose(one[0] + other[0], both[0], rtol=1e-5, atol=0)
    assert torch.equal(torch.maximum(one[1], other[1]), both[1])
    assert (both[0][:, 3:] > 0).all()
    assert both[1][2] > 16 * one[1][2]


def test_rows_are_sampled_evenly_and_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "SAMPLE", 64 * 48)
    matrix = torch.arange(30 * 16).float()[:, None].expand(-1, 64)
    rows = statistics.sampled(matrix)[:, 0]
    assert 24 < len(rows) <= 48
    assert len({int(row) % 12 for row in rows}) == 12  # of samples of one length, rows of all places
    blocks = statistics.sampled(matrix, 16)[:, 0].view(-1, 16)
    assert 1 < len(blocks) <= 3
    assert (blocks % 16 == torch.arange(16)).all()
    assert len(statistics.sampled(matrix.repeat(1, 1000), 16)) == 16


# --- of models ---


class Chain(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.layer_norm(layer(x), [64])
        return x


class Rank(World):
    """One of two ranks; the other's tensors are given."""

    size = 2

    def __init__(self, rank: int, others: list[Tensor]) -> None:
        self.rank, self.sent, self.others = rank, list[Tensor](), others

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor)
        return tensor + self.others.pop(0) if self.others else tensor


def test_ranks_add_up_and_have_the_largest_of_all() -> None:
    tables = torch.tensor([[8.0, 1, 2, 3, 0.5, 7], [24.0, 2, 0, 4, 1.5, 5]])
    model = nn.Sequential(nn.Linear(16, 16))

    def logged(rank: int, others: list[Tensor]) -> tuple[dict[str, float], list[Tensor]]:
        meter = ScaledMeter(model, world := Rank(rank, others))
        meter.begin(1)
        model[0].statistics[statistics.DGRAD] = tables[rank]
        meter.end()
        ((_, metrics),) = meter.take()
        return metrics, world.sent

    alone = [logged(rank, [])[1] for rank in (0, 1)]
    one, other = (logged(rank, alone[1 - rank])[0] for rank in (0, 1))
    assert one == other
    assert one["layers/flushed/dgrad/0"] == 3 / 32
    assert one["layers/saturated/dgrad/0"] == 2 / 32
    assert one["layers/amax/dgrad/0"] == 7
    assert one["layers/sqnr_db/dgrad/0"] == pytest.approx(20 * math.log10(5 / math.hypot(0.5, 1.5)), rel=1e-4)


def test_layers_are_those_in_force_in_the_step_that_is_measured() -> None:
    model = Chain()
    meter, product = ScaledMeter(model, World()), {NVFP4: nvfp4.product}
    names = []
    for step, layers in enumerate((["layers.0", "layers.1"], ["layers.2"], []), 1):
        scaled.convert(model, dict.fromkeys(layers, NVFP4), product)
        meter.begin(step)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(32, 64)).sum().backward()
            with torch.no_grad():  # as in an evaluation
                model(torch.randn(32, 64) * 1e6)
        meter.end()
        ((_, metrics),) = meter.take()
        names.append(sorted({key.rpartition("/")[2] for key in metrics if key.startswith("layers/")}))
        assert all(value < 1e4 for name, value in metrics.items() if name.startswith("numerics/amax"))
    assert names == [["layers.0", "layers.1"], ["layers.2"], []]


@pytest.mark.parametrize("mode", SCALED)
def test_gradients_in_bf16_have_no_row(mode: str) -> None:
    """``precision.gradients=bf16``."""
    model, number = Chain(), FORMATS[mode].number
    product = scaled.product_of(number, "tensorwise", "bf16", torch.device("cpu"))
    scaled.convert(model, dict.fromkeys(scaled.linear_layers(model), number), {number: product})
    meter = ScaledMeter(model, World())
    meter.begin(7)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(128, 64)).sum().backward()
    meter.end()
    ((step, metrics),) = meter.take()
    assert step == 7
    assert not list(meter.take())
    assert {name.split("/")[2] for name in metrics} == {"input", "weight"}


@pytest.mark.parametrize("mode", SCALED)
def test_measured_steps_train_the_same_to_the_last_bit(mode: str) -> None:
    job = (*GPT2, f"precision={mode}", "steps=4", "micro_batch_size=2", "recipe.dropout=0.1")
    plain, metered = trainer_of(*job), trainer_of(*job)
    torch.manual_seed(3)
    fit(plain)
    random = torch.get_rng_state()
    torch.manual_seed(3)
    session = Numerics(2).start(metered.model, metered.update, torch.bfloat16, World())
    batches, logged = metered.batches(), dict[int, dict[str, float]]()
    for step in range(1, 5):
        session.begin(step)
        metered.train_step(next(batches))
        if step == 3:
            logged |= dict(session.collect())
    logged |= dict(session.collect())
    assert same_bits(random, torch.get_rng_state())
    for one, other in ((plain.model, metered.model), (plain.optimizer, metered.optimizer)):
        assert same_bits(one.state_dict(), other.state_dict())
    layers, operands = [*scaled.converted(metered.model)], ("input", "weight", "dgrad", "wgrad")
    names = {f"layers/{name}/{operand}" for name in (SQNR, FLUSHED, SATURATED, AMAX) for operand in operands}
    for step in (2, 4):
        of_layers = {key for key in logged[step] if key.startswith("layers/")}
        assert of_layers == {f"{name}/{layer}" for name in names for layer in layers}
        for name in names:
            of_each = [logged[step][f"{name}/{layer}"] for layer in layers]
            worst = min(of_each) if SQNR in name else max(of_each)
            assert logged[step][name.replace("layers", "numerics")] == pytest.approx(worst, rel=1e-5)
    assert list(logged) == [2, 4]


def test_compiled_layers_have_one_more_graph_for_measured_steps() -> None:
    """Traced by torch.compile, and run eagerly."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = Chain()
    scaled.convert(model, {"layers.0": NVFP4}, {NVFP4: nvfp4.product})
    counter: Any = CompileCounterWithBackend("aot_eager")
    compiled, meter = torch.compile(model, backend=counter, fullgraph=True), ScaledMeter(model, World())
    gradients, logged = [], []
    for step in range(1, 6):
        model.zero_grad()
        torch.manual_seed(0)
        if step in (2, 4):
            meter.begin(step)
        with torch.autocast("cpu", torch.bfloat16):
            compiled(torch.randn(32, 64)).square().sum().backward()
        meter.end()
        gradients.append([parameter.grad for parameter in model.parameters()])
        logged += [metrics for _, metrics in meter.take()]
        assert counter.frame_count == min(step, 2)
    assert all(same_bits(gradients[0], each) for each in gradients)
    assert logged[0] == logged[1]
    assert len(logged[0]) == 2 * 4 * 3  # no gradient of the first input
