"""What follows from an advice: what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evidence.advice import cache, outputs
from evidence.advice.outputs import Grid, Outputs
from evidence.advice.schema import Advice, Candidate, Log
from tests.evidence.advice.machine import Machine
from tests.evidence.advice.made import TINY, advice
from tests.helpers import CPU
from trainer.config.compose import compose


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Makes the outputs of an advice."""

    def make(of: Advice) -> Outputs:
        config = compose([*TINY, "tracking=local"])
        return Outputs(of, config, CPU, tmp_path, "python scripts/advise.py", lambda line: None)

    return make


def test_files_are_written_once_and_again_where_something_was_added(made: Any, tmp_path: Path) -> None:
    job = made(advice())
    assert job.known() == []
    lines = job.write()
    assert lines[0].startswith("  python scripts/train.py ")
    for name in (cache.ANSWER, outputs.PICTURE, "advised_gpt2_a_cpu_2_cores.yaml"):
        (path,) = tmp_path.rglob(name)
        assert str(path) in lines
    again = made(advice())
    assert again.known() == lines
    measured_anew = made(advice(date="2026-11-23"))
    assert measured_anew.known() == []


def test_an_equivalence_test_without_time_is_tried_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"verdict": "INCONCLUSIVE"}, {"verdict": "EQUIVALENT", "pairs": 3}])
    monkeypatch.setattr(outputs, "quality", lambda *_: next(answers))
    job = made(advice())
    for _ in range(3):
        job.test_quality(60)
    assert job.advice.quality == {"verdict": "EQUIVALENT", "pairs": 3}


def test_the_comparison_with_all_is_made_once_and_its_processes_end(made: Any, tmp_path: Path) -> None:
    times = {"fp32": 1.0, "bf16": 0.4, "bf16 + compile": 0.3}
    machine = Machine(step_s=times.__getitem__)
    grids = []

    def grid() -> Grid:
        grids.append(Grid([Candidate(label, ()) for label in times], machine.bench(Log())))
        return grids[-1]

    job = made(advice())
    job.compare_with_all(grid)
    job.compare_with_all(grid)
    assert (len(grids), machine.alive) == (1, [])
    assert job.advice.exhaustive["best"] == "bf16 + compile"
    (path,) = (tmp_path / "results").rglob("gpt2.json")
    assert json.loads(path.read_text())["command"] == "python scripts/advise.py"
