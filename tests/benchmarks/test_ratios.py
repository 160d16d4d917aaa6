from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import loading, overhead, ratios
from benchmarks.jobs import BIGNET, TINY_MLP, BareLoop, Job, Workload, gpt2_job, resnet_job
from benchmarks.overhead import Turns, overheads
from benchmarks.rows import Bench, Row
from mantissa.formats import BASIC
from trainer.errors import RunError
from trainer.hardware import Hardware, detect
from trainer.optim import classes as optimizer_names
from trainer.trainer import Trainer

CPU = torch.device("cpu")
MODES = frozenset(BASIC)
"""However slow they are here."""
SMALL = Job(
    "small",
    ("recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=64", "profiler=none", "batch_size=4"),
    steps=2,
    rounds=3,
)
TEXT = Job(
    "text",
    ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64", "batch_size=4"),
)


class FakeClock:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds_a_step: float) -> Callable[[int], float]:
        def block(steps: int) -> float:
            self.now += steps * seconds_a_step
            return steps * seconds_a_step

        return block


@pytest.fixture
def gpu() -> Hardware:
    return Hardware(torch.device("cuda", 0), "a GPU", 2**36, 8, (9, 0))


def test_a_run_alternates_with_the_blocks_of_others() -> None:
    clock = FakeClock()
    calls: list[int] = []
    work = clock.work(2.0)

    def bare(steps: int) -> float:
        calls.append(steps)
        return work(steps)

    turns = Turns(Job("", (), 2, 3), 2, {"bare": bare}, clock, lambda name, repeat: None)
    turns.start()
    for step in range(1, 21):  # two more than are measured
        clock.now += 30.0 if step <= 6 else 3.0  # the warm-up is slow
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
    assert speed.met is True
    assert replace(speed, values=[1.7, 1.75, 2.4]).met is False
    assert "1.900x  (1.700 to 2.400)" in speed.text()
    assert "target ≥ 1.8x: met" in speed.text()
    cost = Row("cost", "ms", [0.1, 0.3, 0.2], "a command", target=0.15)
    assert cost.met is False
    assert replace(cost, values=[0.1]).met is True
    assert "0.200 ms" in cost.text()
    assert "target ≤ 0.15 ms: MISSED" in cost.text()
    bound = replace(cost, values=[0.1], lower_bound=True)
    assert bound.met is False
    assert "| at least 0.100 ms (0.100 to 0.100) |" in bound.markdown()
    assert Row("cost", "ms", [0.1], "a command").met is None
    nothing = Row("cost", "ms", [], "not measured: accelerate is not installed", target=0.15)
    assert nothing.met is None
    assert "not installed" in nothing.text()


def test_the_jobs_are_commands_that_resolve(gpu: Hardware) -> None:
    for hardware in (detect("cpu"), gpu):
        for job in (gpt2_job(hardware), resnet_job(hardware), BIGNET, TINY_MLP):
            plan = job.config("precision=bf16", "clip=norm").resolve(hardware).plan
            assert plan.batching.accumulation == 1, "one microbatch, as the bare loop has it"
    assert gpt2_job(detect("cpu")).line("precision=bf16").startswith("python scripts/train.py recipe=gpt2 ")


def test_the_bare_loop_trains_and_logs_every_ten_steps() -> None:
    hardware = detect("cpu")
    config = TINY_MLP.config("precision=fp32", "optimizer.lr=0.01")
    loop = BareLoop(Workload(Trainer.from_config(config, hardware)))
    loop.run(5)
    loop.run(95)
    assert [step for step, _ in loop.log] == list(range(10, 101, 10))
    assert loop.log[-1][1] < 0.7 * loop.log[0][1]


def test_speedups_are_measured(tmp_path: Path) -> None:
    arch = ("recipe=resnet", "recipe.arch=squeezenet1_1", "recipe.image_size=32", "data=synthetic", "data.classes=2")
    jobs = (SMALL, Job("images", (*arch, "batch_size=2")))
    rows = list(ratios.precision(Bench(detect("cpu"), 2, tmp_path, modes=MODES), jobs))
    expected = ["small, throughput, bf16 / fp32", "small, throughput, fp16 / fp32"]
    expected += ["images, throughput, bf16 / fp32", "images, throughput, bf16 / bf16 NCHW"]
    assert [row.name for row in rows] == expected
    assert all(len(row.values) == 2 and min(row.values) > 0 for row in rows)


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_the_overhead_of_the_trainer_is_measured(tmp_path: Path) -> None:
    jobs = (replace(SMALL, overrides=(*SMALL.overrides, "tracking=local")), replace(TINY_MLP, steps=2, rounds=3))
    rows = list(overhead.trainer_cost(Bench(detect("cpu"), 2, tmp_path, modes=MODES), jobs))
    names = ["small", "tiny MLP", "tiny MLP by CPU time"]
    assert [row.name for row in rows] == [f"{name}, Mantissa over a bare loop" for name in names]
    assert [row.unit for row in rows] == ["%", "ms", "ms"]
    assert [len(row.values) for row in rows] == [2, 2, 2]
    # What was measured is the whole run: the log of all its steps, and MLflow.
    assert len((tmp_path / "small" / "metrics.jsonl").read_text().splitlines()) == 4  # 1, 10, 19, evaluation
    assert (tmp_path / "mlflow.db").exists()
    assert (tmp_path / "tiny-MLP" / "mlflow.json").exists()


def test_the_overhead_is_measured_where_mlflow_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "find_spec", lambda name: None)
    tiny = replace(TINY_MLP, steps=2, rounds=1)
    rows = list(overhead.trainer_cost(Bench(detect("cpu"), 1, tmp_path, modes=MODES), (tiny, tiny)))
    assert all("without MLflow" in row.measured and len(row.values) == 1 for row in rows)
    assert not (tmp_path / "mlflow.db").exists()


def test_the_cost_of_averaged_weights_is_a_share_of_the_step(tmp_path: Path) -> None:
    (row,) = ratios.ema_cost(Bench(detect("cpu"), 2, tmp_path), SMALL)
    assert (row.name, row.unit, row.target) == ("small, ema=default, over ema=none", "%", 2.0)
    assert len(row.values) == 4
    assert statistics.median(row.values) > 0


def test_the_cost_of_a_measurement_is_spread_over_its_interval(tmp_path: Path) -> None:
    (row,) = ratios.diagnostics_cost(Bench(detect("cpu"), 2, tmp_path), SMALL)
    assert (row.name, row.unit, row.target) == ("small, diagnostics=numerics, over diagnostics=none", "%", 2.0)
    assert len(row.values) == 4
    assert statistics.median(row.values) > 0


def test_steps_of_optimizers_are_compared_with_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimizer_names._ELSEWHERE, "Lion", ("missing_library", "missing_library>=1"))
    muon, lion = ratios.optimizers(Bench(detect("cpu"), 2, tmp_path), TEXT, ("muon", "lion"))
    assert (muon.name, muon.unit, len(muon.values)) == ("text, a step with muon / with adamw", "x", 2)
    assert muon.measured.endswith("batch_size=4 optimizer=muon")
    assert lion.values == []
    assert "not measured: " in lion.measured
    assert "pip install 'missing_library>=1'" in lion.measured


def test_peak_memory_is_compared(tmp_path: Path) -> None:
    (row,) = overhead.peak_memory(Bench(detect("cpu"), 1, tmp_path), [(SMALL, "fp32")])
    assert len(row.values) == 1
    assert 0.8 < statistics.median(row.values) < 1.25


FAKE_TRAIN = """
import pathlib, sys, time
if "precision=bf61" in sys.argv:
    sys.exit(2)
pathlib.Path("calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
print("step 1/1  loss 1.0", flush=True)
if "eval_samples=1" not in sys.argv:
    time.sleep(600)
"""


def test_starting_is_measured_until_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAKE_TRAIN)
    rows = list(ratios.startup(Bench(detect("cpu"), 1, tmp_path, modes=MODES), script))
    assert [row.unit for row in rows] == ["s", "x", "s", "x", "s"]
    assert statistics.median(rows[0].values) < 600  # the process's own end
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[1] == "recipe=gpt2 precision=bf16 steps=1 device=cpu"


@pytest.mark.parametrize("options", [{"code": 2}, {"until": "step 1/1"}])
def test_a_process_that_ends_otherwise_is_an_error(tmp_path: Path, options: dict[str, object]) -> None:
    command = [sys.executable, "-c", "import sys; print('what it said'); sys.exit(1)"]
    with pytest.raises(RunError, match=r"status 1:\nwhat it said"):
        ratios._seconds(command, tmp_path, **options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm's reader
def test_loading_is_measured_beside_torchvisions_own_loop_and_timms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BATCH", 4)
    found = {row.name: row for row in loading.loader(Bench(detect("cpu"), 1, tmp_path), images=8, batches=1)}
    for policy in loading.POLICIES:
        rate = found[f"loading alone, {policy}, Mantissa"]
        assert rate.unit == "images/s"
        assert statistics.median(rate.values) > 1
        own = statistics.median(found[f"loading alone, {policy}, torchvision"].values)
        assert statistics.median(found[f"loading, {policy}, Mantissa / torchvision"].values) == pytest.approx(
            statistics.median(rate.values) / own
        )
    assert statistics.median(found["loading alone, imagenet, timm"].values) > 1


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_what_the_loaders_return_is_of_the_same_images_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BATCH", 4)
    loading.write_jpegs(tmp_path, loading.BATCH)
    batches = {
        "torchvision": next(iter(loading.torchvision_loader(tmp_path, "imagenet"))),
        "uint8": next(iter(loading.torchvision_loader(tmp_path, "imagenet", normalise=False))),
        "timm": next(iter(loading.timm_loader(tmp_path))),
    }
    for name, (images, labels) in batches.items():
        assert images.shape == (loading.BATCH, 3, loading.SIZE, loading.SIZE)
        assert images.dtype == (torch.uint8 if name == "uint8" else torch.float32)
        assert labels.sum() == loading.BATCH // 2
    assert batches["torchvision"][0].mean().abs() < 1
    assert batches["timm"][0].mean().abs() < 1
