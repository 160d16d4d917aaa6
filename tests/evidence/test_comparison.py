"""Comparisons of recipes: what is planned, what continues, and the report."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evidence.comparison.command import planned
from evidence.comparison.compare import COSTS, ComparisonPlan, Result, check_arms, compare
from evidence.comparison.report import _cost, cost_rows, lead, notes, quality_rows, report, write_report
from evidence.runs import Arm, Runner, merge_overrides
from mantissa.display import columns
from mantissa.verdict.judge import judge
from mantissa.verdict.runs import Run, Store, by_arm
from mantissa.verdict.statistics import Interval
from trainer.errors import UserError
from trainer.files import in_use

TINY = ["recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "data.samples=64"]
PAIR = "arms=fp32,bf16"

# --- what is planned ---


def test_a_precision_or_arm_that_is_named_again_has_other_seeds() -> None:
    plan = planned(["recipe=gpt2", "arms=[fp32,bf16,fp32]", "steps=20"])
    assert [(arm.label, arm.overrides, arm.seed_shift) for arm in plan.arms] == [
        ("fp32", ("precision=fp32",), 0),
        ("bf16", ("precision=bf16",), 0),
        ("fp32-2", ("precision=fp32",), 1000),
    ]
    assert (plan.baseline, plan.seeds, plan.margin) == ("fp32", [0, 1, 2, 3, 4], 0.003)
    assert plan.common == ["recipe=gpt2", "steps=20"]
    assert plan.folder == Path.cwd() / "outputs" / "compare"
    check_arms(planned([*TINY, "arms=fp32,fp32", "steps=40"]))


def test_arms_of_any_overrides() -> None:
    arms = ["arms=fp32", "arm.fast=compile=default", 'arm.slow="loader=plain clip=none"', "baseline=slow"]
    plan = planned([*arms, "seeds=[3,7]", "margin=0.01", "output_dir=there", "name=mine"])
    assert [arm.label for arm in plan.arms] == ["slow", "fp32", "fast"]  # the baseline comes first
    assert plan.arms[0].overrides == ("loader=plain", "clip=none")
    assert (plan.seeds, plan.margin, plan.folder) == ([3, 7], 0.01, Path.cwd() / "there" / "compare" / "mine")


def test_an_arm_may_change_what_all_arms_have_and_is_compared_after_auto_is_resolved() -> None:
    configs = check_arms(planned([*TINY, PAIR, "precision=fp16", "clip=norm", "arm.free=clip=none batch_size=8"]))
    assert (configs["fp32"].precision.mode, configs["free"].precision.mode) == ("fp32", "fp16")
    assert (configs["bf16"].clip.kind, configs["free"].clip.kind) == ("norm", "none")
    assert merge_overrides(["a=1", "+b=2"], ["b=3"], ["c=4", "a=5"]) == ["a=5", "b=3", "c=4"]
    chosen = configs["fp32"].steps
    with pytest.raises(UserError, match="arm b is the same as the baseline a"):
        check_arms(planned([*TINY, 'arm.a="precision=fp32"', f'arm.b="precision=fp32 steps={chosen}"']))
    with pytest.raises(UserError, match="arm again is the same as bf16"):
        check_arms(planned([*TINY, PAIR, "arm.again=precision=bf16"]))


# --- what is run and kept ---


def test_a_comparison_continues_and_neither_plan_nor_seeds_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no file of it has a password."""
    uri = "tracking.uri=http://me:s3cret@host"
    arguments = [*TINY, PAIR, uri, f"arm.other={uri} clip=norm", "steps=40", f"output_dir={tmp_path}", "name=it"]
    configs = check_arms(planned(arguments))
    ran: list[str] = []

    def run(runner: Runner, arm: Arm, seed: int) -> Run:
        ran.append(f"{arm.label}-s{seed}")
        loss = 2 + 0.0008 * (-1) ** seed * (arm.label == "bf16")
        return Run(arm.label, seed, {"loss": loss, "speed": 1.0, "skipped": 0}, 1.0)

    def looked(*more: str) -> Result:
        return compare(planned([*arguments, *more]), configs["fp32"])

    monkeypatch.setattr(Runner, "run", run)
    assert [len(look["seeds"]) for look in looked("seeds=4").looks] == [4]
    assert len(ran) == 3 * 4
    found = looked("seeds=0,1,2,3,5")
    assert [len(look["seeds"]) for look in found.looks] == [4, 5]
    assert (len(ran), found.rows["bf16"].quality.look) == (3 * 5, 2)
    assert looked("seeds=0,1,2,3,5").looks == found.looks
    assert notes(found)[-1].startswith("Look 2, 5 seeds: α = 0.5 %.")
    with pytest.raises(UserError, match=r"seed 5 was judged before and is left out now; keep all seeds.* name="):
        looked("seeds=4")
    with pytest.raises(UserError, match=r"holds another comparison, with another margin .*; give this one a name="):
        looked("seeds=0,1,2,3,5", "margin=1%")
    with monkeypatch.context() as edited:
        edited.setattr("evidence.comparison.compare.code_digest", lambda recipe_path: "edited")
        with pytest.raises(UserError, match="holds another comparison, with another code"):
            looked("seeds=0,1,2,3,5")
    with in_use(found.plan.folder), pytest.raises(UserError, match="in use by another process"):
        looked("seeds=0,1,2,3,5")  # it would remove the other's unfinished runs
    assert uri in found.plan.common  # for the runs
    write_report(found)
    files = [file for file in found.plan.folder.iterdir() if file.suffix in (".json", ".jsonl", ".html", ".txt")]
    assert len(files) == 4
    assert all("s3cret" not in file.read_text() for file in files)


# --- the report ---


@pytest.fixture
def reported(tmp_path: Path) -> Callable[..., Result]:
    """A comparison of these arms, the first of which is the baseline; each is faster and larger than the one before."""

    def make(labels: list[str], wide: str = "", failed: str = "", why: str = "", diverged: bool = False) -> Result:
        generator, runs = np.random.default_rng(0), []
        for seed, (number, label) in itertools.product(range(3), enumerate(labels)):
            steps = list(range(50, 2001, 50))
            curve = [2 + 2 * math.exp(-step / 400) + generator.normal(0, 0.001) for step in steps]
            speed = 1e4 * (1 + number) * generator.normal(1, 0.02)
            values = {"loss": curve[-1], "speed": speed, "step_s": 0.1, "memory": 2**23 * (10 + number), "skipped": 2}
            run = Run(label, seed, values, curve=(steps, curve), arithmetic=wide if number else "")
            if failed in (label, "all"):
                run = Run(label, seed, {"loss": None} if diverged else {}, failure=why)
            runs.append(run)
        facts = {
            "command": "python scripts/compare.py 'arms=[fp32,bf16]'",
            "recipe": "gpt2",
            "unit": "tokens",
            "steps": 2000,
            "hardware": {"name": "A test's CPU", "device": "cpu", "threads": 2},
            "versions": {"torch": "2.15.0"},
            "git": {"commit": "0123456789abcdef", "dirty": "false"},
        }
        arms = [Arm(label, (f"precision={label}",)) for label in labels]
        plan = ComparisonPlan(arms, [0, 1, 2], 0.003, [], tmp_path, "a<b")
        of_arms = by_arm(labels, runs)
        rows = judge(of_arms, plan.margin, Store(), COSTS)
        return Result(plan, of_arms, rows, facts, [{"seeds": plan.seeds, "ended": []}])

    return make


NOT_REACHED = "The final loss of fp32 is not reached."
EQUAL = "To the final loss of fp32: no clear difference in steps, no clear difference in time."


def cells(found: Result, arm: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    for table in (quality_rows(found), cost_rows(found)):
        head, *below = table
        rows |= next(dict(zip(head, row, strict=True)) for row in below if row[0].startswith(arm))
    return rows


def test_every_number_is_there_once(reported: Callable[..., Result]) -> None:
    found = reported(["fp32", "bf16"])
    base, bf16 = cells(found, "fp32"), cells(found, "bf16")
    assert (base["quality"], float(base["valid. loss"])) == ("(baseline)", pytest.approx(2.01, abs=0.01))
    assert (base["speedup"], base["difference"]) == ("1", "")
    assert 1700 < int(base["steps to equal loss"]) < 2000
    assert base["time to equal loss"].endswith(" s")
    assert (bf16["peak memory"], bf16["memory ratio"], bf16["quality"]) == ("88.0 MiB", "1.100x", "EQUIVALENT")
    low, high = map(float, re.findall(r"[+-]\d\.\d\d", bf16["difference"])[1:])
    assert -0.3 < low < high < 0.3  # the interval beside a verdict is the one that decided
    same, faster = "its validation loss is the same within 0.3 %.", "as fast as fp32 and needs"
    assert lead(found) == [f"bf16 is {float(bf16['speedup'][:4]):.2g}x {faster} 10 % more memory; {same} {EQUAL}"]
    assert "bf16 skipped 6 of 6,000 steps for an overflow." in notes(found)
    text = report(found).text()
    tables = (columns(rows) for rows in (quality_rows(found), cost_rows(found)))
    assert max(len(line) for table in tables for line in table.splitlines()) <= 100
    assert [text.count(bf16[name]) for name in ("difference", "speedup", "throughput")] == [1, 1, 1]
    assert _cost("speed", Interval(0.415, 0.071, 2.421, 0.95, 3)) == ("shows no clear difference in speed", "from")


def test_a_speed_in_fp32_arithmetic_is_said_not_to_be_the_formats(reported: Callable[..., Result]) -> None:
    why = "bf16 matmuls: fp32 arithmetic, this CPU has no bf16 instructions"
    found = reported(["fp32", "bf16"], wide=why)
    bf16 = cells(found, "bf16")
    assert (bf16["speedup"], bf16["throughput"].endswith(" (fp32 arithmetic)")) == ("NOT JUDGED", True)
    assert lead(found)[0].endswith(f" no clear difference in steps. NOT JUDGED: speed ({why}).")
    assert bf16["time to equal loss"] == "NOT JUDGED"
    arms = [(arm["arithmetic"], arm["not_timed"], bool(arm["speed"]["ratio"])) for arm in found.to_dict()["arms"]]
    assert arms == [("", "", False), (why, why, False)]


@pytest.mark.parametrize(
    ("diverged", "quality", "reason"),
    [
        (False, "NOT JUDGED", "0 of 3 pairs finished, and a verdict needs 3"),
        (True, "WORSE", "3 of 3 runs diverged where the baseline's did not"),
    ],
)
def test_a_failed_arm_is_named_with_its_reason(
    reported: Callable[..., Result], diverged: bool, quality: str, reason: str
) -> None:
    found = reported(["fp32", "bf16", "fp16"], failed="fp16", why="the disk <b>is</b> full", diverged=diverged)
    assert found.failed
    assert (cells(found, "fp16")["throughput"], cells(found, "fp16")["quality"]) == ("not measured", quality)
    assert cells(found, "bf16")["quality"] == "EQUIVALENT"
    assert "fp16, seeds 0, 1, 2, failed: the disk <b>is</b> full" in notes(found)
    worse, open_ = f"its validation loss is worse: {reason}. {NOT_REACHED}", f"{quality}: validation loss ({reason})."
    assert lead(found)[1] == f"fp16: {worse if diverged else open_}"
    assert "the disk &lt;b&gt;is&lt;/b&gt; full" in write_report(found).read_text()


def test_a_mean_says_of_how_many_runs_and_a_loss_that_training_raised_is_named(
    reported: Callable[..., Result],
) -> None:
    found = reported(["fp32", "bf16"])
    tuned = {seed: replace(run, curve=((0, 50), (0.5, 2.0))) for seed, run in found.runs["bf16"].items()}
    found.runs = {**found.runs, "bf16": tuned | {0: replace(tuned[0], values=tuned[0].values | {"loss": None})}}
    assert re.fullmatch(r"\d\.\d{4} \(2 of 3\)", cells(found, "bf16")["valid. loss"])
    assert re.fullmatch(r"\d\.\d{4}", cells(found, "fp32")["valid. loss"])
    assert [note for note in notes(found) if "before training" in note] == [
        "bf16: the final loss is higher than before training in 3 of 3 runs."
    ]


def test_the_files_of_a_comparison(reported: Callable[..., Result]) -> None:
    """When all runs failed there is still a report."""
    page = write_report(reported(["fp32", "bf16"], failed="all", why="no such file"))
    assert {file.name for file in page.parent.iterdir()} == {"report.html", "report.txt"}
    assert "bf16, seeds 0, 1, 2, failed: no such file" in page.with_suffix(".txt").read_text()
    write_report(reported(["fp32", "tf32", "bf16", "fp16", "compiled"]))
    sizes = {file.name: file.stat().st_size for file in page.parent.iterdir()}
    assert sizes.keys() == {"report.html", "report.txt", "loss.png", "answers.png"}
    assert all(sizes.values())
    html = page.read_text()
    assert html.count("<svg") == 2
    assert '<tr><th scope="row">bf16</th><td class="good">EQUIVALENT</td>' in html
