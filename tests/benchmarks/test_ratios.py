"""Rows of the bench: what their numbers mean, with loops whose seconds are given."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import overhead, ratios
from benchmarks.jobs import BIGNET, TINY_MLP, BareLoop, Job, Workload, gpt2_job, resnet_job
from benchmarks.overhead import alternate
from benchmarks.rows import Bench, Times
from evidence.turns import Block
from mantissa.formats import BASIC
from trainer.errors import RunError
from trainer.hardware import Hardware, detect
from trainer.optim import optimizer as optimizer_names
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
SECONDS = {"fp32": 4.0, "bf16": 2.0, "fp16": 1.0, ratios.NCHW: 3.0, "adamw": 2.0, "muon": 3.0}
SECONDS |= {
    "cached": 1.0,
    "all": 6.0,
    "step": 1.0,
    "update": 0.25,
    "measured": 0.5,
    "Mantissa": 1.0,
    "torchvision": 2.0,
}


class Known(Bench):
    """Calls each block once; then it is known how long it took."""

    def interleave(
        self, blocks: Mapping[str, Callable[[], float]], repeats: int | None = None, warm_up: int = 1
    ) -> Times:
        assert all(block() > 0 for block in blocks.values())
        return {name: [SECONDS.get(name, 1.0)] for name in blocks}


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return Known(detect("cpu"), 1, tmp_path, modes=frozenset(BASIC))  # however slow formats are here


def test_the_jobs_are_commands_that_resolve() -> None:
    for hardware in (detect("cpu"), Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))):
        for job in (gpt2_job(hardware), resnet_job(hardware), BIGNET, TINY_MLP):
            plan = job.config("precision=bf16", "clip=norm").plan(hardware)
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
        f"images, throughput, bf16 / {ratios.NCHW}": [1.5],
    }


def test_an_optimizer_whose_library_is_missing_is_named(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimizer_names._ELSEWHERE, "Lion", ("missing_library", "missing_library>=1"))
    lion, muon = ratios.optimizers(known, SMALL, ("muon", "lion"))
    assert (muon.unit, muon.values, lion.values) == ("x", [1.5], [])
    assert "pip install 'missing_library>=1'" in lion.measured


def test_a_run_pauses_while_others_take_their_turns(tmp_path: Path) -> None:
    job, now = replace(SMALL, overrides=(*SMALL.overrides, "tracking=local")), [0.0]

    def others(workload: Workload) -> dict[str, Block]:
        def block(steps: int) -> float:
            now[0] += 10.0 * steps
            return 10.0 * steps

        return {"other": block}

    times = alternate(Bench(detect("cpu"), 2, tmp_path), job, ("log_every=10",), others, clock=lambda: now[0])
    assert times == {"trainer": [0.0, 0.0], "bare": [0.0, 0.0], "other": [60.0, 60.0]}
    assert len((tmp_path / "small" / "metrics.jsonl").read_text().splitlines()) == 4  # 1, 10, 19, evaluation


def test_the_overhead_is_of_a_whole_run(tmp_path: Path) -> None:
    jobs = (replace(SMALL, overrides=(*SMALL.overrides, "tracking=local")), replace(TINY_MLP, steps=2, rounds=3))
    rows = list(overhead.trainer_cost(Bench(detect("cpu"), 2, tmp_path, modes=frozenset(BASIC)), jobs))
    assert [(row.unit, len(row.values)) for row in rows] == [("%", 2), ("ms", 2), ("ms", 2)]
    assert (tmp_path / "tiny-MLP" / "tracking.json").exists()


FAKE_TRAIN = """
import sys, time
if "precision=bf61" in sys.argv:
    sys.exit(2)
print("step 1/1  loss 1.0", flush=True)
if "eval_samples=1" not in sys.argv:
    time.sleep(600)
"""


def test_starting_is_measured_until_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAKE_TRAIN)
    first_step, mistake = ratios.startup(Bench(detect("cpu"), 1, tmp_path), script)
    assert 0 < statistics.median(first_step.values) < 600  # the process's own end
    assert mistake.values
    command = [sys.executable, "-c", "import sys; print('what it said'); sys.exit(1)"]
    with pytest.raises(RunError, match=r"status 1:\nwhat it said"):
        ratios._seconds(command, tmp_path, code=2)
