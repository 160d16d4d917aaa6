"""``precision_gate``: what passes, and what fails with which message."""

from __future__ import annotations

import os
import random
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import mantissa
from mantissa.errors import UsageError

pytest_plugins = ["pytester"]


class Train:
    """Trains nothing: a loss by seed, and what a precision adds to it."""

    def __init__(self, shift: float = 0.0, spread: float = 0.0002) -> None:
        self.shift, self.spread = shift, spread
        self.calls: list[tuple[str, int]] = []

    def __call__(self, precision: str, seed: int) -> float:
        self.calls.append((precision, seed))
        noise = random.Random(seed)
        base, other = 2 + noise.gauss(0, 0.02), self.shift + noise.gauss(0, self.spread)
        return base if precision == "fp32" else base * (1 + other)


def test_an_arm_that_does_not_use_its_precision_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="bf16 is equal to fp32 in every digit"):
        mantissa.precision_gate(lambda precision, seed: 1.234567 + seed / 1e5, report=tmp_path)


def test_an_arm_that_trains_alike_passes_and_has_a_page(tmp_path: Path) -> None:
    train = Train()
    found = mantissa.precision_gate(train, report=tmp_path)
    assert found.verdicts["bf16"].verdict == "EQUIVALENT"
    assert len(train.calls) == 2 * 4
    assert "<h1>fp32 / bf16</h1>" in (tmp_path / "comparison.html").read_text()


@pytest.mark.parametrize(("shift", "verdict"), [(0.01, "WORSE"), (-0.01, "BETTER")])
def test_a_change_in_either_direction_fails_with_the_report(tmp_path: Path, shift: float, verdict: str) -> None:
    train = Train(shift)
    with pytest.raises(AssertionError) as caught:
        mantissa.precision_gate(train, report=tmp_path)
    assert re.match(rf"bf16, compared with fp32: loss [+-]1\.0\d % .*: {verdict} at a margin", str(caught.value))
    assert str(tmp_path / "comparison.html") in str(caught.value)
    assert len(train.calls) == 2 * 4, "no more seeds, since these decide it"


def test_what_few_seeds_leave_open_more_decide_or_it_fails(tmp_path: Path) -> None:
    train = Train(spread=0.002)
    with pytest.raises(AssertionError, match=r"INCONCLUSIVE at a margin of 0.3 %; about \d+ seeds with this spread"):
        mantissa.precision_gate(train, max_seeds=4, report=tmp_path)
    mantissa.precision_gate(train, report=tmp_path)
    assert len(train.calls) == 2 * 4 + 2 * 16
    assert mantissa.precision_gate(Train(spread=0.002), margin=0.02, report=tmp_path).looks[-1]["seeds"] == [0, 1, 2, 3]


def test_no_more_seeds_are_no_second_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="INCONCLUSIVE"):
        mantissa.precision_gate(Train(spread=0.002), seeds=4, max_seeds=4, report=tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == 2 * 4


def test_an_arm_that_diverges_is_worse_and_an_error_of_the_training_is_its_own(tmp_path: Path) -> None:
    train = Train()
    with pytest.raises(AssertionError, match="WORSE; 1 of 4 runs diverged where the baseline's did not"):
        mantissa.precision_gate(lambda p, s: float("nan") if (p, s) == ("bf16", 2) else train(p, s), report=tmp_path)
    with pytest.raises(ZeroDivisionError):
        mantissa.precision_gate(lambda precision, seed: 1 / seed, report=tmp_path)
    loss = torch.ones((), requires_grad=True)  # whose conversion torch would warn of
    assert mantissa.precision_gate(lambda p, s: loss * train(p, s), report=tmp_path).equivalent
    for returned in (None, [3.0, 2.5], torch.ones(2)):
        with pytest.raises(UsageError, match="train must return the final loss, a number, and returned "):
            mantissa.precision_gate(lambda precision, seed, value=returned: value, report=tmp_path)


def test_the_fixture_fails_the_test_with_the_report_and_writes_its_page(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_bf16="""
        def test_same(precision_gate):
            precision_gate(lambda precision, seed: 2 + 0.01103 * seed)

        def test_worse(precision_gate):
            train = lambda precision, seed: 2 + 0.01103 * seed + 0.1 * (precision == "bf16")
            precision_gate(train, report="pages")
        """
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))
        result = pytester.runpytest_subprocess("-p", "mantissa.verdict.plugin")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *AssertionError: bf16, compared with fp32: loss +4.*: WORSE at a margin of 0.3 %."])
    result.stdout.no_fnmatch_line("*mantissa/verdict/gate.py*")
    assert "WORSE" in (pytester.path / "pages" / "comparison.html").read_text()


def test_pytest_finds_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert import_module(project["entry-points"]["pytest11"]["mantissa"]).precision_gate


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"margin": "0.3%"}, "margin must be a number, such as 0.003, and is of type str"),
        ({"margin": 1}, "margin=1 must be more than 0 and less than 1"),
        ({"seeds": "4"}, "seeds must be a whole number"),
        ({"max_seeds": 2.5}, "max_seeds must be a whole number"),
        ({"seeds": 6, "max_seeds": 4}, "max_seeds=4 is below seeds=6"),
        ({"train": lambda seed: 1.0}, r"called as train\(precision, seed\), which it does not take"),
        ({"arms": None}, "each of arms must be a name"),
        ({"arms": "bf16"}, "must be two or more different precisions"),
        ({"train": None}, "train must be a function"),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mantissa.precision_gate(**{"train": lambda precision, seed: 1 + 0.01 * seed} | options)
