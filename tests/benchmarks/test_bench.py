from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import bench, ratios, rows
from benchmarks.bench import MEASUREMENTS, main
from benchmarks.jobs import Job
from benchmarks.rows import Bench, Row
from trainer.config.options import run
from trainer.hardware import detect

WHY = "fp16 products take 95 times as long as fp32's here"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command with these measurements in the place of its own."""

    def command(*arguments: str, **measurements: Callable[[Bench], Iterator[Row]]) -> int:
        monkeypatch.setattr("benchmarks.bench.MEASUREMENTS", measurements)
        return run(main, None, ["device=cpu", *arguments])

    return command


def test_rows_are_printed_as_they_come_also_beside_a_measurement_that_fails(
    measure: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def broken(given: Bench) -> Iterator[Row]:
        yield Row("known before", "ms", [1.0], "a command")
        seen.append(capsys.readouterr().out)
        raise ValueError("no such operator")

    def whole(given: Bench) -> Iterator[Row]:
        yield Row("of the others", "ms", [1.0], "a command")

    assert measure(broken=broken, whole=whole) == 1
    assert "known before" in seen[0]
    output = capsys.readouterr().out
    assert "of the others" in output
    assert output.endswith("failed: broken: ValueError: no such operator\n")


def test_rows_become_a_page(measure: Callable[..., int], tmp_path: Path) -> None:
    def found(given: Bench) -> Iterator[Row]:
        yield Row("speed", "x", [2.0, 3.0, 4.0], "a command", 2.5, at_most=False)
        yield Row("nothing", "x", [], "left out: it takes hours")

    page = tmp_path / "page.md"
    assert measure(f"table={page}", "repeats=3", rows=found) == 0
    text = page.read_text()
    assert f"    python benchmarks/bench.py device=cpu table={page} repeats=3\n" in text
    assert "## rows\n\n| quantity | measured | target | how |" in text
    assert "| speed | 3.000x (2.000 to 4.000) | ≥ 2.5x | a command |" in text
    assert "| nothing | – |  | left out: it takes hours |" in text


def test_a_format_in_fp32_arithmetic_is_left_out_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def block(bench: Bench, job: Job, overrides: tuple[str, ...]) -> Callable[[], float]:
        trained.extend(overrides)
        return lambda: 1.0

    monkeypatch.setattr(rows, "not_timed_here", lambda mode, _: WHY if mode in ("fp16", "bf16") else None)
    monkeypatch.setattr(ratios, "_training_block", block)
    jobs = (Job("a job", ()), Job("a job", ()))
    none, asked = (Bench(detect("cpu"), 1, tmp_path, modes=frozenset(modes)) for modes in ((), ("fp16",)))
    assert {row.measured.partition(";")[0] for row in ratios.precision(none, jobs)} == {f"left out: {WHY}"}
    assert trained == []  # fp32 alone says nothing
    found = list(ratios.precision(asked, jobs))
    assert trained == ["precision=fp32", "precision=fp16"]
    assert [row.name for row in found if row.values] == ["a job, throughput, fp16 / fp32"]
    assert found[0].measured == f"left out: {WHY}; measured with modes=bf16"
    assert none.mode == "fp32"
    assert Bench(none.hardware, 1, tmp_path, modes=frozenset({"bf16"})).mode == "bf16"


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
