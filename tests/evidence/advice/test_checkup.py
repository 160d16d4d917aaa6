"""The winner's check-up by the doctor, and the equivalence test that fits into the rest of the budget."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evidence.advice import checkup
from evidence.advice.checkup import check, fitting, quality
from evidence.advice.schema import Advice
from evidence.doctor.command import main as doctor
from tests.evidence.advice.made import TINY, advice
from tests.helpers import CPU
from trainer.errors import UserError

BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "data.samples=64")


def in_this_process(command: list[str], log: Path, limit_s: float) -> int:
    return doctor(command[2:])


def test_a_setting_is_examined_by_the_doctor_with_few_samples(tmp_path: Path) -> None:
    given = [*BIGNET, "batch_size=64", "micro_batch_size=32", "precision=bf16", "tracking=local"]
    found = check(given, CPU, tmp_path, in_this_process)
    assert (found["faults"], found["healthy"], found["samples"]) == ([], True, 2)
    (report,) = tmp_path.glob("doctor/*/verdict.json")
    verdict = json.loads(report.read_text())
    assert [rung["name"] for rung in verdict["ladder"]] == ["fp64", "fp32", "bf16"]

    overflow = [*BIGNET, "precision=fp16", "recipe.loss_weight=1e9", "scaler=none", "scaler.force=true"]
    found = check(overflow, CPU, tmp_path, in_this_process)
    assert not found["healthy"]
    assert "overflow" in found["faults"][0]

    def hangs(command: list[str], log: Path, limit_s: float) -> int:
        raise subprocess.TimeoutExpired(command, limit_s)

    for launch, words in ((lambda *_: 7, "exit code 7; run it: python "), (hangs, "did not end within")):
        gone = check(overflow, CPU, tmp_path, launch)  # the earlier report does not count
        assert (gone["faults"], gone["healthy"]) == ([], False)
        assert words in gone["missed"][0]


def timed(baseline_s: float, winner_s: float, **changed: Any) -> Advice:
    made = advice(**changed)
    made.entry("fp32").turns = [(baseline_s, baseline_s)] * 3
    made.entry("bf16 + compile").turns = [(winner_s, baseline_s)] * 3
    made.entry("bf16 + compile").compile_s = 10.0
    return made


def test_as_many_pairs_as_fit() -> None:
    made = timed(0.2, 0.1)
    assert fitting(made, 3600, 200) == (5, 200)
    pairs, steps = fitting(made, 120, 200)
    assert pairs == 2
    assert checkup.LEAST_STEPS <= steps < 200
    with pytest.raises(
        UserError, match=r"two pairs of 40 steps need about 1:3\d, and 0:30 are left; set budget_minutes=6"
    ):
        fitting(made, 30, 200)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands for train.py: writes the summary of a run, with a loss by its seed and precision."""
    commands: list[list[str]] = []

    def train(command: list[str], log: Path, limit_s: float | None) -> int:
        commands.append(command)
        typed = dict(argument.partition("=")[::2] for argument in command[2:])
        folder = Path(typed["output_dir"].strip("'")) / typed["run_name"]
        folder.mkdir(parents=True)
        loss = 2.0 + 0.01 * int(typed["seed"]) + 1e-5 * (typed["precision"] == "bf16") * int(typed["seed"])
        facts = {"units_per_s": 1.0, "energy_j": None, "units": 10, "skipped_steps": 0, "hardware": {"device": "cpu"}}
        summary = {"status": "FINISHED", "final": {"valid/loss": loss}} | facts
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 40, "time": 0, "valid/loss": loss}) + "\n")
        return 0

    monkeypatch.setattr("evidence.runs.in_a_process", train)
    monkeypatch.setattr(checkup, "write_report", lambda result, command: [Path("report.html")])
    return commands


def test_equal_losses_are_equivalent_by_the_code_of_compare_and_runs_are_not_repeated(
    trained: list[list[str]], tmp_path: Path
) -> None:
    made = timed(0.2, 0.1, overrides=[*TINY, "precision=fp32", "steps=1000"])
    found = quality(made, tmp_path, 200, lambda line: None)
    assert (found["verdict"], found["margin"], found["pairs"]) == ("EQUIVALENT", 0.003, 4)
    assert found["difference"]["low"] <= found["difference"]["mean"] <= found["difference"]["high"]
    assert len(trained) == 8
    assert {"precision=bf16", "compile=default", f"steps={found['steps']}", "tracking=local"} < set(trained[1])
    again = quality(made, tmp_path, 200, lambda line: None)  # after an interruption
    assert (again["verdict"], len(trained)) == ("EQUIVALENT", 8)


def test_no_time_is_inconclusive_and_the_baseline_equivalent_to_itself(
    trained: list[list[str]], tmp_path: Path
) -> None:
    none = quality(timed(0.2, 0.1, overrides=[*TINY, "precision=fp32"]), tmp_path, 20, lambda line: None)
    assert (none["verdict"], trained) == ("INCONCLUSIVE", [])
    assert "set budget_minutes=" in none["why"]
    assert quality(advice(winner="fp32"), tmp_path, 0)["verdict"] == "EQUIVALENT"
