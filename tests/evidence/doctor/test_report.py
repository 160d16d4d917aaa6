"""The files of a diagnosis, and the facts on its page."""

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
from evidence.doctor.report import folder_of, write
from evidence.doctor.step import TrainerStep
from mantissa.doctor.diagnosis import CHECKS, HEALTHY, NOT_REPRODUCED, Budget, Diagnosis, diagnose
from mantissa.doctor.islands import Islands
from mantissa.doctor.pairs import Pairs, Row
from mantissa.doctor.range import Exponents, Range
from mantissa.doctor.sweep import LEFT_OUT
from mantissa.finding import Finding
from tests.mantissa.doctor.faults import FAULTS

NAN = float("nan")
COMMAND = ["python", "scripts/doctor.py", "resume=a run"]


@pytest.fixture(scope="module")
def overflow() -> Diagnosis:
    torch.set_num_threads(1)
    return diagnose(FAULTS[0].replay(), ("ladder", "manifest"), budget_s=600)


@pytest.fixture
def found(overflow: Diagnosis, tmp_path: Path) -> Diagnosis:
    """A copy that a test may change, of a run in tmp_path."""
    budget = Budget(1, lambda: 0)
    budget.spent = dict(overflow.budget.spent)
    return replace(overflow, replay=replace(overflow.replay, folder=tmp_path / "run"), budget=budget)


class Page:
    """The text below each heading, and the names of all elements."""

    def __init__(self, text: str) -> None:
        self.tags = re.findall(r"<(\w+)", text)
        parts = re.split(r"<h[12]>(.*?)</h[12]>", text)
        texts = [html.unescape(re.sub("<[^>]+>", " ", part)) for part in parts[2::2]]
        self.below = dict(zip(parts[1::2], texts, strict=True))


def page_of(diagnosis: Diagnosis) -> Page:
    return Page(write(diagnosis, COMMAND)[0].read_text())


def test_the_files(found: Diagnosis, tmp_path: Path) -> None:
    files = write(found, COMMAND)
    assert {file.parent for file in files} == {tmp_path / "run" / "doctor" / "step-1"}
    assert files[0].name == "report.html"
    assert {file.name for file in files} == {"report.html", "verdict.json", "manifest.json", "manifest.csv"}
    verdict = json.loads((files[0].parent / "verdict.json").read_text(), parse_constant=pytest.fail)
    assert (verdict["verdict"], verdict["exit_code"], verdict["step"], verdict["loss"]) == ("FOUND", 7, 1, None)
    assert [rung["status"] for rung in verdict["ladder"]] == ["ok", "ok", "ok", "BREAKS", "BREAKS"]
    assert {rung["name"] for rung in verdict["ladder"]} < set(verdict["seconds"])
    assert verdict["findings"][0]["module"] == "1.wo"
    assert verdict["command"] == "python scripts/doctor.py 'resume=a run'"
    assert verdict["versions"]["torch"]
    assert verdict["hardware"]["device"] == "cpu"
    rows = json.loads((files[0].parent / "manifest.json").read_text())
    with (files[0].parent / "manifest.csv").open() as file:
        assert list(csv.DictReader(file)) == [{name: str(value) for name, value in row.items()} for row in rows]
    assert found.manifest is not None
    assert len(rows) == len(found.manifest.rows)


def test_files_of_an_earlier_examination_do_not_stay(found: Diagnosis) -> None:
    folder = write(found, COMMAND)[0].parent
    files = write(replace(found, manifest=None), COMMAND)
    assert sorted(folder.iterdir()) == sorted(files)
    assert "manifest.csv" not in {file.name for file in files}


def test_a_check_up_has_a_folder_of_its_own(found: Diagnosis, tmp_path: Path) -> None:
    step = found.replay.step
    assert isinstance(step, TrainerStep)
    found.replay.step = replace(step, config=replace(step.config, output_dir=str(tmp_path / "out")))
    found.replay.folder = None
    assert folder_of(found).parent == tmp_path / "out" / "doctor"
    found.replay.missing = "fp8"
    assert folder_of(found).name.endswith("-fp8-step-1")
    assert "A check-up before a run." in page_of(found).below["How it was measured"]


def test_the_page_says_what_was_found_and_what_to_do(found: Diagnosis) -> None:
    found.islands = Islands(["1.wo", "0.10"], cured=True, minimal=True, own=["*.ln"], time_ratio=1.03)
    first = replace(found.findings[0], cure=[found.islands.text(), "or precision=bf16, which is finite here"])
    found.findings = [first, *found.findings[1:]]
    below = page_of(found).below
    top = below["FOUND: overflow, forward"]
    for fact in ("step 1", "loss nan", "1.wo", "larger than the format can hold", "> 65504", "+3% time"):
        assert fact in top
    assert "precision.fp32_modules=[*.ln,1.wo,'0.10']" in top
    assert "or precision=bf16" in top
    assert re.findall(r"(\S+) +(ok|BREAKS|65536 BREAKS)\b", below["The ladder"])[-2:] == [
        ("fp16", "BREAKS"),
        ("fp16+scaler", "65536 BREAKS"),
    ]
    assert "aten.addmm float16 [8, 32]" in below["Findings"]
    assert found.manifest is not None
    assert f"{len(found.manifest.rows)} rows" in below["What ran in which format"]
    assert "python scripts/doctor.py 'resume=a run'" in below["How it was measured"]


def test_names_are_escaped_and_the_page_needs_nothing_else(found: Diagnosis) -> None:
    name = "a<script>&\"'"
    found.findings = [replace(found.findings[0], module=name, detail=name, path=[name], cure=[name])]
    found.notes = [name]
    found.findings += [Finding("underflow", "backward", f"layers.{n}", "fp16") for n in range(30)]
    text = write(found, [name])[0].read_text()
    page = Page(text)
    assert name in page.below["FOUND: overflow, forward"]
    assert name in page.below["Notes"]
    assert "30 more findings below" in page.below["FOUND: overflow, forward"]
    assert all(f"layers.{n}\n" in page.below["Findings"] for n in range(30))
    assert not {"script", "link", "img", "iframe", "a"} & set(page.tags)
    assert not re.search(r"https?://(?!www\.w3\.org/)|url\((?!#)|@import", text)
    assert not re.search(r"<[^>]+ (on\w+|src)=", text)


def test_what_was_not_examined_is_a_sentence(found: Diagnosis) -> None:
    found.verdict, found.findings, found.sweep, found.manifest = HEALTHY, [], [], None
    page = page_of(found)
    assert "svg" not in page.tags
    assert "Nothing was found" in page.below["HEALTHY"]
    assert page.below["What ran in which format"].strip() == "Not examined."
    assert page.below["Range of gradients"].strip() == "Not examined. check=range was not asked for."
    assert "The run did not measure lost updates." in page.below["Updates"]
    found.checks = CHECKS
    found.budget.left_out = ["pairs (out of memory)"]
    page = page_of(found)
    assert page.below["Range of gradients"].strip() == "Not examined. The step is not finite in fp32."
    assert page.below["Error by module"].strip() == "Not examined. See what was left out."


def test_what_was_left_out_and_what_to_do_without_a_finding(found: Diagnosis) -> None:
    found.verdict, found.findings = NOT_REPRODUCED, []
    found.sweep = [replace(found.sweep[0], status=LEFT_OUT, why="left out <now>"), *found.sweep[1:]]
    found.budget.left_out = ["pairs (no time left of budget_s=1)"]
    below = page_of(found).below
    assert "deterministic=true" in below["NOT REPRODUCED"]
    assert "fp64: left out <now>" in below["What was left out"]
    assert "pairs (no time left of budget_s=1)" in below["What was left out"]


def test_lost_updates_and_losses_over_time(found: Diagnosis, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = [{"step": step, "numerics/lost_updates": 0.5, "numerics/edq": 0.9} for step in (10, 20)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found.losses = {"fp16": [2.0, NAN], "fp32, changed 1": [2.0, 1.9], "fp32, changed 2": [2.1, 1.8]}
    page = page_of(found)
    assert page.tags.count("svg") == 2
    assert "effective descent quality" in page.below["Updates"]
    assert "Distance of the loss from that of fp32" in page.below["Further steps"]
    assert not {"script", "image"} & set(page.tags)


def test_errors_are_drawn_by_module_with_their_bounds(found: Diagnosis) -> None:
    found.pairs = Pairs(
        [
            Row(f"layers.{n}", 0, direction, "result", e, 2.0**-9, 1, 8 * 2.0**-9, e if direction == "forward" else NAN)
            for n in range(MOST + 5)
            for direction, e in (("forward", 0.001 * (n + 1)), ("backward", 0.001))
        ]
    )
    files = write(found, COMMAND)
    page = Page(files[0].read_text())
    text = page.below["Error by module"]
    assert page.tags.count("svg") == 2
    assert f"Error by module, forward, the {MOST} of {MOST + 5} modules nearest to their bounds" in text
    assert all(word in text for word in ("error beyond its bound", "accumulated (not judged)", "layers.44"))
    assert " layers.0 " not in text.partition("Error by module, backward")[0]
    with (files[0].parent / "pairs.csv").open() as file:
        first, *_ = rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (MOST + 5)
    assert float(first["ratio"]) == pytest.approx(0.001 / (8 * 2.0**-9))


def test_exponents_are_drawn_with_the_limits_of_fp16(found: Diagnosis) -> None:
    layers = [Exponents("wo", tensor, half=True) for tensor in ("output", "weight", "bias")]
    for layer in layers[:2]:
        layer.add(torch.tensor([0.0, 2.0**-10, 1.5 * 2.0**-10, 2.0**-30]))
    found.range = Range(layers, highest=24, lowest=2)
    files = write(found, COMMAND)
    page = Page(files[0].read_text())
    text = page.below["Range of gradients"]
    assert page.tags.count("svg") == 2
    assert "the loss scales from 2^2 to 2^24 hold all of them. The step's scale is 65536." in text
    assert all(word in text for word in ("infinite above, scale 65536", "0 below, scale 2^24", "wo.weight"))
    assert "wo.bias" not in text  # all of it is 0
    with (files[0].parent / "range.csv").open() as file:
        row = next(csv.DictReader(file))
    assert (row["module"], row["tensor"], row["zeros"], row["2^-10"], row["2^-30"]) == ("wo", "output", "1", "2", "1")
    found.range = Range([], highest=1, lowest=2)
    assert "no loss scale holds all of them" in page_of(found).below["Range of gradients"]
    found.range = Range([])
    assert "needs no loss scale" in page_of(found).below["Range of gradients"]


def test_a_report_that_cannot_be_written_does_not_change_the_verdict(
    overflow: Diagnosis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> list[Path]:
        raise OSError(28, "No space left on device", "/full/report.html")

    replacements: dict[str, Callable[..., Any]] = {
        "of_run": lambda *_: overflow.replay,
        "diagnose": lambda *_: overflow,
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
