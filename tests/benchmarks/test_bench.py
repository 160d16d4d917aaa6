from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import bench, ratios, rows
from benchmarks.bench import MEASUREMENTS, main
from benchmarks.jobs import Job
from benchmarks.rows import Bench, Row, interleave
from trainer.config.options import run
from trainer.hardware import detect

WHY = "fp16 products take 95 times as long as fp32's here"


def test_rows_are_printed_and_kept_as_they_come_also_beside_a_measurement_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def broken(given: Bench) -> Iterator[Row]:
        yield Row("known before", "ms", [1.0, 3.0, 2.0], "a command")
        yield Row("not measured here", "ms", [], "why")
        seen.append(capsys.readouterr().out)
        raise ValueError("no such operator")

    def whole(given: Bench) -> Iterator[Row]:
        yield Row("of the others", "ms", [1.0], "a command")

    monkeypatch.setattr(bench, "MEASUREMENTS", {"broken": broken, "whole": whole})
    kept: dict[str, str] = {}
    monkeypatch.setattr(
        bench.results, "keep", lambda _, command, found: kept.update(dict.fromkeys(found, command)) or "kept"
    )
    assert run(main, None, ["device=cpu"]) == 1
    assert "known before" in seen[0]
    output = capsys.readouterr().out
    assert "of the others" in output
    assert output.endswith("failed: broken: ValueError: no such operator\n")
    assert run(main, None, ["device=cpu", "only=whole", "repeats=1"]) == 0  # a trial
    assert kept == dict.fromkeys(("known before", "of the others"), "python benchmarks/bench.py device=cpu")


def test_those_that_are_named_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, bench.__doc__, ["--help"]) == 0
    assert ", ".join(MEASUREMENTS) in " ".join(capsys.readouterr().out.split())
    done: list[str] = []
    for name in MEASUREMENTS:
        monkeypatch.setitem(MEASUREMENTS, name, lambda _, name=name: done.append(name) or [])
    assert run(main, None, ["only=memory,precision", "device=cpu"]) == 0
    assert done == ["memory", "precision"]
    assert run(main, None, ["device=cpu"]) == 0
    assert done[2:] == list(MEASUREMENTS)


def test_a_format_in_fp32_arithmetic_is_left_out_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def block(bench: Bench, job: Job, precision: str) -> Callable[[], float]:
        trained.append(precision)
        return lambda: 1.0

    monkeypatch.setattr(rows, "not_timed_here", lambda mode, _: WHY if mode in ("fp16", "bf16") else None)
    monkeypatch.setattr(ratios, "_training_block", block)
    jobs = (Job("a job", ()), Job("a job", ()))
    none, asked = (Bench(detect("cpu"), 1, tmp_path, modes=frozenset(modes)) for modes in ((), ("fp16",)))
    assert {row.measured.partition(";")[0] for row in ratios.precision(none, jobs)} == {f"left out: {WHY}"}
    assert trained == []  # fp32 alone says nothing
    found = list(ratios.precision(asked, jobs))
    assert sorted(trained) == ["fp16", "fp32"]
    assert [row.name for row in found if row.values] == ["a job, throughput, fp16 / fp32"]
    assert found[0].measured == f"left out: {WHY}; measured with modes=bf16"
    assert none.mode == "fp32"
    assert Bench(none.hardware, 1, tmp_path, modes=frozenset({"bf16"})).mode == "bf16"


def test_blocks_take_turns_and_the_first_repeat_is_not_kept() -> None:
    calls: list[str] = []
    seconds = {"a": iter([9.0, 1.0, 2.0]), "b": iter([7.0, 3.0, 5.0])}

    def block(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return next(seconds[name])

        return run

    times = interleave({"a": block("a"), "b": block("b")}, repeats=2)
    assert times == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert rows.ratios(times, "b", "a") == [3.0, 2.5]
