"""What follows from an advice: a winner with a fault is not advised, and what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evidence.advice import cache, outputs
from evidence.advice.outputs import Grid, Outputs
from evidence.advice.rounds import Log
from evidence.advice.schema import Advice, Candidate
from tests.evidence.advice.machine import Machine
from tests.evidence.advice.made import TINY, advice, measured
from tests.helpers import CPU
from trainer.config.compose import compose

HEALTHY: dict[str, Any] = {"faults": [], "notes": [], "healthy": True}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the outputs of an advice, whose doctor finds the faults given by precision."""
    examined: list[str] = []

    def make(of: Advice, faults: dict[str, list[str]] | None = None) -> tuple[Outputs, list[str]]:
        def check(overrides: list[str], *_: object) -> dict[str, Any]:
            key = " ".join(each for each in overrides if each.startswith(("precision", "compile")))
            examined.append(key)
            return HEALTHY | {"faults": (faults or {}).get(key, [])}

        monkeypatch.setattr(outputs, "check", check)
        config = compose([*TINY, "tracking=local"])
        return Outputs(of, config, CPU, tmp_path, "python scripts/advise.py", lambda line: None), examined

    return make


def test_a_winner_with_a_fault_is_not_advised_and_the_next_best_is_examined(made: Any) -> None:
    given = advice(measured("x", 0.9, 100, "precision=bf16_sr"), equal=["bf16"])
    job, examined = made(given, {"precision=bf16 compile=default": ["overflow, forward: lm_head"]})
    job.check_up()
    assert examined == ["precision=bf16 compile=default", "precision=bf16"]
    assert (given.winner, given.entries[0].candidate.label, given.equal) == ("bf16", "bf16", [])
    assert given.health["healthy"] is True
    assert given.health["rejected"] == {"bf16 + compile": ["overflow, forward: lm_head"]}
    assert job.notes == [
        "bf16 + compile is not advised, because the doctor found a fault in it: overflow, forward: lm_head"
    ]
    job.check_up()
    assert len(examined) == 2


def test_what_the_doctor_left_out_is_said(made: Any) -> None:
    given = advice()
    job, _ = made(given)
    found = {**HEALTHY, "notes": ["left out: pairs (no time left of budget_s=30)", "range: no scale is needed"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "check", lambda *_: found)
        job.check_up()
    assert job.notes == ["check-up of bf16 + compile: left out: pairs (no time left of budget_s=30)"]


def test_where_all_have_faults_the_baseline_is_advised(made: Any) -> None:
    given = advice()
    job, _ = made(given, {"precision=bf16 compile=default": ["one"], "precision=bf16": ["two"]})
    job.check_up()
    assert (given.winner, given.health["healthy"], len(job.notes)) == ("fp32", False, 2)
    other, examined = made(advice(winner="fp32"))
    before = len(examined)
    other.check_up()
    assert (len(examined), other.advice.health) == (before, {})


def test_files_are_written_once_and_again_where_something_was_added(made: Any, tmp_path: Path) -> None:
    job, _ = made(advice())
    assert job.known() == []
    lines = job.write()
    assert lines[0].startswith("  python scripts/train.py ")
    for name in (cache.ANSWER, outputs.PICTURE, "advised_gpt2_a_cpu_2_cores.yaml"):
        (path,) = tmp_path.rglob(name)
        assert str(path) in lines
    again, _ = made(advice())
    assert again.known() == lines
    measured_anew, _ = made(advice(date="2026-11-23"))
    assert measured_anew.known() == []


def test_an_equivalence_test_without_time_is_tried_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"verdict": "INCONCLUSIVE"}, {"verdict": "EQUIVALENT", "pairs": 3}])
    monkeypatch.setattr(outputs, "quality", lambda *_: next(answers))
    job, _ = made(advice())
    for _ in range(3):
        job.test_quality(60)
    assert job.advice.quality == {"verdict": "EQUIVALENT", "pairs": 3}


def test_the_comparison_with_all_is_made_once_and_its_processes_end(made: Any, tmp_path: Path) -> None:
    times = {"fp32": 1.0, "bf16": 0.4, "bf16 + compile": 0.3}
    machine = Machine(step_s=times.__getitem__)
    grids = []

    def grid() -> Grid:
        grids.append(Grid([Candidate(label, ()) for label in times], machine.bench(Log()), 10**6))
        return grids[-1]

    job, _ = made(advice())
    job.compare_with_all(grid)
    job.compare_with_all(grid)
    assert (len(grids), machine.alive) == (1, [])
    assert job.advice.exhaustive["best"] == "bf16 + compile"
    (path,) = (tmp_path / "results").rglob("gpt2.json")
    assert json.loads(path.read_text())["command"] == "python scripts/advise.py"
