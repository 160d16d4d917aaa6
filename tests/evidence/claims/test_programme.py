"""The programme for a GPU machine, on a machine and with a clock that are made up; and the shell script's wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.claims.reproduce import LEFT_FILE
from evidence.programme import command as cli
from evidence.programme.report import goals
from evidence.programme.stages import CLAIMS_FOLDER, stages
from tests.helpers import PROJECT
from trainer.config.options import run
from trainer.files import write_json
from trainer.hardware import Hardware

H200 = Hardware(torch.device("cuda", 0), "NVIDIA H200", 139 * 2**30, 16, (9, 0))
NAMES = [
    *("rates", "tests", "gpt2_eager", "gpt2_compiled", "gpt2_master", "resnet50_eager", "resnet50_compiled"),
    *("gpt2_profile", "resnet50_profile", "claims", "bench"),
]
SPEED = {"gpt2_compiled": 520_000.0, "resnet50_compiled": 4_000.0}


class Machine:
    """Runs stages by writing what they would have left; each takes a minute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.started: list[str] = []
        self.lines: dict[str, list[str]] = {}
        self.limits: dict[str, float] = {}
        self.takes: dict[str, float] = {}
        self.codes: dict[str, int] = {}
        self.left: dict[str, float] = {}
        """What the claims leave undone."""

    def clock(self) -> float:
        return self.now

    def __call__(self, line: list[str], log: Path, limit_s: float) -> int:
        name = log.stem
        self.started.append(name)
        self.lines[name], self.limits[name] = line, limit_s
        log.write_text(f"{name} said\nthis | that\n")
        takes = self.takes.get(name, 60.0)
        self.now += min(takes, limit_s)
        if takes > limit_s:
            raise subprocess.TimeoutExpired(line, limit_s)
        if name == "rates":
            found = {"product_tflops": {"bf16": 790.0}, "copy_gb_per_s": 4300.0, "versions": {"torch": "2.11.0"}}
            write_json(self.folder / "rates.json", found)
        if name == "claims":
            (self.folder / CLAIMS_FOLDER).mkdir(parents=True, exist_ok=True)
            write_json(self.folder / CLAIMS_FOLDER / LEFT_FILE, self.left)
        if any(word.endswith("train.py") for word in line) and not self.codes.get(name):
            run = self.folder / "runs" / name
            (run / "profile").mkdir(parents=True)
            (run / "profile" / "operators.txt").write_text("sdpa_flash")
            summary = {"units_per_s": SPEED.get(name, 1000.0), "unit": "tokens", "utilisation": {"mfu": 0.43}}
            write_json(run / "summary.json", summary)
        return self.codes.get(name, 0)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "programme")


@pytest.fixture
def call(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
    """One call of the command: how many seconds it has, which stages it is to run again, the commit."""
    monkeypatch.setattr(cli, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("OUT", raising=False)

    def one(seconds: float, again: tuple[str, ...] = (), commit: str = "a") -> dict[str, dict[str, Any]]:
        machine.started.clear()
        plan = stages(machine.folder, "cuda", False, ["data.path=text"])
        programme = cli.Programme(machine.folder, H200, seconds, machine, machine.clock, {"commit": commit})
        return programme.run(plan, list(again))

    return one


def test_stages_come_in_order_and_the_claims_get_the_time_that_is_left(
    call: Callable[..., Any], machine: Machine
) -> None:
    records = call(1680)
    assert machine.started == NAMES
    assert {record["status"] for record in records.values()} == {"done"}
    words = machine.lines["claims"]
    assert {"all=true", "device=cuda", "data.path=text"} <= set(words)
    # nine stages of a minute before, the time of bench.py, and the start of both
    assert words[-1] == f"budget={1680 - 9 * 60 - 150 - 2 * 15}s"
    assert machine.lines["tests"][1:3] == ["-m", "pytest"]
    assert machine.lines["tests"][-2:] == ["-n", "4"]


def test_one_that_fails_or_hangs_does_not_stop_the_others(call: Callable[..., Any], machine: Machine) -> None:
    machine.codes = {"tests": 1}
    machine.takes = {"gpt2_compiled": 1e6}
    records = call(1680)
    assert machine.started == NAMES
    assert (machine.limits["gpt2_eager"], machine.limits["gpt2_compiled"]) == (150, 240)
    assert {name: record["status"] for name, record in records.items() if record["status"] != "done"} == {
        "tests": "failed",
        "gpt2_compiled": "took too long",
    }
    page = (machine.folder / "programme.md").read_text()
    assert "| tests: tests/gpu | failed | 60 s | this / that |" in page
    call(1680)
    assert machine.started == []  # neither is tried again, unless it is named
    call(1680, ("tests",))
    assert machine.started == ["tests"]


def test_several_calls_make_one_programme(call: Callable[..., Any], machine: Machine) -> None:
    machine.left = {"gpt2_ladder": 400.0}
    call(390)
    assert machine.started == NAMES[:6]  # half a minute is left, and the next one takes two
    records = call(600)
    assert machine.started == NAMES[6:]
    assert records["claims"]["status"] == "not finished"
    machine.left = {}
    records = call(600)
    assert machine.started == ["claims"]
    assert records["claims"]["status"] == "done"
    assert sorted(records) == sorted(NAMES)
    call(600, commit="b")  # the code has changed: what was measured before is of no use
    assert machine.started == NAMES[:10]


def test_a_stage_that_the_end_of_the_call_cut_is_run_again(call: Callable[..., Any], machine: Machine) -> None:
    machine.takes = {"gpt2_eager": 100.0}
    records = call(210)
    assert (machine.limits["gpt2_eager"], records["gpt2_eager"]["status"]) == (90, "not finished")
    call(210)
    assert machine.started[0] == "gpt2_eager"


def test_what_is_worth_keeping_is_copied_after_each_stage(
    tmp_path: Path, call: Callable[..., Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    (tmp_path / "results" / "nvidia-h200").mkdir(parents=True)
    write_json(tmp_path / "results" / "nvidia-h200" / "two_x.json", {"verdict": "CONFIRMED"})
    call(100)
    assert (out / "logs.txt").read_text() == "===== rates\nrates said\nthis | that\n"
    call(1680)
    assert (out / "operators-gpt2.txt").read_text() == "sdpa_flash"
    assert json.loads((out / "programme.json").read_text())["machine"] == "nvidia-h200"
    with tarfile.open(out / "outcomes.tar.gz") as archive:
        assert "nvidia-h200/two_x.json" in archive.getnames()
    assert len(list(out.iterdir())) <= 7


def test_outcomes_are_kept_while_the_claims_are_still_tested(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, results = tmp_path / "out", tmp_path / "results" / "nvidia-h200"
    out.mkdir()
    results.mkdir(parents=True)
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(cli, "RESULTS", results.parent)

    def launch(line: list[str], log: Path, limit_s: float) -> int:
        write_json(results / "two_x.json", {"verdict": "CONFIRMED"})
        end = time.monotonic() + 60
        while not (out / "outcomes.tar.gz").exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert (out / "outcomes.tar.gz").exists()
        return machine(line, log, limit_s)

    plan = stages(machine.folder, "cuda", False, [])
    programme = cli.Programme(machine.folder, H200, 600, launch, machine.clock, {}, keep_every_s=0.01)
    assert programme.run(plan, ["claims"])["claims"]["status"] == "done"


def test_goals_stand_beside_what_was_measured(tmp_path: Path, call: Callable[..., Any], machine: Machine) -> None:
    ladder = {"criterion": {"arm": ["fused"], "over": ["fp32"]}, "median": 11.2}
    (tmp_path / "results" / "nvidia-h200").mkdir(parents=True)
    write_json(tmp_path / "results" / "nvidia-h200" / "gpt2_ladder.json", {"findings": [ladder]})
    call(1680)
    page = (machine.folder / "programme.md").read_text()
    for line in (
        "Products, 10^12 FLOP/s: bf16 790. Copies: 4300 GB/s. torch 2.11.0.",
        "| GPT-2 124M in bf16, tokens/s | 500k | 520k | reached |",
        "| the same, share of the measured rate of products | 50% | 43% | not reached: see operators-gpt2.txt |",
        "| ResNet-50 in bf16, images/s | 5000 | 4000 | not reached: see operators-resnet50.txt |",
        "| claim gpt2_ladder, all rungs over fp32 | 10.0x | 11.2x | reached |",
        "| gpt2_compiled: the same, compiled | done | 60 s | 520k tokens/s, 43% of the rate of products |",
    ):
        assert line in page
    assert [goal.measured for goal in goals({}, tmp_path)] == [None] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["budget=9"], "budget=9 is not a time: set budget=25min"),
        (["only=test", "reduced=true"], "only=test is not a stage; did you mean 'tests'?"),
        (["device=cpu"], "there is no CUDA GPU here; set reduced=true to rehearse on a CPU"),
        (["steps=3", "reduced=true"], "steps=3 is not an option; data.path=… of a claim is the only override"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli.main, None, arguments) == 2
    assert words in capsys.readouterr().err


def test_a_folder_for_the_output_must_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "absent"))
    assert run(cli.main, None, ["reduced=true"]) == 2
    assert "absent is not a folder; create it, or unset OUT" in capsys.readouterr().err


def test_wheels_are_installed_once_without_a_network(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    files = {
        "of_a_wheel.py": "",
        "of_a_wheel-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: of-a-wheel\nVersion: 1.0\n",
        "of_a_wheel-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheels / "of_a_wheel-1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("of_a_wheel-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in files))
    environment = os.environ | {"WHEELS": str(wheels), "SITE": str(site), "PYTHON": sys.executable}
    command = ["bash", str(PROJECT / "scripts" / "gpu.sh"), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "budget=28min" in done.stdout
    assert (site / "of_a_wheel.py").exists()
    (site / "of_a_wheel.py").unlink()
    assert subprocess.run(command, env=environment, capture_output=True, cwd=tmp_path).returncode == 0
    assert not (site / "of_a_wheel.py").exists()  # what is complete is not installed again
