"""The files of a diagnosis: the page has the terminal's lines, plots, and what was measured with."""

from __future__ import annotations

import csv
import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.doctor import command
from evidence.doctor.plots import MOST
from evidence.doctor.step import step_of
from mantissa.doctor.budget import Budget
from mantissa.doctor.diagnosis import Diagnosis, diagnose
from mantissa.doctor.examine import take
from mantissa.doctor.finding import Cure, Examined, Finding
from mantissa.doctor.fp16_range import Exponents, Range
from mantissa.doctor.module_errors import LocalError
from mantissa.doctor.report import lines, opening
from tests.evidence.doctor.planted import Planted
from tests.mantissa.doctor.faults import around, large_ffn
from trainer.precision.modes import Precision

COMMAND = "python scripts/doctor.py 'resume=a run'"


OVERFLOWING = Planted(lambda: around(large_ffn()), Precision(mode="fp16"))


@pytest.fixture(scope="module")
def overflow() -> Diagnosis:
    return diagnose(take(step_of(OVERFLOWING.trainer())), ("formats", "manifest"), time_budget_s=600)


@pytest.fixture
def found(overflow: Diagnosis, tmp_path: Path) -> Diagnosis:
    """A copy that a test may change, of a run in tmp_path."""
    budget = Budget(1, overflow.taken.step)
    budget.spent = dict(overflow.budget.spent)
    taken = replace(overflow.taken, folder=tmp_path / "run")
    return replace(overflow, taken=taken, budget=budget, examined=dict(overflow.examined), not_asked=[])


def written(diagnosis: Diagnosis) -> Path:
    return command.write(diagnosis, OVERFLOWING.trainer().config, COMMAND)


def page_of(diagnosis: Diagnosis) -> tuple[str, int]:
    """The text of the page, and how many plots it has."""
    text = written(diagnosis).read_text()
    return html.unescape(re.sub("<[^>]+>", " ", text.partition("</style>")[2])), text.count("<svg")


def rows_of(diagnosis: Diagnosis, table: str) -> list[dict[str, str]]:
    assert diagnosis.taken.folder is not None
    with (diagnosis.taken.folder / "doctor" / "step-1" / f"{table}.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_files(found: Diagnosis, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "doctor" / "step-1"
    assert written(found) == folder / "report.html"
    assert sorted(folder.iterdir()) == [
        folder / name for name in ("manifest.csv", "report.html", "report.txt", "verdict.json")
    ]
    verdict = json.loads((folder / "verdict.json").read_text(), parse_constant=pytest.fail)
    assert (verdict["verdict"], verdict["exit_code"], verdict["step"], verdict["loss"]) == ("FOUND", 7, 1, None)
    assert [format["status"] for format in verdict["formats"]] == ["ok", "ok", "ok", "BREAKS", "BREAKS"]
    assert {format["name"] for format in verdict["formats"]} < set(verdict["seconds"])
    assert verdict["findings"][0]["module"] == "1.wo"
    assert (verdict["command"], verdict["hardware"]["device"]) == (COMMAND, "cpu")
    assert verdict["versions"]["torch"]
    rows = found.examined["manifest"].rows
    expected = [{name: str(value) for name, value in row._asdict().items()} for row in rows]
    assert rows_of(found, "manifest") == expected
    written(replace(found, examined={}))
    assert not (folder / "manifest.csv").exists()  # none of an earlier report stay


def test_the_page_says_what_the_terminal_says(found: Diagnosis) -> None:
    name = "a<script>&\"'"
    islands = Cure(found.step.remedies.modules(["*.ln", "1.wo", "0.10"]), found.step, about="+1.2 MiB")
    other = Finding("underflow", "backward", name, "fp16", path=(name,))
    fault = replace(found.faults[0], held=(islands,))
    of_other = replace(fault, trial=replace(fault.trial, finding=other), held=(Cure(name, found.step),))
    found.faults = [fault, of_other]
    found.notes, found.budget.left_out = [name], [name]
    text, plots = page_of(found)
    said = [opening(found.taken), *lines(found)]
    assert "\n".join(said) in text
    assert plots == 0
    assert "  cure: 'precision.modules={*.ln:fp32,1.wo:fp32,0.10:fp32}'  (+1.2 MiB)" in said
    for fact in ("larger than the format can hold", COMMAND, "; torch "):
        assert fact in text


def test_errors_are_drawn_by_module_with_their_bounds(found: Diagnosis) -> None:
    u = 2.0**-9
    found.examined["modules"] = Examined(
        rows=tuple(
            LocalError(f"layers.{n}", 0, direction, "result", e, u, 1, 8 * u)
            for n in range(MOST + 5)
            for direction, e in (("forward", 0.001 * (n + 1)), ("backward", 0.001))
        )
    )
    text, plots = page_of(found)
    assert plots == 2
    assert f"Error by module, forward, the {MOST} of {MOST + 5} modules nearest to their bounds" in text
    assert "layers.44" in text
    assert " layers.0 " not in text.partition("Error by module, backward")[0]
    first, *_ = rows = rows_of(found, "modules")
    assert len(rows) == 2 * (MOST + 5)
    assert float(first["ratio"]) == pytest.approx(0.001 / (8 * u))


def test_exponents_are_drawn_with_the_limits_of_fp16(found: Diagnosis) -> None:
    layers = [Exponents("wo", tensor, half=True) for tensor in ("output", "weight", "bias")]
    for layer in layers[:2]:
        layer.add(torch.tensor([0.0, 2.0**-10, 1.5 * 2.0**-10, 2.0**-30]))
    found.examined["range"] = Range(rows=tuple(layers), highest=24, lowest=2)
    text, plots = page_of(found)
    assert plots == 2
    assert all(
        word in text for word in ("too large for fp16, scale 65536", "too small for fp16, scale 65536", "wo.weight")
    )
    assert "wo.bias" not in text  # all of it is 0
    row = rows_of(found, "range")[0]
    assert (row["module"], row["tensor"], row["zeros"], row["2^-10"], row["2^-30"]) == ("wo", "output", "1", "2", "1")


def test_a_report_that_cannot_be_written_does_not_change_the_verdict(
    overflow: Diagnosis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device", "/full/report.html")

    replacements: dict[str, Callable[..., Any]] = {
        "of_run": lambda *_: (overflow.taken, None),
        "diagnose": lambda *_, say: overflow,
        "write": full,
    }
    for name, function in replacements.items():
        monkeypatch.setattr(command, name, function)
    assert command.main(["resume=a run"]) == 7
    printed = capsys.readouterr()
    assert "FOUND overflow, forward: 1.wo" in printed.out
    assert printed.err.splitlines()[-1:] == [
        "the report could not be written ([Errno 28] No space left on device: '/full/report.html')"
    ]
