"""The report of a comparison: tables, sentences, Markdown, and a self-contained page."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence.comparison.compare import Comparison, Result
from evidence.comparison.judge import Ratio, judge
from evidence.comparison.plots import figures
from evidence.comparison.report import HEAD, _change, _cost, lead, rows, sentences, table, write_report
from evidence.runs import Arm, Outcome
from mantissa.ledger import CATEGORIES
from mantissa.statistics import Interval
from tests.evidence.ended import ended

STEPS = range(50, 2001, 50)
FACTS: dict[str, Any] = {
    "recipe": "gpt2",
    "unit": "tokens",
    "steps": 2000,
    "hardware": {"name": "A test's CPU", "device": "cpu", "threads": 2},
    "versions": {"torch": "2.15.0"},
    "git": {"commit": "0123456789abcdef", "dirty": "false"},
}


def result(folder: Path, labels: list[str], seeds: int, wide: str | None = None) -> Result:
    """The first label is the baseline; the last arm is the null arm; ``wide``: what the others' matmuls use."""
    generator = np.random.default_rng(0)
    arms = [Arm(label, (f"precision={label}",)) for label in labels] + [Arm("null", (), 1000)]
    outcomes = []
    for seed in range(seeds):
        for number, arm in enumerate(arms):
            noise = 0.01 if arm.seed_shift else 0.001
            run = ended(
                folder / "runs",
                arm.label,
                seed,
                STEPS,
                [2 + 2 * math.exp(-step / 400) + generator.normal(0, noise) for step in STEPS],
                dict.fromkeys(CATEGORIES, 2**20 * (10 + number)),
                units_per_s=1e4 * (1 + number % len(labels)) * generator.normal(1, 0.02),
                fp32_arithmetic=None if arm.seed_shift or not number else wide,
            )
            outcomes.append(run)
    comparison = Comparison(arms, labels[0], list(range(seeds)), output_dir=folder, name="a<b")
    comparison.folder.mkdir(parents=True)
    return judged(comparison, outcomes)


def fails(found: Result, label: str, exit_code: int, why: str) -> Result:
    """The same comparison where every run of an arm failed."""
    for outcome in found.outcomes:
        if outcome.arm == label:
            outcome.exit_code, outcome.failure = exit_code, why
    return judged(found.comparison, found.outcomes)


def judged(comparison: Comparison, outcomes: list[Outcome]) -> Result:
    arms = judge(comparison.arms, comparison.baseline, outcomes, comparison.margin)
    return Result(comparison, arms, outcomes, FACTS, [{"seeds": comparison.seeds, "finished": 9}])


@pytest.fixture
def found(tmp_path: Path) -> Result:
    return result(tmp_path, ["fp32", "bf16", "fp16"], 3)


def cells(found: Result, arm: str) -> dict[str, str]:
    head, *below = rows(found)
    return next(dict(zip(head, row, strict=True)) for row in below if row[0].startswith(arm))


def test_a_speed_in_fp32_arithmetic_is_said_not_to_be_the_formats(tmp_path: Path) -> None:
    why = "bf16 matmuls: fp32 arithmetic, this CPU has no bf16 instructions"
    found = result(tmp_path, ["fp32", "bf16"], 3, wide=why)
    bf16 = cells(found, "bf16")
    assert bf16["speedup"] == "NOT JUDGED"
    assert bf16["throughput"].endswith(" in fp32 arithmetic")
    assert "x" in cells(found, "null")["speedup"]
    assert {"speed", "answers"}.isdisjoint(figures(found))
    needs = "bf16 needs 10 % more memory than fp32; its validation loss is the same within 0.3 %."
    assert lead(found) == [f"{needs} NOT JUDGED: speed ({why})."]
    assert "speed" not in sentences(found)[0]


def test_the_table(found: Result) -> None:
    base, bf16, null = (cells(found, arm) for arm in ("fp32", "bf16", "null"))
    assert list(base)[:3] == ["arm", "quality", "difference"], "the verdicts come first"
    assert base["arm"] == "fp32 (baseline)"
    assert re.fullmatch(r"[\d,]+ tokens/s ± \d+\.\d %", base["throughput"])
    assert (base["speedup"], base["difference"], base["quality"]) == ("1", "", "")
    assert re.fullmatch(r"[12]\.\d\dx \[1\.\d\d, 2\.\d\d\]", bf16["speedup"])
    assert (bf16["peak memory"], bf16["memory ratio"]) == ("88.0 MiB", "1.100x")
    assert re.fullmatch(r"[+-]\d\.\d\d % \[[+-]\d\.\d\d, [+-]\d\.\d\d\] \(9\d %\)", bf16["difference"])
    low, high = map(float, re.findall(r"[+-]\d\.\d\d", bf16["difference"])[1:])
    assert -0.3 < low < high < 0.3  # the interval beside a verdict is the one that decided
    assert null["difference"].endswith("(95 %)")
    same, faster = "its validation loss is the same within 0.3 %.", "as fast as fp32 and needs"
    assert lead(found)[0] == f"bf16 is {float(bf16['speedup'][:4]):.2g}x {faster} 10 % more memory; {same}"
    assert (bf16["quality"], null["quality"]) == ("EQUIVALENT", "noise")
    assert max(map(len, table(found).splitlines())) <= 90


def test_a_number_and_its_interval_have_one_sign_and_one_order() -> None:
    ratio = Ratio(None, ratio=Interval(0.415, 0.071, 2.421, 0.95, 3))
    assert _change("speed", ratio) == "speed -58.5 % [-92.9, +142.1]: no clear difference"
    assert _cost("speed", Interval(0.415, 0.071, 2.421, 0.95, 3)) == ("shows no clear difference in speed", "from")
    assert _change("speed", replace(ratio, why="2 seeds")) == "speed -58.5 % [-92.9, +142.1]: NOT JUDGED"


@pytest.mark.parametrize(
    ("exit_code", "quality", "reported"),
    [
        (1, "NOT JUDGED", "0 of 3 pairs finished, and a verdict needs 3"),
        (3, "WORSE", "3 of 3 runs diverged where the baseline's did not"),
    ],
)
def test_a_failed_arm_is_named_with_its_reason(found: Result, exit_code: int, quality: str, reported: str) -> None:
    found = fails(found, "fp16", exit_code, "the disk <b>is</b> full")
    assert found.failed
    assert (cells(found, "fp16")["throughput"], cells(found, "fp16")["quality"]) == ("not measured", quality)
    assert cells(found, "bf16")["quality"] == "EQUIVALENT"
    said = sentences(found)
    assert "fp16, seeds 0, 1, 2, failed: the disk <b>is</b> full" in said
    assert f"fp16: validation loss: {quality}; {reported}." in said
    worse, not_judged = f"its validation loss is worse: {reported}.", f"{quality}: validation loss ({reported})."
    assert lead(found)[1] == f"fp16: {worse if quality == 'WORSE' else not_judged}"
    assert "the disk &lt;b&gt;is&lt;/b&gt; full" in write_report(found, ["x"])[0].read_text()


def test_when_all_failed_there_is_still_a_report(found: Result) -> None:
    for label in ("fp32", "bf16", "fp16", "null"):
        found = fails(found, label, 2, "no such file")
    files = write_report(found, ["compare"])
    assert [file.name for file in files] == ["report.html", "report.md"]
    assert "bf16, seeds 0, 1, 2, failed: no such file" in files[1].read_text()
    assert "nan" not in files[0].read_text()


def test_the_files_of_a_comparison_of_thirty_runs(tmp_path: Path) -> None:
    found = result(tmp_path, ["fp32", "tf32", "bf16", "fp16", "compiled"], 5)
    files = write_report(found, ["python", "scripts/compare.py", "arms=[fp32,bf16]"])
    assert {file.name for file in files} == {
        *("report.html", "report.md", "loss.png", "speed.png", "memory.png", "answers.png")
    }
    assert all(file.stat().st_size for file in files)
    html, markdown = (file.read_text() for file in files[:2])
    assert html.count("<svg") == 4
    assert '<tr><th scope="row">bf16</th><td class="good">EQUIVALENT</td>' in html
    assert "    python scripts/compare.py 'arms=[fp32,bf16]'\n" in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert (len(lines), {line.count("|") for line in lines}) == (2 + 6, {len(HEAD) + 1})
    assert "](speed.png)" in markdown
    assert "commit 0123456789" in markdown
