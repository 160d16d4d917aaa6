"""Rows of the bench: what their numbers mean, with loops whose seconds are given."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import loading, overhead, ratios
from benchmarks.jobs import BIGNET, TINY_MLP, BareLoop, Job, Workload, gpt2_job, resnet_job
from benchmarks.overhead import Turns, overheads
from benchmarks.rows import Bench, Row
from benchmarks.turns import Times
from mantissa.formats import BASIC
from trainer.errors import RunError
from trainer.hardware import Hardware, detect
from trainer.optim import classes as optimizer_names
from trainer.profiling.diagnostics import Numerics
from trainer.trainer import Trainer

SMALL = Job(
    "small",
    ("recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=64", "profiler=none", "batch_size=4"),
    steps=2,
    rounds=3,
)
IMAGES = Job(
    "images",
    (
        *("recipe=resnet", "recipe.arch=squeezenet1_1", "recipe.image_size=32"),
        *("data=synthetic", "data.classes=2", "batch_size=2"),
    ),
)
SECONDS = {"fp32": 4.0, "bf16": 2.0, "fp16": 1.0, "bf16 NCHW": 3.0, "adamw": 2.0, "muon": 3.0}
SECONDS |= {"step": 1.0, "update": 0.25, "measured": 0.5, "Mantissa": 1.0, "torchvision": 2.0}


class Known(Bench):
    """Calls each block once; then it is known how long it took."""

    def interleave(
        self, what: str, blocks: Mapping[str, Callable[[], float]], repeats: int | None = None, warm_up: int = 1
    ) -> Times:
        assert all(block() > 0 for block in blocks.values())
        return {name: [SECONDS.get(name, 1.0)] for name in blocks}


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return Known(detect("cpu"), 1, tmp_path, modes=frozenset(BASIC))  # however slow formats are here


def test_a_run_alternates_with_the_blocks_of_others() -> None:
    now, calls = [1000.0], []

    def bare(steps: int) -> float:
        calls.append(steps)
        now[0] += steps * 2.0
        return steps * 2.0

    turns = Turns(Job("", (), 2, 3), 2, {"bare": bare}, lambda: now[0], lambda name, repeat: None)
    turns.start()
    for step in range(1, 21):  # two more than are measured
        now[0] += 30.0 if step <= 6 else 3.0  # the warm-up is slow
        turns.take(step)
    assert turns.last_step == 18
    assert turns.times == {"trainer": [18.0, 18.0], "bare": [12.0, 12.0]}
    assert calls == 9 * [2]


def test_overheads_are_per_cent_or_milliseconds_a_step() -> None:
    times = {"trainer": [1.02, 2.2], "bare": [1.0, 2.0]}
    assert overheads(times, "%", 100) == pytest.approx([2.0, 10.0])
    assert overheads(times, "ms", 100) == pytest.approx([0.2, 2.0])


def test_a_row_quotes_the_median_and_judges_it() -> None:
    speed = Row("bf16 / fp32", "x", [1.7, 1.9, 2.4], "a command", target=1.8, at_most=False)
    assert (speed.met, replace(speed, values=[1.7, 1.75, 2.4]).met) == (True, False)
    assert "1.900x  (1.700 to 2.400)" in speed.text()
    assert "target ≥ 1.8x: met" in speed.text()
    cost = Row("cost", "ms", [0.1, 0.3, 0.2], "a command", target=0.15)
    assert (cost.met, replace(cost, values=[0.1]).met, replace(cost, values=[]).met) == (False, True, None)
    assert "target ≤ 0.15 ms: MISSED" in cost.text()
    bound = replace(cost, values=[0.1], lower_bound=True)
    assert (bound.met, replace(bound, target=None).met) == (False, None)
    assert "| at least 0.100 ms (0.100 to 0.100) |" in bound.markdown()


def test_the_jobs_are_commands_that_resolve() -> None:
    for hardware in (detect("cpu"), Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))):
        for job in (gpt2_job(hardware), resnet_job(hardware), BIGNET, TINY_MLP):
            plan = job.config("precision=bf16", "clip=norm").resolve(hardware).plan
            assert plan.batching.accumulation == 1, "one microbatch, as the bare loop has it"


def test_the_bare_loop_trains_and_logs_every_ten_steps() -> None:
    config = TINY_MLP.config("precision=fp32", "optimizer.lr=0.01")
    loop = BareLoop(Workload(Trainer.from_config(config, detect("cpu"))))
    loop.run(5)
    loop.run(95)
    assert [step for step, _ in loop.log] == list(range(10, 101, 10))
    assert loop.log[-1][1] < 0.7 * loop.log[0][1]


def test_a_speedup_is_the_time_of_the_slower_over_that_of_the_faster(known: Known) -> None:
    rows = {row.name: row.values for row in ratios.precision(known, (SMALL, IMAGES))}
    assert rows == {
        "small, throughput, bf16 / fp32": [2.0],
        "small, throughput, fp16 / fp32": [4.0],
        "images, throughput, bf16 / fp32": [2.0],
        "images, throughput, bf16 / bf16 NCHW": [1.5],
    }


def test_costs_are_shares_of_the_steps_without_them(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    (ema,) = ratios.ema_cost(known, SMALL)
    assert (ema.unit, ema.values) == ("%", [pytest.approx(100 * 0.25 / 0.75)])
    (numerics,) = ratios.diagnostics_cost(known, SMALL)
    assert numerics.values == [pytest.approx(100 * 0.25 / Numerics().every)]
    monkeypatch.setitem(optimizer_names._ELSEWHERE, "Lion", ("missing_library", "missing_library>=1"))
    muon, lion = ratios.optimizers(known, SMALL, ("muon", "lion"))
    assert (muon.unit, muon.values, lion.values) == ("x", [1.5], [])
    assert "pip install 'missing_library>=1'" in lion.measured


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm's reader
def test_loading_is_images_a_second_of_the_same_images_and_size(
    known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BATCH", 4)
    rows = {row.name: row.values for row in loading.loader(known, images=8, batches=1)}
    assert rows["loading alone, randaugment, torchvision"] == [4 / 2.0]
    assert rows["loading, imagenet, Mantissa / torchvision"] == [2.0]
    for images, labels in (
        next(iter(loading.torchvision_loader(tmp_path / "train", "imagenet"))),
        next(iter(loading.timm_loader(tmp_path / "train"))),
    ):
        assert (images.shape, images.dtype) == ((4, 3, loading.SIZE, loading.SIZE), torch.float32)
        assert images.mean().abs() < 1
        assert len(labels) == 4


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_the_overhead_is_of_a_whole_run(tmp_path: Path) -> None:
    jobs = (replace(SMALL, overrides=(*SMALL.overrides, "tracking=local")), replace(TINY_MLP, steps=2, rounds=3))
    rows = list(overhead.trainer_cost(Bench(detect("cpu"), 2, tmp_path, modes=frozenset(BASIC)), jobs))
    assert [(row.unit, len(row.values)) for row in rows] == [("%", 2), ("ms", 2), ("ms", 2)]
    assert len((tmp_path / "small" / "metrics.jsonl").read_text().splitlines()) == 4  # 1, 10, 19, evaluation
    assert (tmp_path / "tiny-MLP" / "mlflow.json").exists()


def test_peak_memory_is_compared(known: Known) -> None:
    (row,) = overhead.peak_memory(known, [(SMALL, "fp32")])
    assert len(row.values) == 1
    assert 0.8 < statistics.median(row.values) < 1.25


FAKE_TRAIN = """
import pathlib, sys, time
if "precision=bf61" in sys.argv:
    sys.exit(2)
print("step 1/1  loss 1.0", flush=True)
if "eval_samples=1" not in sys.argv:
    time.sleep(600)
"""


def test_starting_is_measured_until_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAKE_TRAIN)
    rows = list(ratios.startup(Bench(detect("cpu"), 1, tmp_path), script))
    assert [row.unit for row in rows] == ["s", "x", "s", "x", "s"]
    assert statistics.median(rows[0].values) < 600  # the process's own end
    command = [sys.executable, "-c", "import sys; print('what it said'); sys.exit(1)"]
    with pytest.raises(RunError, match=r"status 1:\nwhat it said"):
        ratios._seconds(command, tmp_path, code=2)
