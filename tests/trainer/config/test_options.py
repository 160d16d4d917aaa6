"""Options of the scripts that are not Hydra's, as they are typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import bench
from trainer.config.options import no_more, parse, whole_number
from trainer.errors import UserError

DEFAULTS = {"output_dir": "outputs", "uri": "", "runs": "6"}


def test_options_and_the_rest_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    options, others = parse(["uri=sqlite:///x.db?a=b", "outputs/run", "a=b", "runs=3"], DEFAULTS)
    assert options == {"output_dir": "outputs", "uri": "sqlite:///x.db?a=b", "runs": "3"}
    assert others == ["outputs/run", "a=b"]
    assert whole_number(options, "runs") == 3


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--output-dir=here", "--output-dir=here: write output_dir=here, without dashes"),
        ("--runs", "--runs: write runs=…, without dashes"),
        ("--rusn=3", "is no option here; did you mean 'runs'"),
        ("rusn=3", "rusn is no option here; did you mean 'runs'"),
        ("uri=", "uri= has no value"),
    ],
)
def test_mistakes_are_one_sentence(argument: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse([argument], DEFAULTS)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "²"])
def test_numbers_are_whole_and_positive(value: str) -> None:
    with pytest.raises(UserError, match=f"runs={value} must be a whole number"):
        whole_number({"runs": value}, "runs")
    with pytest.raises(UserError, match="write key=value"):
        no_more([value])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "memory"], "--only: write only=…, without dashes"),
        (["only=memroy"], "only=memroy is no measurement; did you mean 'memory'"),
        (["repeats=0"], "repeats=0 must be a whole number of at least 1"),
        (["memory"], "'memory' is not an option; write key=value"),
    ],
)
def test_bench_refuses_mistakes_before_it_measures(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench.py", *arguments])
    assert bench.main() == 2
    assert message in capsys.readouterr().err


def test_bench_takes_some_measurements() -> None:
    assert bench.chosen("memory,precision") == bench.chosen("[memory,precision]") == ["memory", "precision"]
    assert bench.chosen("") == list(bench.MEASUREMENTS)
