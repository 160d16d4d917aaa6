"""The stages for a new GPU machine: their order, their limits, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, results
from benchmarks.gpu import FAILED, PASSED, GpuOptions, Stage, last_line, measure, one, stages
from tests.helpers import CPU
from trainer.config.compose import compose

FAST = 30.0


def says(name: str, code: str, expected_s: float = FAST, measured: float | None = None) -> Stage:
    found = {f"{name}: throughput": one(measured, "tokens/s")} if measured else {}
    return Stage(name, expected_s, [["-c", code]], lambda folder: (last_line(name)(folder)[0], found))


STAGES = [
    says("first", "print('fast')", measured=2.0),
    says("crash", "raise SystemExit('no kernel image')"),
    says("hangs", "import time; print('begun', flush=True); time.sleep(600)", expected_s=0.5),
    says("gate", "print('12 passed')"),
    says("large", "print('too late')", expected_s=5000.0),
    says("last", "print('after the failures')", measured=3.0),
]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was given to results/, call by call."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(results, "keep", lambda origin, command, measured: calls.append(measured))
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return calls


def test_a_stage_that_fails_or_hangs_stops_no_other_and_one_that_does_not_fit_is_not_begun(
    tmp_path: Path, kept: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    options, folder = GpuOptions(seconds=1000, out=str(tmp_path / "copied")), tmp_path / "gpu"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    found = measure(STAGES, folder, options, CPU)["stages"]
    assert json.loads((folder / "gpu.json").read_text())["stages"] == found
    states = {name: each["state"] for name, each in found.items()}
    assert states == {"first": PASSED, "crash": FAILED, "hangs": FAILED, "gate": PASSED, "last": PASSED}
    assert "no kernel image" in found["crash"]["answer"]
    assert "no end within 1 s" in found["hangs"]["answer"]
    assert "large: not begun: it may take 5000 s" in capsys.readouterr().out
    assert {"gpu.json", *(f"{name}.log" for name in found)} <= {path.name for path in (tmp_path / "copied").iterdir()}
    assert not list((tmp_path / "copied").rglob("*.safetensors"))
    # Before the gate has passed nothing is kept; then also what was measured earlier.
    assert [sorted(each) for each in kept] == [["first: throughput"], ["first: throughput", "last: throughput"]]


@pytest.mark.usefixtures("kept")
def test_the_next_call_goes_on_where_the_last_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(STAGES[:1], tmp_path, GpuOptions(), CPU)
    (tmp_path / "first.log").write_text("not run again")
    found = measure(STAGES[:2], tmp_path, GpuOptions(), CPU)["stages"]
    assert (tmp_path / "first.log").read_text() == "not run again"
    assert {name: each["state"] for name, each in found.items()} == {"first": PASSED, "crash": FAILED}
    # What has failed comes again, behind what has not begun.
    capsys.readouterr()
    measure([*STAGES[:2], STAGES[3]], tmp_path, GpuOptions(), CPU)
    said = [line.partition(" in ")[0] for line in capsys.readouterr().out.splitlines() if " in " in line]
    assert said == ["gate: passed", "crash: failed"]
    measure(STAGES, tmp_path, GpuOptions(only=["first"]), CPU)
    assert (tmp_path / "first.log").read_text() == "fast\n"


def test_the_gate_names_tests_that_exist() -> None:
    text = "\n".join(path.read_text() for path in Path(__file__).parents[1].joinpath("gpu").glob("test_*.py"))
    for name in gpu.GATE.split(" or "):
        assert name in text


def test_most_worth_first_and_every_training_composes(tmp_path: Path) -> None:
    every = stages(tmp_path)
    names = [stage.name for stage in every]
    first, second = names.index("tests"), names.index("gpt2_master")
    assert names.index("gate") < names.index("gpt2_compiled") < first
    assert sum(stage.expected_s for stage in every[:first]) <= GpuOptions().seconds - gpu.STOPPING_S
    assert sum(stage.expected_s for stage in every[first:second]) <= 180 - gpu.STOPPING_S
    for words in (words for stage in every for words in stage.commands):
        if (train := "scripts/train.py") in words:
            compose(words[words.index(train) + 1 :])
