"""The programme for a GPU machine, on a machine and with a clock that are made up."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.bench import BenchOptions
from evidence.claims.command import ReproduceOptions
from evidence.runs import Arm, Runner
from trainer.config.compose import compose
from trainer.config.options import parse
from trainer.files import write_json
from trainer.hardware import detect

NAMES = [stage.name for stage in gpu.STAGES]


class Machine:
    """Runs stages by writing what they would have left; each takes a minute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.started: list[str] = []
        self.lines: dict[str, list[str]] = {}
        self.takes: dict[str, float] = {}
        self.codes: dict[str, int] = {}

    def run(self, line: list[str], log: Path, limit_s: float, stop_s: float) -> int:
        name = log.stem
        self.started.append(name)
        self.lines[name] = line
        log.write_text(f"{name} said\n")
        takes = self.takes.get(name, 60.0)
        self.now += min(takes, limit_s)
        if takes > limit_s:
            raise subprocess.TimeoutExpired(line, limit_s)
        if line[1].endswith("train.py"):
            place = self.folder / "runs" / name / "run"
            (place / "profile").mkdir(parents=True)
            (place / "profile" / "operators.txt").write_text("sdpa_flash")
            write_json(place / "summary.json", {"units_per_s": 520e3, "unit": "tokens", "utilisation": {"mfu": 0.43}})
        return self.codes.get(name, 0)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(gpu, "in_a_process", made.run)
    monkeypatch.delenv("OUT", raising=False)
    return made


@pytest.fixture
def call(tmp_path: Path, machine: Machine) -> Callable[..., dict[str, str]]:
    """One call of the command: its budget, the stages that it names, the commit. Returns how each stage ended."""

    def one(budget: str, only: tuple[str, ...] = (), commit: str = "a") -> dict[str, str]:
        machine.started.clear()
        options = gpu.GpuOptions(budget, list(only), output_dir=tmp_path / "runs")
        outcomes = gpu.Outcomes("h200", tmp_path / "results" / "h200", options.output_dir, {"commit": commit})
        gpu.run_stages(options, outcomes, ["data.path=text"])
        return {name: record["status"] for name, record in outcomes.records().items()}

    return one


def test_stages_come_in_order_and_the_claims_get_the_time_that_is_left(
    call: Callable[..., dict[str, str]], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails or hangs does not stop the others."""
    ended = call("28min")
    assert machine.started == NAMES
    assert NAMES.index("gpt2_ladder") < NAMES.index("gpt2_eager")
    assert ended.pop("claims") == "not finished"  # the next call has more time for them
    assert set(ended.values()) == {"done"}
    assert {"all=true", "device=auto", "data.path=text", f"budget={28 * 60 - 14 * 60 - 15}s"} <= set(
        machine.lines["claims"]
    )
    expected = "gpt2_compiled: done, 520k tokens/s, 43% of the matmul rate, goal 500k tokens/s, 50%"
    assert expected in capsys.readouterr().out.splitlines()
    machine.codes, machine.takes = {"tests": 1}, {"gpt2_compiled": 1e6}
    ended = call("28min", commit="b")
    assert machine.started == NAMES
    assert (ended["tests"], ended["gpt2_compiled"], ended["bench"]) == ("failed", "took too long", "done")


def test_a_gate_that_fails_stops_the_others_but_those_that_are_named(
    call: Callable[..., dict[str, str]], machine: Machine
) -> None:
    machine.codes = {"gate": 1}
    assert call("28min") == {"rates": "done", "gate": "failed"}
    call("28min", ("tests", "gpt2_ladder"))
    assert machine.started == ["gpt2_ladder", "tests"]


def test_the_next_call_continues_at_the_same_commit(call: Callable[..., dict[str, str]], machine: Machine) -> None:
    ended = call("210s")
    assert machine.started == NAMES[:4]  # half a minute is left for the fourth
    assert ended["gpt2_profile"] == "not finished"
    call("60min")
    assert machine.started == NAMES[3:]
    call("60min")
    assert machine.started == ["claims"]
    call("60min", ("rates",))
    assert machine.started == ["rates"]
    call("60min", commit="b")
    assert machine.started == NAMES


def test_another_machine_continues_from_what_was_brought_home(
    call: Callable[..., dict[str, str]], machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that ended are not repeated, nor are the runs of a claim that was not."""
    run = tmp_path / "runs" / gpu.RUNS / "reproduce" / "gpt2_ladder-0" / "runs" / "fp32-s0"
    run.mkdir(parents=True)
    write_json(run / "outcome.json", {"exit_code": 0, "summary": {"status": "FINISHED"}})
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    machine.takes = {"gpt2_ladder": 285.0}  # all of its budget
    ended = call("13min")
    assert (ended["tf32_matmul"], ended["gpt2_ladder"]) == ("done", "not finished")
    for folder in ("runs", "results"):
        shutil.rmtree(tmp_path / folder)
    shutil.copytree(tmp_path / "out", tmp_path / "results")
    gpu.Outcomes("h200", tmp_path / "results" / "h200", tmp_path / "runs").bring_back()
    arm = Arm("fp32", ())
    assert (known := Runner(run.parents[1]).done(arm, 0))
    assert known.finished
    call("60min")
    assert machine.started == NAMES[NAMES.index("gpt2_ladder") :]


def test_the_profile_of_a_goal_is_of_the_same_training() -> None:
    commands = {stage.name: stage.command for stage in gpu.STAGES}
    profiles = [name for name in commands if name.endswith("_profile")]
    assert len(profiles) == 2
    for name in profiles:
        goal = commands[name.replace("profile", "compiled")]
        assert commands[name].removesuffix(gpu.TRACED) == goal.removesuffix(gpu.STEPS)


@pytest.mark.parametrize("reduced", [False, True])
def test_every_command_has_options_that_exist(reduced: bool, tmp_path: Path) -> None:
    options = gpu.GpuOptions(reduced=reduced, device="cpu", output_dir=tmp_path)
    for stage in gpu.STAGES:
        _, script, *words = options.command(stage, [], 100.0)
        assert script == "-m" or Path(script).is_file()
        if script.endswith("train.py"):
            resolved = compose(words).resolve(detect("cpu"))
            assert resolved.plan.steps == (3 if reduced else 12 if "profile" in stage.name else 60)
        if script.endswith("reproduce.py"):
            parse(words, ReproduceOptions)
        if script.endswith("bench.py"):
            parse(words, BenchOptions)
