"""A budget of time: what is begun, what is left, what is learnt; and the order of the claims. The clock is made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence.claims import claims, results
from evidence.claims import command as reproduce_cli
from evidence.claims.budget import Budget, duration, in_words, of_record, scaled
from evidence.claims.criteria import CONFIRMED
from evidence.claims.queue import ORDER, estimates, ordered, rest_in_words, run_claims
from evidence.claims.reproduce import Reproduction, machine_name, save
from evidence.runs import in_a_process
from tests.evidence.claims.made_up import CLAIM, Machine, reproduction
from tests.helpers import CPU

LOSS = [{"measure": "loss", "arm": "bf16", "over": "fp32", "within": 0.01}]
"""Needs no run under a profiler: six runs in all."""


@pytest.fixture
def call(tmp_path: Path, made_up: Machine) -> Callable[..., tuple[Reproduction, dict[str, float | None]]]:
    """One call of the command: the claims, the seconds that it has, and what earlier calls took."""

    def run(names: list[str], seconds: float, elsewhere: Any = None) -> tuple[Reproduction, dict[str, float | None]]:
        budget = Budget(seconds, start=made_up, clock=made_up.clock)
        here = reproduction(tmp_path, made_up, budget=budget, elsewhere=elsewhere or {})
        made_up.started.clear()
        return here, run_claims(names, here, lambda _: None)

    return run


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("25min", 1500), ("1h", 3600), ("1.5h", 5400), ("0.5min", 30)]
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert duration(text) == seconds


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
    assert again.done["mine"]["run_seconds"].keys() == {"fp32", "bf16"}


def test_a_run_that_outlasts_the_time_is_ended_and_not_begun_again_with_as_little(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine
) -> None:
    made_up.takes = {"fp32": 200.0, "bf16": 200.0}
    files("mine", criteria=LOSS)
    _, left = call(["mine"], 60)
    # Six runs of more than 20 s do not fit into 60 s; at last it gets the time that nothing else needs.
    assert (made_up.started, made_up.now) == (["fp32-s0", "fp32-s0"], 60)
    assert left == {"mine": 240.0}  # at least
    call(["mine"], 40)
    assert made_up.started == []
    call(["mine"], 1500)
    assert len(made_up.started) == 6


def test_a_claim_whose_first_run_is_too_long_leaves_the_time_to_the_others(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine
) -> None:
    made_up.takes = {"slow": 200.0}
    arms = {"slow": "net precision=fp32", "bf16": "net precision=bf16"}
    files("first", arms=arms, criteria=[LOSS[0] | {"over": "slow"}])
    files("second", criteria=LOSS)
    here, left = call(["first", "second"], 120)
    assert (list(here.done), left) == (["second"], {"first": 240.0})
    assert made_up.started.count("slow-s0") == 1  # in the 20 s that are left it would not end either
    assert made_up.now == 40 + 60


def test_an_outcome_is_kept_where_only_its_explanation_has_no_time(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine
) -> None:
    files("mine", criteria=CLAIM["criteria"][:1])  # type: ignore[index]
    made_up.takes = {"fp32-operators": 100.0, "bf16-operators": 100.0}
    known = {"mine": {"fp32": 10.0, "bf16": 10.0, "fp32-operators": 5.0, "bf16-operators": 5.0}}
    here, left = call(["mine"], 90, known)
    record = here.done["mine"]
    assert (record["verdict"], record["unexplained"], left) == (CONFIRMED, True, {})
    assert record["why"] == [
        "There was no time left for the runs under a profiler that explain it; the same command makes them."
    ]
    again, _ = call(["mine"], 900)
    assert made_up.started == ["bf16-operators-s0", "fp32-operators-s0"]
    assert "unexplained" not in again.done["mine"]


def test_a_claim_is_begun_where_only_the_runs_for_its_reasons_do_not_fit(
    files: Callable[..., None], call: Callable[..., Any], made_up: Machine
) -> None:
    files("mine", criteria=CLAIM["criteria"][:1])  # type: ignore[index]
    here, left = call(["mine"], 70, {"mine": {"fp32": 10.0, "bf16": 10.0}})
    assert (here.done["mine"]["verdict"], here.done["mine"]["unexplained"], left) == (CONFIRMED, True, {})
    assert made_up.now == 60


def test_another_machine_tells_what_runs_take_by_what_both_have_run(tmp_path: Path) -> None:
    there = {"one": {"fp32": 10.0}, "two": {"fp32": 100.0, "bf16": 50.0}}
    assert scaled(there, {"one": {"fp32": 30.0}}) == {"one": {"fp32": 30.0}, "two": {"fp32": 300.0, "bf16": 150.0}}
    assert scaled(there, {}) == there
    arms = {"fp32": {"measures": {"minutes": [1.0, 2.0]}}, "gemm": {"measures": {"tflops": [1.0]}}}
    assert of_record({"arms": arms}) == {"fp32": 90.0}
    assert of_record({"arms": arms, "run_seconds": {"gemm": 4.0}}) == {"fp32": 90.0, "gemm": 4.0}
    records: results.Records = {
        machine_name(CPU): {"one": {"hardware": {"device": "cpu"}, "arms": {}, "run_seconds": {"fp32": 20.0}}},
        "another": {name: {"hardware": {"device": "cpu"}, "run_seconds": there[name]} for name in there},
        "gpu": {"three": {"hardware": {"device": "cuda:0"}, "run_seconds": {"fp32": 1.0}}},
    }
    run = tmp_path / "two-0123456789" / "runs" / "bf16-s0"  # of another commit
    run.mkdir(parents=True)
    (run / "outcome.json").write_text(json.dumps({"wall_time_s": 100.0}))
    assert estimates(records, CPU, tmp_path) == {"one": {"fp32": 20.0}, "two": {"fp32": 200.0, "bf16": 100.0}}


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
    assert rest_in_words({"a": 120.0, "b": None}) == (
        "Left: a (2 min), b (not known yet). About 2 min in all, and those of unknown length. "
        "The same command continues."
    )


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
    monkeypatch.setattr(reproduce_cli, "Budget", lambda seconds: Budget(seconds, start=made_up, clock=made_up.clock))
    arguments = ["all=true", "budget=5min", "device=cpu", f"output_dir={tmp_path}"]
    assert reproduce_cli.main(arguments) == 0
    said = capsys.readouterr().out
    # quality_parity has 20 runs and scaler_needed 15, of ten seconds; ten of old_or_small and two under a profiler
    assert written == [("quality_parity", 200.0)]
    assert "scaler_needed needs about 140 s more" not in said
    assert "does not fit in the" in said
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
