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

from evidence.budget import Budget, duration, in_words
from evidence.claims import claims, results
from evidence.claims import command as reproduce_cli
from evidence.claims.criteria import CONFIRMED
from evidence.claims.reproduce import ORDER, Reproduction, ordered, rest_in_words, save
from evidence.runs import in_a_process
from tests.evidence.claims.made_up import CLAIM, Machine, reproduction
from trainer.errors import UserError

LOSS = [{"measure": "loss", "arm": "bf16", "over": "fp32", "within": 0.01}]
"""Needs no run under a profiler: six runs in all."""


@pytest.fixture
def call(tmp_path: Path, made_up: Machine) -> Callable[..., tuple[Reproduction, dict[str, float | None]]]:
    """One call of the command: the claims, the seconds that it has, and what earlier calls took."""

    def run(names: list[str], seconds: float, earlier: Any = None) -> tuple[Reproduction, dict[str, float | None]]:
        here = reproduction(tmp_path, made_up, budget=Budget(seconds, clock=made_up.clock), earlier=earlier or {})
        made_up.started.clear()
        return here, here.test_all(names, lambda _: None)

    return run


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("25min", 1500), ("1h", 3600), ("1.5h", 5400), ("0.5min", 30)]
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["25", "soon", "0min"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"budget={text} is not a time: set budget=25min"):
        duration(text)


def test_a_time_is_shown() -> None:
    assert [in_words(seconds) for seconds in (4.4, 120, 5400, None)] == ["4 s", "2 min", "1.5 h", "not known yet"]


def test_a_claim_that_does_not_fit_is_left_for_one_that_does(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine
) -> None:
    files("long", criteria=LOSS, repeats=20)
    files("short", criteria=LOSS)
    known = {"long": {"fp32": 10.0, "bf16": 10.0}, "short": {"fp32": 10.0, "bf16": 10.0}}
    here, left = call(["long", "short"], 80, known)
    assert list(here.done) == ["short"]
    assert here.done["short"]["verdict"] == CONFIRMED
    assert left == {"long": 390.0}  # a single run of it still fitted into the twenty seconds that were left over
    assert made_up.started == ["fp32-s0", "bf16-s0", "bf16-s1", "fp32-s1", "fp32-s2", "bf16-s2", "fp32-s0"]
    assert made_up.now <= 80


def test_what_a_claim_takes_is_learnt_from_its_first_run(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine
) -> None:
    made_up.takes = {"fp32": 30.0, "bf16": 10.0}
    files("mine", criteria=LOSS)
    here, left = call(["mine"], 100)
    assert not here.done
    # bf16 is taken to need 30 s as well until it has run; the whole claim does not fit, but single runs do
    assert made_up.started == ["fp32-s0", "bf16-s0", "bf16-s1", "fp32-s1"]
    assert left == {"mine": 40.0}
    again, left = call(["mine"], 100)
    assert made_up.started == ["fp32-s2", "bf16-s2"]
    assert (list(again.done), left) == (["mine"], {})
    assert again.done["mine"]["run_seconds"] == {"fp32": 30.0, "bf16": 10.0}


def test_a_run_that_outlasts_the_time_is_ended_and_not_begun_again_with_as_little(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine
) -> None:
    made_up.takes = {"fp32": 200.0, "bf16": 200.0}
    files("mine", criteria=LOSS)
    _, left = call(["mine"], 60)
    assert (made_up.started, made_up.now) == (["fp32-s0"], 60)
    assert left == {"mine": 360.0}  # at least
    call(["mine"], 60)
    assert made_up.started == []
    call(["mine"], 1500)
    assert len(made_up.started) == 6


@pytest.mark.parametrize(
    ("seconds", "earlier"),
    [(90, {"fp32-operators": 50.0, "bf16-operators": 50.0}), (70, {})],
    ids=["expected not to fit", "of unknown length"],
)
def test_an_outcome_is_kept_where_only_its_explanation_has_no_time(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine, seconds: float, earlier: dict[str, float]
) -> None:
    files("mine", criteria=CLAIM["criteria"][:1])  # type: ignore[index]
    made_up.takes = {"fp32-operators": 100.0, "bf16-operators": 100.0}
    here, left = call(["mine"], seconds, {"mine": {"fp32": 10.0, "bf16": 10.0} | earlier})
    record = here.done["mine"]
    assert (record["verdict"], record["unexplained"], left) == (CONFIRMED, True, {})
    assert record["why"] == [
        "There was no time left for the runs under a profiler that explain it; the same command makes them."
    ]
    again, _ = call(["mine"], 900)
    assert made_up.started == ["bf16-operators-s0", "fp32-operators-s0"]
    assert "unexplained" not in again.done["mine"]


def test_claims_come_in_order_of_value_those_without_an_outcome_first() -> None:
    listed = ordered(claims.names(), ["tf32_matmul", "two_x"])
    assert listed[:2] == ["amp_recipe", "gpt2_ladder"]
    assert listed[-2:] == ["tf32_matmul", "two_x"]
    assert ordered(["two_x", "of_mine"], [])[0] == "of_mine"


def test_every_claim_has_a_place_and_a_reason() -> None:
    lines = [line for line in ORDER.read_text().splitlines() if not line.startswith("#")]
    places = [line.partition(": ") for line in lines]
    assert sorted(name for name, _, _ in places) == claims.names()
    assert all(reason for _, _, reason in places)
    order = [name for name, _, _ in places]
    for name in claims.names():
        assert all(order.index(part) < order.index(name) for part in claims.load(name).combines)


def test_what_is_left_is_said_with_its_time() -> None:
    assert rest_in_words({}) == "Nothing is left to test here."
    assert rest_in_words({"a": 120.0, "b": None}) == "Left: a (2 min), b (not known yet). The same command continues."


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
    # quality_parity has 20 runs and scaler_needed 15, of ten seconds; ten of old_or_small and two under a profiler
    assert written == [("quality_parity", 200.0)]
    assert "does not fit in the time that is left" in said
    assert re.search(r"Done in \d+ s: quality_parity [A-Z]+\. Left: ", said)
    assert "The same command continues." in said


def test_a_process_ends_at_its_limit(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        in_a_process([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 0.2)


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
