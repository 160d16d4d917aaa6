"""A budget of time: what is begun, what is left, what is learnt; and the order of the claims. The clock is made up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence.budget import Budget, OutOfTime, seconds_of
from evidence.claims import claims, results
from evidence.claims import command as reproduce_cli
from evidence.claims.criteria import CONFIRMED
from evidence.claims.reproduce import ORDER, ordered, save
from evidence.runs import Arm, Runner, in_a_process
from tests.evidence.claims.made_up import CLAIM, Machine, reproduction
from trainer.errors import UserError


@pytest.fixture
def runner(tmp_path: Path, made_up: Machine) -> Callable[[float], Runner]:
    """A runner with so many seconds, whose command line is made up."""

    def made(seconds: float) -> Runner:
        made_up.started.clear()
        return Runner(tmp_path, launch=made_up, budget=Budget(seconds, clock=made_up.clock))

    return made


ARMS = [Arm("fp32", ("precision=fp32",)), Arm("bf16", ("precision=bf16",))]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("25min", 1500), ("1h", 3600), ("1.5h", 5400), ("0.5min", 30)]
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["25", "soon", "0min"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"budget={text} is not a time: set budget=25min"):
        seconds_of(text)


def run_all(runner: Runner) -> float | None:
    """Return the seconds that are left to do: 0 where all six runs are done."""
    try:
        runner.run_all(ARMS, [0, 1, 2], lambda *_: None)
    except OutOfTime as error:
        return error.needed_s
    return 0


def test_only_runs_that_are_expected_to_fit_are_begun_and_the_next_call_continues(
    runner: Callable[[float], Runner], made_up: Machine
) -> None:
    assert run_all(runner(19)) is None
    assert made_up.started == []
    made_up.takes = {"fp32": 30.0, "bf16": 10.0}
    # bf16 is taken to need 30 s as well until it has run
    assert run_all(runner(60)) == 150
    assert made_up.started == ["fp32-s0"]
    assert run_all(runner(80)) == 40
    assert made_up.started == ["bf16-s0", "bf16-s1", "fp32-s1"]
    assert run_all(runner(90)) == 0
    assert made_up.started == ["fp32-s2", "bf16-s2"]


def test_a_run_that_outlasts_the_time_is_ended_and_not_begun_again_with_as_little(
    runner: Callable[[float], Runner], made_up: Machine
) -> None:
    made_up.takes = {"fp32": 200.0, "bf16": 200.0}
    assert run_all(runner(60)) == 360  # at least
    assert (made_up.started, made_up.now) == (["fp32-s0"], 60)
    assert run_all(runner(60)) == 360
    assert made_up.started == []
    assert run_all(runner(1500)) == 0
    assert len(made_up.started) == 6


def test_an_outcome_is_kept_where_only_its_explanation_has_no_time(
    tmp_path: Path, files: Callable[..., None], made_up: Machine
) -> None:
    files("mine", criteria=CLAIM["criteria"][:1])  # type: ignore[index]
    made_up.takes = {"fp32-operators": 100.0, "bf16-operators": 100.0}
    record = reproduction(tmp_path, made_up, budget=Budget(70, clock=made_up.clock)).test("mine")
    assert (record["verdict"], record["unexplained"]) == (CONFIRMED, True)
    assert record["why"] == [
        "There was no time left for the runs under a profiler that explain it; the same command makes them."
    ]
    made_up.started.clear()
    again = reproduction(tmp_path, made_up).test("mine")
    assert made_up.started == ["bf16-operators-s0", "fp32-operators-s0"]
    assert "unexplained" not in again


def test_claims_come_in_order_of_value_those_without_an_outcome_first() -> None:
    here = ["two_x", "gpt2_ladder", "of_mine", "tf32_matmul", "amp_recipe"]
    assert ordered(here, ["tf32_matmul", "two_x"]) == ["of_mine", "amp_recipe", "gpt2_ladder", "tf32_matmul", "two_x"]


def test_every_claim_has_a_place_and_a_reason() -> None:
    lines = [line for line in ORDER.read_text().splitlines() if not line.startswith("#")]
    places = [line.partition(": ") for line in lines]
    assert sorted(name for name, _, _ in places) == [name for name in claims.names() if not claims.load(name).combines]
    assert all(reason for _, _, reason in places)


def test_the_command_writes_each_outcome_at_once_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made_up: Machine
) -> None:
    written: list[tuple[str, float]] = []

    def keep(record: dict[str, Any], folder: Path) -> Path:
        written.append((record["claim"], made_up.now))
        return save(record, folder)

    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "read", dict)
    monkeypatch.setattr(results, "update", list)
    monkeypatch.setattr(reproduce_cli, "save", keep)
    monkeypatch.setattr(reproduce_cli, "names", lambda: ["scaler_needed", "quality_parity", "old_or_small"])
    monkeypatch.setattr(reproduce_cli, "Budget", lambda seconds: Budget(seconds, clock=made_up.clock))
    monkeypatch.setattr("evidence.runs.in_a_process", made_up)
    arguments = ["all=true", "budget=5min", "device=cpu", f"output_dir={tmp_path}"]
    assert reproduce_cli.main(arguments) == 0
    said = capsys.readouterr().out
    # quality_parity has 20 runs of ten seconds; of scaler_needed's 15 nine fit, of which each is expected to take 11.5
    assert written == [("quality_parity", 200.0)]
    assert re.search(r"Done in \d:\d\d: quality_parity [A-Z]+\.\n", said)
    assert re.search(r"Left: scaler_needed \(1:00\), old_or_small \(not known yet\)\. The same command continues", said)


def test_a_process_that_does_not_end_at_its_limit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, wait = tmp_path / "log", subprocess.Popen.wait

    def reached(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == 1000:  # the limit: reached as soon as the process ignores the signal
            end = time.monotonic() + 60
            while not log.read_text() and time.monotonic() < end:
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(process.args, timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", reached)
    program = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        in_a_process([sys.executable, "-c", program], log, 1000, stop_s=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
