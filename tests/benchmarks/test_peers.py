from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import peers as module
from benchmarks.jobs import TINY_MLP, BareLoop, Workload
from benchmarks.overhead import PEAK_STEP, After, Loop, bare, first_steps, stepwise
from benchmarks.peers import BARE, FIT_WARM_UP, FRAMEWORKS, MANTISSA, Framework, Peer, _distance, fitted, peers, table
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


def test_loops_of_the_same_job_are_side_by_side(tmp_path: Path) -> None:
    """One that trains otherwise is found out; one that fails or is not installed is named, the others are measured."""
    made = (
        Framework("whole", whole, ("torch",)),
        Framework("other rate", other_rate, ("torch",), note="differs"),
        Framework("cannot start", cannot_start, ("torch",)),
        Framework("absent", by_hand, ("a-package-that-nobody-has",)),
        Framework("for images", by_hand, ("torch",), vision_only=True),
    )
    (found_page,) = peers(Bench(detect("cpu"), 2, tmp_path), [JOB], made)
    page = str(found_page)
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    found = {row[0]: row for row in rows}
    assert list(found) == [BARE, MANTISSA, "whole", "other rate", "cannot start", "absent"]
    for name in (BARE, MANTISSA, "whole", "other rate"):
        assert float(found[name][2]) > 0
        assert 0.9 < float(found[name][7].removesuffix("x")) < 1.1
    assert found["cannot start"][2:] == ["–"] * 6
    for words in (
        "other rate: NOT the same training; after 3 steps its weights differ from the bare loop's",
        "other rate: differs",
        "differ by at most 0.00% of the distance that the weights moved): Mantissa, everything on, whole\n",
        "absent: a-package-that-nobody-has is not installed; make bench-peers installs it",
        "cannot start: failed: ImportError: a part of it is missing",
    ):
        assert words in page


def test_the_figures_are_of_one_step() -> None:
    compared = [
        Peer(BARE, "1.0", "", 2**20, None, [100.0, 200.0, 160.0]),
        Peer("other", "2.0", "", 2**21, 0.0, [200.0, 200.0, 320.0]),
    ]
    heading, _, by_hand, other = (line.strip("| ").split(" | ") for line in table(compared, "tokens", 100).splitlines())
    assert heading[4] == "tokens/s"
    assert by_hand == [BARE, "1.0", "160.0", "", "625", "", "1.0 MiB", "1.000x"]
    assert (other[2], other[3]) == ("200.0", "+100.0 (+0.0 to +160.0)")
    assert (other[5], other[7]) == ("0.500 (0.500 to 1.000)", "2.000x")


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


def test_a_fit_is_timed_after_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def fit(steps: int, after: After) -> None:
        for step in range(1, steps + 1):
            now[0] += 2.0 if step > FIT_WARM_UP else 100.0
            after(step)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    model = torch.nn.Linear(1, 1)
    assert fitted(fit, model, torch.optim.SGD(model.parameters())).block(5) == 10.0


@pytest.mark.parametrize(("version", "why"), [("2.5.6", ""), ("2.6.2", "2.6.2 is installed")])
def test_only_lightning_2_5_is_ever_imported(monkeypatch: pytest.MonkeyPatch, version: str, why: str) -> None:
    monkeypatch.setattr(module, "version", lambda package: version)
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    lightning = next(framework for framework in FRAMEWORKS if framework.name == "Lightning")
    refused = lightning.installed()[1]
    assert (why in refused, bool(refused)) == (True, bool(why))
    assert "lightning" not in sys.modules
