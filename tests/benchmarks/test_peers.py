from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import peers as module
from benchmarks.jobs import TINY_MLP, BareLoop, Workload
from benchmarks.overhead import Watch, trainer_peak
from benchmarks.peers import (
    BARE,
    FIT_WARM_UP,
    FRAMEWORKS,
    MANTISSA,
    FirstSteps,
    Framework,
    Loop,
    Peer,
    SideBySide,
    bare,
    fitted,
    peers,
    stepwise,
)
from benchmarks.rows import Bench
from trainer.hardware import detect

JOB = replace(TINY_MLP, overrides=(*TINY_MLP.overrides, "tracking=local"), steps=2, rounds=2)
OPTIONS = ("precision=fp32", "clip=norm", "schedule=constant", "schedule.warmup_steps=0")


def whole(workload: Workload, folder: Path) -> Loop:
    """The loop written by hand as a framework with a fit of its own."""
    loop = BareLoop(workload)

    def fit(steps: int, watch: Watch) -> None:
        for step in range(1, steps + 1):
            watch.before(step, loop.model, loop.optimizer)
            loop.run(1)
            watch.after(step, steps)

    return fitted(fit, loop.model)


def other_rate(workload: Workload, folder: Path) -> Loop:
    loop = BareLoop(workload)
    for group in loop.optimizer.param_groups:
        group["lr"] *= 3
    return stepwise(loop.run, loop.model, loop.optimizer)


def cannot_start(workload: Workload, folder: Path) -> Loop:
    raise ImportError("a part of it is missing")


def test_loops_of_the_same_job_are_side_by_side(tmp_path: Path) -> None:
    """One that trains otherwise is found out; one that fails or is not installed is named, the others are measured."""
    made = (
        Framework("whole", whole, ("torch",)),
        Framework("other rate", other_rate, ("torch",), note="differs"),
        Framework("cannot start", cannot_start, ("torch",)),
        Framework("absent", bare, ("a-package-that-nobody-has",)),
        Framework("for images", bare, ("torch",), vision_only=True),
    )
    (table,) = peers(Bench(detect("cpu"), 2, tmp_path, modes=frozenset({"fp32"})), [JOB], made)
    found = {peer.name: peer for peer in table.peers}
    assert list(found) == [BARE, MANTISSA, "whole", "other rate", "cannot start", "absent"]
    assert (table.unit, table.units, table.steps) == ("samples", 32, 4)
    for name in (BARE, MANTISSA, "whole", "other rate"):
        assert len(found[name].seconds) == 2
        assert min(found[name].seconds) > 0
        assert 0.9 < found[name].peak_bytes / found[BARE].peak_bytes < 1.1
    assert max(found[name].drift or 0.0 for name in (MANTISSA, "whole")) < 1e-6
    page = table.markdown()
    for words in (
        "other rate: NOT the same training; after 3 steps its weights differ from the bare loop's",
        "other rate: differs",
        "differ by at most 0.00% of the distance that the weights moved): Mantissa, everything on, whole",
        "absent: a-package-that-nobody-has is not installed; make bench-peers installs it",
        "cannot start: failed: ImportError: a part of it is missing",
    ):
        assert words in page
    assert next(row for row in table.rows() if row[0] == "cannot start")[2:] == ("–",) * 6


def test_the_figures_are_of_one_step() -> None:
    table = SideBySide("job", "a command", "tokens", 100, 10, [])
    table.peers = [
        Peer(BARE, "1.0", "", 2**20, None, [1.0, 2.0, 1.6]),
        Peer("other", "2.0", "", 2**21, 0.0, [2.0, 2.0, 3.2]),
    ]
    heading, by_hand, other = table.rows()
    assert heading[4] == "tokens/s"
    assert by_hand == (BARE, "1.0", "160.0", "", "625", "", "1.0 MiB", "1.000x")
    assert (other[2], other[3]) == ("200.0", "+100.0 (+0.0 to +160.0)")
    assert (other[5], other[7]) == ("0.500 (0.500 to 1.000)", "2.000x")


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_an_installed_framework_trains_the_same(framework: Framework, tmp_path: Path) -> None:
    if why := framework.installed()[1]:
        pytest.skip(why)
    bench = Bench(detect("cpu"), 1, tmp_path)
    ours, by_hand, theirs = (FirstSteps(bench.hardware.device) for _ in range(3))
    workload = trainer_peak(bench, JOB, OPTIONS, ours)
    bare(workload, tmp_path).first_steps(by_hand)
    framework.make(workload, tmp_path).first_steps(theirs)
    assert by_hand.distance(workload.weights) > 0.01
    assert theirs.distance(by_hand.weights) < 1e-4 * by_hand.distance(workload.weights)
    assert theirs.bytes < 1.2 * by_hand.bytes


def test_a_fit_is_timed_after_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def fit(steps: int, watch: Watch) -> None:
        for step in range(1, steps + 1):
            now[0] += 2.0 if step > FIT_WARM_UP else 100.0
            watch.after(step, steps)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    assert fitted(fit, torch.nn.Linear(1, 1)).block(5) == 10.0


@pytest.mark.parametrize(("version", "why"), [("2.5.6", ""), ("2.6.2", "2.6.2 is installed")])
def test_only_lightning_2_5_is_ever_imported(monkeypatch: pytest.MonkeyPatch, version: str, why: str) -> None:
    monkeypatch.setattr(module, "version", lambda package: version)
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    lightning = next(framework for framework in FRAMEWORKS if framework.name == "Lightning")
    refused = lightning.installed()[1]
    assert (why in refused, bool(refused)) == (True, bool(why))
    assert "lightning" not in sys.modules
