"""A budget of time: what is begun and what is left; and the order of the claims. The clock is made up."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evidence.claims import claims, results
from evidence.claims import command as reproduce_cli
from evidence.claims.command import seconds_of
from evidence.claims.reproduce import ORDER, ordered, save
from evidence.runs import Arm, OutOfTime, Runner
from tests.evidence.claims.made_up import Machine
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, made_up: Machine) -> None:
    monkeypatch.setattr("evidence.runs.time.monotonic", lambda: made_up.now)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("25min", 1500), ("1h", 3600), ("1.5h", 5400), ("0.5min", 30)]
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["25", "soon", "0min"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"budget={text} is not a time: set budget=25min"):
        seconds_of(text)


def test_runs_begin_until_the_time_is_over_and_the_next_call_continues(tmp_path: Path, made_up: Machine) -> None:
    arms = [Arm("fp32", ("precision=fp32",)), Arm("bf16", ("precision=bf16",))]

    def run_all(seconds: float) -> list[str]:
        """Return the runs that were begun within so many seconds."""
        made_up.started.clear()
        with suppress(OutOfTime):
            Runner(tmp_path, launch=made_up, until=made_up.now + seconds).run_all(arms, [0, 1, 2])
        return list(made_up.started)

    made_up.takes = {"fp32": 30.0, "bf16": 10.0}
    assert run_all(0) == []
    assert run_all(45) == ["fp32-s0", "bf16-s0", "bf16-s1"]  # the last was ended after five seconds
    assert made_up.now == 45
    assert run_all(40) == ["bf16-s1", "fp32-s1"]
    assert run_all(100) == ["fp32-s2", "bf16-s2"]


def test_claims_come_in_order_of_value_those_without_an_outcome_first() -> None:
    here = ["two_x", "gpt2_ladder", "of_mine", "tf32_matmul", "amp_recipe"]
    assert ordered(here, ["tf32_matmul", "two_x"]) == ["of_mine", "amp_recipe", "gpt2_ladder", "tf32_matmul", "two_x"]


def test_every_place_is_a_claims_and_has_a_reason() -> None:
    lines = [line for line in ORDER.read_text().splitlines() if not line.startswith("#")]
    places = [line.partition(": ") for line in lines]
    assert {name for name, _, _ in places} <= {name for name in claims.names() if not claims.load(name).combines}
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
    monkeypatch.setattr("evidence.runs.in_a_process", made_up)
    arguments = ["all=true", "budget=5min", "device=cpu", f"output_dir={tmp_path}"]
    assert reproduce_cli.main(arguments) == 0
    said = capsys.readouterr().out
    # quality_parity has 20 runs of ten seconds, scaler_needed 15
    assert written == [("quality_parity", 200.0)]
    assert re.search(r"Done: quality_parity [A-Za-z ]+\.\n", said)
    assert "Left: scaler_needed, old_or_small. The same command continues" in said
