"""Comparisons of recipes: what is planned, what is kept, speed and memory, and the report."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from evidence.comparison.command import planned
from evidence.comparison.compare import ComparisonPlan, Result, check_arms, compare
from evidence.comparison.judge import ArmResult, judge, losses
from evidence.comparison.report import _cost, cost_rows, lead, notes, quality_rows, report, write_report
from evidence.runs import Arm, Outcome, Runner, _last_error, cpu_share_of_others, merge_overrides
from mantissa.display import columns
from mantissa.step.ledger import CATEGORIES
from mantissa.verdict import compare as engine
from mantissa.verdict.shell import Ended
from mantissa.verdict.statistics import EQUIVALENT, WORSE, Interval
from trainer.errors import UserError
from trainer.files import in_use

TINY = ["recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "data.samples=64"]
PAIR = "arms=fp32,bf16"
FP32, BF16 = Arm("fp32", ("precision=fp32",)), Arm("bf16", ("precision=bf16",))
STEPS = range(50, 2001, 50)


def ended(
    runs: Path,
    arm: str,
    seed: int,
    steps: Sequence[int],
    losses: Sequence[float | None],
    ledger: dict[str, int] | None = None,
    **summary: Any,
) -> Outcome:
    """Write a run folder as train.py leaves it, and return its outcome; a loss of None was not finite."""
    run = runs / f"{arm}-s{seed}"
    run.mkdir(parents=True)
    lines = [{"step": step, "time": 0.0, "valid/loss": loss} for step, loss in zip(steps, losses, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {
        "status": "FINISHED",
        "final": {"valid/loss": losses[-1]},
        "unit": "samples",
        "units_per_s": 100.0,
        "step_time_s": 0.1,
        "peak_memory_bytes": sum((ledger or {}).values()) or None,
        "hardware": {"device": "cpu"},
        "skipped_steps": 0,
        "not_timed": None,
    }
    (run / "summary.json").write_text(json.dumps(common | summary))
    return Outcome(arm, seed, run, 0, summary=common | summary)


# --- what is planned ---


def test_a_precision_or_arm_that_is_named_again_has_other_seeds() -> None:
    comparison = planned(["recipe=gpt2", "arms=[fp32,bf16,fp32]", "steps=20"])
    assert [(arm.label, arm.overrides, arm.seed_shift) for arm in comparison.arms] == [
        ("fp32", ("precision=fp32",), 0),
        ("bf16", ("precision=bf16",), 0),
        ("fp32-2", ("precision=fp32",), 1000),
    ]
    assert (comparison.baseline, comparison.seeds, comparison.margin) == ("fp32", [0, 1, 2, 3, 4], 0.003)
    assert comparison.common == ["recipe=gpt2", "steps=20"]
    assert comparison.folder == Path.cwd() / "outputs" / "compare"
    check_arms(planned([*TINY, "arms=fp32,fp32", "steps=40"]))


def test_arms_of_any_overrides() -> None:
    arms = ["arms=fp32", "arm.fast=compile=default", 'arm.slow="loader=plain clip=none"', "baseline=slow"]
    comparison = planned([*arms, "seeds=[3,7]", "margin=0.01", "output_dir=there", "name=mine"])
    assert [arm.label for arm in comparison.arms] == ["slow", "fp32", "fast"]  # the baseline comes first
    assert comparison.arms[0].overrides == ("loader=plain", "clip=none")
    folder = Path.cwd() / "there" / "compare" / "mine"
    assert (comparison.seeds, comparison.margin, comparison.folder) == ([3, 7], 0.01, folder)


def test_an_arm_may_change_what_all_arms_have_and_is_compared_after_auto_is_resolved() -> None:
    configs = check_arms(planned([*TINY, PAIR, "precision=fp16", "clip=norm", "arm.free=clip=none batch_size=8"]))
    assert (configs["fp32"].precision.mode, configs["free"].precision.mode) == ("fp32", "fp16")
    assert (configs["bf16"].clip.kind, configs["free"].clip.kind) == ("norm", "none")
    assert merge_overrides(["a=1", "+b=2"], ["b=3"], ["c=4", "a=5"]) == ["a=5", "b=3", "c=4"]
    chosen = configs["fp32"].steps
    with pytest.raises(UserError, match="arm b is the same as the baseline a"):
        check_arms(planned([*TINY, 'arm.a="precision=fp32"', f'arm.b="precision=fp32 steps={chosen}"']))


# --- what is run and kept ---


class Launches:
    """In the place of processes: exit codes by run, and the loss that each leaves."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.losses: dict[str, float] = {}
        self.ran: list[str] = []

    def __call__(self, command: list[str], log: Path, stop_s: float) -> Ended:
        given = dict(text.split("=", 1) for text in command[2:])
        name = given["run_name"]
        self.ran.append(name)
        folder = log.parent
        if not (code := self.codes.get(name, 0)):
            ended(folder, *_pair(name), [10], [self.losses.get(name, 2.0)])
        return Ended(code, 1.0, "error: the disk is full\n" if code else "")


def _pair(name: str) -> tuple[str, int]:
    label, _, seed = name.rpartition("-s")
    return label, int(seed)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr("evidence.runs.shell.run", found)
    monkeypatch.setattr("evidence.runs.cpu_share_of_others", lambda: 0.0)
    return found


def test_a_run_is_train_py_with_overrides_in_a_fresh_process(tmp_path: Path) -> None:
    """Nothing is added to what is trained: the same script, and every difference is on its command line."""
    runner = Runner(tmp_path / "it's", ["steps=20", "precision=fp32", "checkpoint=none"])
    command = runner.command(Arm("bf16-2", ("precision=bf16",), 1000), 3)
    assert command[1] == str(Path(__file__).parents[2] / "scripts" / "train.py")
    assert command[2:] == [
        *("steps=20", "precision=bf16", "checkpoint=none", "seed=1003", "run_name=bf16-2-s3"),
        f"output_dir='{tmp_path}/it\\'s/runs'",
    ]


@pytest.mark.parametrize(
    ("code", "first", "again"),
    [
        (1, "a0 b0 c0 c1 b1 a1", "b0"),
        (3, "a0 b0 c0 c1 b1 a1", ""),
        (2, "a0 b0 c0 c1 a1", "b0 b1"),
        (4, "a0 b0 c0 c1 a1", "b0 b1"),
    ],
)
def test_one_failed_arm_does_not_lose_the_others(
    tmp_path: Path, launches: Launches, code: int, first: str, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another seed would not change is not tried with it; what diverged would diverge again."""
    arms = [Arm(label, ()) for label in "abc"]
    launches.codes["b-s0"] = code
    outcomes = Runner(tmp_path).run_all(arms, [0, 1])
    assert [name.replace("-s", "") for name in launches.ran] == first.split()
    assert [outcome.finished for outcome in outcomes] == [name != "b-s0" for name in launches.ran]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith(f"  2/6  b s0  failed with exit code {code}: the disk is full  1.0 s  eta 0:0")
    launches.ran.clear()
    launches.codes.clear()
    assert [outcome.ended for outcome in Runner(tmp_path).run_all(arms, [0, 1])] == [True] * 6
    assert [name.replace("-s", "") for name in launches.ran] == again.split()
    assert capsys.readouterr().out.count("already done") == 6 - len(again.split())


def test_a_comparison_continues_and_neither_plan_nor_seeds_may_change(tmp_path: Path, launches: Launches) -> None:
    """And no file of it has a password."""
    uri = "tracking.uri=http://me:s3cret@host"
    arguments = [*TINY, PAIR, uri, f"arm.other={uri} clip=norm", "steps=40", f"output_dir={tmp_path}", "name=it"]
    launches.losses = {f"bf16-s{seed}": 2 + 0.0008 * (-1) ** seed for seed in range(6)}
    configs = check_arms(planned(arguments))

    def looked(*more: str) -> Result:
        return compare(planned([*arguments, *more]), configs)

    assert [len(look["seeds"]) for look in looked("seeds=4").looks] == [4]
    assert len(launches.ran) == 3 * 4
    found = looked("seeds=0,1,2,3,5")
    assert [len(look["seeds"]) for look in found.looks] == [4, 5]
    assert (len(launches.ran), found.arms[1].quality.look) == (3 * 5, 2)
    assert looked("seeds=0,1,2,3,5").looks == found.looks
    assert notes(found)[-1].startswith("Look 2, 5 seeds: α = 0.5 %.")
    with pytest.raises(UserError, match=r"seed 5 was judged before and is left out now; keep all seeds.* name="):
        looked("seeds=4")
    with pytest.raises(UserError, match=r"holds another comparison, with another margin .*; give this one a name="):
        looked("seeds=0,1,2,3,5", "margin=1%")
    with in_use(found.plan.folder), pytest.raises(UserError, match="in use by another process"):
        looked("seeds=0,1,2,3,5")  # it would remove the other's unfinished runs
    assert uri in found.plan.common  # for the runs
    files = [*found.plan.folder.glob("*.json*"), *write_report(found)[:2]]
    assert all("s3cret" not in file.read_text() for file in files)


def test_the_load_of_others_is_that_of_the_cpus_that_runs_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.runs.psutil.cpu_percent", lambda *_, **__: [90.0, 10.0, 30.0])
    monkeypatch.setattr("evidence.runs.os.sched_getaffinity", lambda _: {1, 2})
    assert cpu_share_of_others() == pytest.approx(0.2)


def test_an_error_is_found_behind_what_was_still_buffered() -> None:
    assert _last_error(Ended(1, 1.0, "step 1  loss 2\nstep 2  loerror: the gradients are not finite\nss 3\n")) == (
        "the gradients are not finite"
    )
    assert _last_error(Ended(1, 1.0, "one\n\ntwo\nthree\nfour\n")) == "two / three / four"


# --- speed and memory ---


class Runs:
    """Writes run folders as train.py leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: list[Outcome] = []

    def add(
        self, arm: Arm, seed: int, losses: Sequence[float | None] = (3.0, 2.5, 2.0), peak_bytes: int = 0, **summary: Any
    ) -> None:
        ledger = {"weights": peak_bytes} if peak_bytes else None
        self.outcomes.append(ended(self.folder, arm.label, seed, (10, 20, 30), losses, ledger, **summary))

    def fail(self, arm: Arm, seed: int, exit_code: int, why: str = "") -> None:
        self.outcomes.append(Outcome(arm.label, seed, self.folder / f"{arm.label}-s{seed}", exit_code, why))

    def judged(self, *arms: Arm) -> dict[str, ArmResult]:
        return {result.label: result for result in judged(list(arms or (FP32, BF16)), self.outcomes)}


def judged(arms: list[Arm], outcomes: list[Outcome]) -> list[ArmResult]:
    return judge(arms, outcomes, engine.judge(losses(arms, outcomes), 0.003), 0.003, 1)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_the_speed_of_fp32_arithmetic_is_compared_with_no_other_formats(runs: Runs) -> None:
    """Two arms that both use it can be compared: then it says something about what else differs."""
    why, compiled = "bf16 matmuls: fp32 arithmetic", Arm("compiled", ("precision=bf16", "compile=default"))
    for seed in range(3):
        runs.add(FP32, seed, peak_bytes=100)
        runs.add(BF16, seed, peak_bytes=60, units_per_s=80.0, not_timed=why)
        runs.add(compiled, seed, units_per_s=160.0, not_timed=why)
    found = runs.judged()
    assert (found["bf16"].speed.ratio, found["bf16"].not_timed, found["fp32"].not_timed) == (None, why, "")
    assert found["bf16"].memory.ratio
    assert found["bf16"].memory.ratio.mean == pytest.approx(0.6)
    both = runs.judged(BF16, compiled)["compiled"]
    assert both.speed.ratio
    assert both.speed.ratio.mean == pytest.approx(2)


def test_neither_speed_nor_memory_of_what_is_emulated_is_compared(runs: Runs) -> None:
    """Not even with another emulated format."""
    why = "emulated: quality only, no speed"
    for seed in range(3):
        runs.add(FP32, seed, peak_bytes=100, not_timed=why)
        runs.add(BF16, seed, peak_bytes=60, units_per_s=80.0, not_timed=why)
    bf16 = runs.judged()["bf16"]
    assert (bf16.speed.ratio, bf16.speed.why, bf16.memory.ratio, bf16.memory.why) == (None, why, None, why)


def test_ratios_are_of_runs_of_the_same_seed(runs: Runs) -> None:
    """The machine slowed down fourfold between the seeds, which the ratios must not see; the order is shuffled."""
    runs.add(BF16, 1, units_per_s=52.5)
    runs.add(FP32, 0, units_per_s=100.0)
    runs.add(FP32, 1, units_per_s=25.0)
    runs.add(BF16, 0, units_per_s=190.0)
    runs.fail(FP32, 2, 1, "the disk is full")
    runs.add(BF16, 2, units_per_s=1e6)
    found = runs.judged()
    speed = found["bf16"].speed
    assert sorted(speed.ratios) == pytest.approx([1.9, 2.1])
    assert speed.ratio is not None
    assert speed.ratio.mean == pytest.approx(stats.gmean([1.9, 2.1]))
    assert speed.why == found["bf16"].quality.why == "2 of 3 pairs finished, and a verdict needs 3"
    assert (found["fp32"].failures, found["fp32"].speed.ratio, found["fp32"].quality.verdict) == (
        {2: "the disk is full"},
        None,
        "",
    )


def test_a_last_loss_that_is_not_finite_is_worse(runs: Runs) -> None:
    for seed in range(3):
        runs.add(FP32, seed)
        runs.add(BF16, seed, losses=(3.0, 2.5, None))
    assert runs.judged()["bf16"].quality.verdict == WORSE


def test_what_was_not_measured_is_none_and_never_0(runs: Runs) -> None:
    for seed in (2, 3):
        runs.add(FP32, seed, units_per_s=None)
        runs.add(BF16, seed)
    for arm in runs.judged().values():
        assert (arm.memory.value, arm.memory.values, arm.speed.ratio) == (None, [], None)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_while_others_used_the_cpus_a_speed_is_not_judged_and_the_loss_is(runs: Runs, device: str) -> None:
    """Of a GPU the CPUs say little."""
    for seed in range(3):
        for arm, share in ((FP32, 0.02), (BF16, 0.3)):
            runs.add(arm, seed, hardware={"device": device})
            runs.outcomes[-1].others_cpu = share
    bf16 = runs.judged()["bf16"]
    busy = "other processes used 30% of the CPUs; measure again on a quiet machine, with another output_dir=…"
    assert (bf16.speed.why, bf16.quality.verdict) == ("" if device == "cuda:0" else busy, EQUIVALENT)


def test_memory_is_the_peak_of_the_summary(runs: Runs) -> None:
    for seed in (0, 1):
        runs.add(FP32, seed, peak_bytes=4_000)
        runs.add(BF16, seed, peak_bytes=3_500, skipped_steps=2)
    found = runs.judged()
    assert found["fp32"].memory.values == [4_000, 4_000]
    assert found["bf16"].memory.values == [3_500, 3_500]
    assert found["bf16"].skipped_steps == 4


# --- the report ---


@pytest.fixture
def reported(tmp_path: Path) -> Callable[..., Result]:
    """A comparison of these arms, the first of which is the baseline."""

    def make(labels: list[str], wide: str = "", failed: tuple[str, int, str] | None = None) -> Result:
        generator = np.random.default_rng(0)
        arms = [Arm(label, (f"precision={label}",)) for label in labels]
        outcomes = []
        for seed, (number, arm) in itertools.product(range(3), enumerate(arms)):
            curve = [2 + 2 * math.exp(-step / 400) + generator.normal(0, 0.001) for step in STEPS]
            speed = 1e4 * (1 + number) * generator.normal(1, 0.02)
            facts = {"units_per_s": speed, "not_timed": wide if number else None}
            ledger = dict.fromkeys(CATEGORIES, 2**20 * (10 + number))
            run = ended(tmp_path / "runs", arm.label, seed, STEPS, curve, ledger, **facts)
            if failed and failed[0] in (arm.label, "all"):
                run.exit_code, run.failure = failed[1:]
            outcomes.append(run)
        plan = ComparisonPlan(arms, [0, 1, 2], output_dir=tmp_path, name="a<b")
        facts = {
            "command": "python scripts/compare.py 'arms=[fp32,bf16]'",
            "recipe": "gpt2",
            "unit": "tokens",
            "steps": 2000,
            "hardware": {"name": "A test's CPU", "device": "cpu", "threads": 2},
            "versions": {"torch": "2.15.0"},
            "git": {"commit": "0123456789abcdef", "dirty": "false"},
        }
        return Result(plan, judged(arms, outcomes), outcomes, facts, [{"seeds": plan.seeds, "ended": []}])

    return make


NOT_REACHED = "The final loss of fp32 is not reached."
EQUAL = "To the final loss of fp32: no clear difference in steps, no clear difference in time."


def cells(found: Result, arm: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    for table in (quality_rows(found), cost_rows(found)):
        head, *below = table
        rows |= next(dict(zip(head, row, strict=True)) for row in below if row[0].startswith(arm))
    return rows


def test_every_number_is_told_once(reported: Callable[..., Result]) -> None:
    found = reported(["fp32", "bf16"])
    base, bf16 = cells(found, "fp32"), cells(found, "bf16")
    assert (base["quality"], float(base["valid. loss"])) == ("(baseline)", pytest.approx(2.01, abs=0.01))
    assert re.fullmatch(r"[\d,]+ tokens/s ± \d+\.\d %", base["throughput"])
    assert (base["speedup"], base["difference"]) == ("1", "")
    assert 1700 < int(base["steps to equal loss"]) < 2000
    assert base["time to equal loss"].endswith(" s")
    assert re.fullmatch(r"[01]\.\d\dx \[0\.\d\d, 1\.\d\d\]", bf16["steps to equal loss"])
    assert re.fullmatch(r"[12]\.\d\dx \[1\.\d\d, 2\.\d\d\]", bf16["speedup"])
    assert (bf16["peak memory"], bf16["memory ratio"], bf16["quality"]) == ("88.0 MiB", "1.100x", "EQUIVALENT")
    assert re.fullmatch(r"[+-]\d\.\d\d % \[[+-]\d\.\d\d, [+-]\d\.\d\d\] \(9\d %\)", bf16["difference"])
    low, high = map(float, re.findall(r"[+-]\d\.\d\d", bf16["difference"])[1:])
    assert -0.3 < low < high < 0.3  # the interval beside a verdict is the one that decided
    same, faster = "its validation loss is the same within 0.3 %.", "as fast as fp32 and needs"
    assert lead(found) == [f"bf16 is {float(bf16['speedup'][:4]):.2g}x {faster} 10 % more memory; {same} {EQUAL}"]
    assert re.fullmatch(r"[01]\.\d\dx", cost_rows(found)[-1][1])
    text = report(found).text()
    assert (
        max(len(line) for rows in (quality_rows(found), cost_rows(found)) for line in columns(rows).splitlines()) <= 100
    )
    assert [text.count(bf16[name]) for name in ("difference", "speedup", "throughput")] == [1, 1, 1]
    assert _cost("speed", Interval(0.415, 0.071, 2.421, 0.95, 3)) == ("shows no clear difference in speed", "from")


def test_a_speed_in_fp32_arithmetic_is_said_not_to_be_the_formats(reported: Callable[..., Result]) -> None:
    why = "bf16 matmuls: fp32 arithmetic, this CPU has no bf16 instructions"
    found = reported(["fp32", "bf16"], wide=why)
    bf16 = cells(found, "bf16")
    assert (bf16["speedup"], bf16["throughput"].endswith(" (fp32 arithmetic)")) == ("NOT JUDGED", True)
    assert lead(found)[0].endswith(f" no clear difference in steps. NOT JUDGED: speed ({why}).")
    assert bf16["time to equal loss"] == "NOT JUDGED"


@pytest.mark.parametrize(
    ("exit_code", "quality", "reason"),
    [
        (1, "NOT JUDGED", "0 of 3 pairs finished, and a verdict needs 3"),
        (3, "WORSE", "3 of 3 runs diverged where the baseline's did not"),
    ],
)
def test_a_failed_arm_is_named_with_its_reason(
    reported: Callable[..., Result], exit_code: int, quality: str, reason: str
) -> None:
    found = reported(["fp32", "bf16", "fp16"], failed=("fp16", exit_code, "the disk <b>is</b> full"))
    assert found.failed
    assert (cells(found, "fp16")["throughput"], cells(found, "fp16")["quality"]) == ("not measured", quality)
    assert cells(found, "bf16")["quality"] == "EQUIVALENT"
    assert "fp16, seeds 0, 1, 2, failed: the disk <b>is</b> full" in notes(found)
    worse, not_judged = (
        f"its validation loss is worse: {reason}. {NOT_REACHED}",
        f"{quality}: validation loss ({reason}).",
    )
    assert lead(found)[1] == f"fp16: {worse if quality == 'WORSE' else not_judged}"
    assert "the disk &lt;b&gt;is&lt;/b&gt; full" in write_report(found)[0].read_text()


def test_the_files_of_a_comparison(reported: Callable[..., Result]) -> None:
    found = reported(["fp32", "tf32", "bf16", "fp16", "compiled"])
    files = write_report(found)
    names = {"report.html", "report.txt", "loss.png", "answers.png"}
    assert {file.name for file in files} == names
    assert all(file.stat().st_size for file in files)
    html = files[0].read_text()
    assert html.count("<svg") == 2
    assert '<tr><th scope="row">bf16</th><td class="good">EQUIVALENT</td>' in html
    assert "commit 0123456789" in html
    assert "<h1>tf32 and bf16 and fp16 and compiled against fp32, gpt2</h1>" in html


def test_when_all_failed_there_is_still_a_report(reported: Callable[..., Result]) -> None:
    files = write_report(reported(["fp32", "bf16"], failed=("all", 2, "no such file")))
    assert [file.name for file in files] == ["report.html", "report.txt"]
    assert "bf16, seeds 0, 1, 2, failed: no such file" in files[1].read_text()
