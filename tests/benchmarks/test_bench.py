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

Measurement = Callable[[Bench], Iterator[Row]]
WHY = "fp16 products take 95 times as long as fp32's here"
Known = Callable[[str], str]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command with these measurements in the place of its own."""

    def command(*arguments: str, **measurements: Measurement) -> int:
        monkeypatch.setattr("benchmarks.bench.MEASUREMENTS", measurements)
        return run(main, None, ["device=cpu", *arguments])

    return command


def row(name: str, *values: float) -> Row:
    return Row(name, "ms", list(values) or [1.0], "a command")


def test_a_row_is_printed_before_the_next_is_computed(
    measure: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def slow(given: Bench) -> Iterator[Row]:
        yield row("the first row")
        seen.append(capsys.readouterr().out)
        given.report("computing the second")
        yield row("the second row")

    assert measure(slow=slow) == 0
    assert "the first row" in seen[0]
    rest = capsys.readouterr().out
    assert "the second row" in rest
    assert "computing" not in rest  # no terminal: nothing but rows


def test_a_measurement_that_fails_is_named_and_the_others_go_on(
    measure: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(given: Bench) -> Iterator[Row]:
        yield row("known before")
        raise ValueError("no such operator")

    def whole(given: Bench) -> Iterator[Row]:
        yield row("of the others")

    assert measure(broken=broken, whole=whole) == 1
    output = capsys.readouterr().out
    assert output.index("known before") < output.index("of the others")
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


@pytest.fixture
def no_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "not_timed_here", lambda mode, _: WHY if mode in ("fp16", "bf16") else None)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that are trained, without training."""
    names: list[str] = []

    def block(bench: Bench, job: Job, overrides: tuple[str, ...]) -> Callable[[], float]:
        names.append(" ".join(overrides))
        return lambda: 1.0

    monkeypatch.setattr(ratios, "_training_block", block)
    return names


@pytest.mark.usefixtures("no_fp16")
def test_a_format_in_fp32_arithmetic_is_left_out_and_named(tmp_path: Path, trained: list[str]) -> None:
    job = Job("a job", ())
    found = list(ratios.precision(Bench(detect("cpu"), 1, tmp_path), (job, job)))
    assert trained == []  # fp32 alone says nothing
    assert len(found) == 4
    assert {row.measured.partition(";")[0] for row in found} == {f"left out: {WHY}"}
    assert {len(row.values) for row in found} == {0}


@pytest.mark.usefixtures("no_fp16")
def test_a_format_in_fp32_arithmetic_is_measured_where_it_is_asked_for(tmp_path: Path, trained: list[str]) -> None:
    job = Job("a job", ())
    found = list(ratios.precision(Bench(detect("cpu"), 1, tmp_path, modes=frozenset({"fp16"})), (job, job)))
    assert trained == ["precision=fp32", "precision=fp16"]
    assert [row.name for row in found if row.values] == ["a job, throughput, fp16 / fp32"]
    assert found[0].measured == f"left out: {WHY}; measured with modes=bf16"


@pytest.mark.usefixtures("no_fp16")
def test_what_compares_no_precisions_is_measured_in_fp32_where_bf16_is_not_timed(tmp_path: Path) -> None:
    given = Bench(detect("cpu"), 1, tmp_path)
    assert given.mode == "fp32"
    assert Bench(given.hardware, 1, tmp_path, modes=frozenset({"bf16"})).mode == "bf16"


def test_the_help_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, bench.__doc__, ["--help"]) == 0
    assert ", ".join(MEASUREMENTS) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["only=memroy"], "only=memroy is unknown; did you mean 'memory'"),
        (["modes=bf15"], "modes=bf15 is unknown; did you mean 'bf16'"),
        (["repeats=0"], "repeats=0 must be a whole number of at least 1"),
        (["text=nowhere.txt"], "text=nowhere.txt: there is no such file"),
        (["table=nowhere/file"], "table=nowhere/file: there is no such folder"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(main, None, arguments) == 2
    assert message in capsys.readouterr().err


def test_those_that_are_named_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in MEASUREMENTS:
        monkeypatch.setitem(MEASUREMENTS, name, lambda _, name=name: done.append(name) or [])
    assert run(main, None, ["only=memory,precision", "device=cpu"]) == 0
    assert done == ["memory", "precision"]
    assert run(main, None, ["device=cpu"]) == 0
    assert done[2:] == list(MEASUREMENTS)
