from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import peers as module
from benchmarks.jobs import TINY_MLP, BareLoop, Workload
from benchmarks.overhead import PEAK_STEP, Loop, bare, first_steps, stepwise
from benchmarks.peers import FRAMEWORKS, MANTISSA, Framework, _distance, fitted, peers
from benchmarks.rows import Bench
from trainer.hardware import detect
from trainer.trainer import Trainer

JOB = replace(TINY_MLP, overrides=(*TINY_MLP.overrides, "tracking=local"), steps=2, rounds=2)
OPTIONS = ("precision=fp32", "clip=norm", "schedule=constant", "schedule.warmup_steps=0")


def by_hand(workload: Workload, folder: Path) -> Loop:
    return bare(workload)


def whole(workload: Workload, folder: Path) -> Loop:
    """The loop written by hand as a framework with a fit of its own."""
    loop = bare(workload)
    return fitted(loop.fit, loop.model, loop.optimizer)


def other_rate(workload: Workload, folder: Path) -> Loop:
    loop = BareLoop(workload)
    for group in loop.optimizer.param_groups:
        group["lr"] *= 3
    return stepwise(loop.run, loop.model, loop.optimizer)


def cannot_start(workload: Workload, folder: Path) -> Loop:
    raise ImportError("a part of it is missing")


def test_loops_of_the_same_job_are_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that trains otherwise is found out; one that fails or is not installed is named, the others are measured."""
    made = (
        Framework("whole", whole, ("torch",)),
        Framework("other rate", other_rate, ("torch",), note="differs"),
        Framework("cannot start", cannot_start, ("torch",)),
        Framework("absent", by_hand, ("a-package-that-nobody-has",)),
        Framework("for images", by_hand, ("torch",), vision_only=True),
    )
    bench = Bench(detect("cpu"), 2, tmp_path)
    rows = {row.name.removeprefix(f"tiny MLP {bench.mode}, "): row for row in peers(bench, [JOB], made)}
    torch_version = version("torch")
    for name in (MANTISSA, f"whole {torch_version}", f"other rate {torch_version}"):
        assert min(rows[f"step of {name} / bare loop"].values) > 0
        assert 0.9 < rows[f"peak memory of {name} / bare loop"].values[0] < 1.1
    broken = rows[f"step of cannot start {torch_version} / bare loop"]
    assert (broken.values, broken.measured) == ([], "failed: ImportError: a part of it is missing")
    other = rows[f"peak memory of other rate {torch_version} / bare loop"].measured
    assert "NOT the same training" in other
    assert other.endswith("; differs")
    assert "NOT" not in rows[f"peak memory of whole {torch_version} / bare loop"].measured
    assert "absent: a-package-that-nobody-has is not installed" in capsys.readouterr().out
    assert not any("for images" in name for name in rows)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_an_installed_framework_trains_the_same(framework: Framework, tmp_path: Path) -> None:
    if why := framework.installed()[1]:
        pytest.skip(why)
    cpu = torch.device("cpu")
    workload = Workload(Trainer.from_config(JOB.config(*OPTIONS, "device=cpu"))).first_batches(PEAK_STEP)
    ours, theirs = (
        first_steps(lambda make=make: make(workload, tmp_path), cpu)  # type: ignore[misc]
        for make in (by_hand, framework.make)
    )
    way = _distance(ours.weights, workload.weights)
    assert way > 0.01
    assert _distance(theirs.weights, ours.weights) < 1e-4 * way
    assert 0 < theirs.peak_bytes < 1.2 * ours.peak_bytes


@pytest.mark.parametrize(("version", "why"), [("2.5.6", ""), ("2.6.2", "2.6.2 is installed")])
def test_only_lightning_2_5_is_ever_imported(monkeypatch: pytest.MonkeyPatch, version: str, why: str) -> None:
    monkeypatch.setattr(module, "version", lambda package: version)
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    lightning = next(framework for framework in FRAMEWORKS if framework.name == "Lightning")
    refused = lightning.installed()[1]
    assert (why in refused, bool(refused)) == (True, bool(why))
    assert "lightning" not in sys.modules
