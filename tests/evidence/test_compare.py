"""The comparison's command line: what is planned, in which order, and the error messages."""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from evidence.comparison.command import planned
from evidence.comparison.compare import Result, check_arms, compare
from evidence.comparison.judge import judge
from evidence.comparison.report import sentences
from evidence.runs import Arm, Outcome, Runner, merged
from tests.evidence.ended import ended
from trainer.errors import UserError
from trainer.files import in_use, write_json

TINY = ["recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "data.samples=64"]
PAIR = "arms=fp32,bf16"


def test_the_defaults_are_the_issues() -> None:
    comparison = planned(["recipe=gpt2", "arms=[fp32,bf16,fp16]", "steps=20"])
    assert [(arm.label, arm.overrides, arm.seed_shift) for arm in comparison.arms] == [
        ("fp32", ("precision=fp32",), 0),
        ("bf16", ("precision=bf16",), 0),
        ("fp16", ("precision=fp16",), 0),
        ("null", ("precision=fp32",), 1000),
    ]
    assert (comparison.baseline, comparison.seeds, comparison.margin) == ("fp32", [0, 1, 2, 3, 4], 0.003)
    bare = planned(["recipe=gpt2", "arms=fp32,bf16,fp16", "steps=20", "seeds=0,1,2,3,4"])  # as zsh wants it
    assert bare == comparison
    assert comparison.common == ["recipe=gpt2", "steps=20"]
    assert comparison.folder == Path.cwd() / "outputs" / "compare"


def test_arms_of_any_overrides() -> None:
    arms = ["arms=fp32", "arm.fast=compile=default", 'arm.slow="loader=plain clip=none"', "baseline=slow"]
    comparison = planned([*arms, "seeds=[3,7]", "margin=0.01", "null=false", "output_dir=there", "name=mine"])
    assert [arm.label for arm in comparison.arms] == ["slow", "fp32", "fast"]  # the baseline comes first
    assert comparison.arms[0].overrides == ("loader=plain", "clip=none")
    assert comparison.arms[2].overrides == ("compile=default",)
    assert (comparison.seeds, comparison.margin, comparison.folder) == (
        [3, 7],
        0.01,
        Path.cwd() / "there" / "compare" / "mine",
    )


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["arms=[fp32,bf61]"], ("arms: bf61 is not a precision", "did you mean 'bf16'?", 'arm.<name>="key=value')),
        (["arms=[fp32,fp32]"], ("the arm fp32 appears twice", "arm.<name>=")),
        ([PAIR, "arm.null=clip=norm"], ("the label null is reserved for the null arm",)),
        ([PAIR, "baseline=pf32"], ("baseline=pf32 is not among the arms (fp32, bf16)", "did you mean 'fp32'?")),
        ([PAIR, "seeds=1"], ("seeds=1 must be two or more different numbers from 0 to 999", "use seeds=5")),
        ([PAIR, "seeds=[1,1]"], ("different numbers",)),
        ([PAIR, "seeds=[0,1000]"], ("from 0 to 999",)),
        ([PAIR, "seed=3"], ("seed=3 has no effect: set for every run", "seeds=5")),
        ([PAIR, "arm.x=output_dir=elsewhere"], ("output_dir=elsewhere has no effect: set for every run",)),
        ([PAIR, "margin=0"], ("margin=0 must be a number above 0", "margin=0.3%")),
        ([PAIR, "name=a/b"], ("name=a/b must be the name of a folder",)),
    ],
)
def test_mistakes_in_the_options(arguments: list[str], reported: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        planned(arguments)
    assert caught.value.exit_code == 2
    for words in reported:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["arm.a=precision=fp32", "arm.b=clip=none batch_size=4"], ("arm b is the same as the baseline a",)),
        ([PAIR, "arm.typo=precison=bf16"], ("arm typo: precison is not a key", "did you mean 'precision'?")),
        ([PAIR, "optimizer.lr=-1"], ("arm fp32: ", "optimizer.lr=-1")),
        ([PAIR, "clip=none,norm"], ("arm fp32: clip=none,norm has several values; use one arm per value",)),
        ([PAIR, "steps=10"], ("steps=10 leaves no steps to measure the speed", "log_every=10", "use steps=40")),
    ],
)
def test_mistakes_in_the_arms(arguments: list[str], reported: tuple[str, ...]) -> None:
    comparison = planned([*TINY, *arguments, "null=false"])
    with pytest.raises(UserError) as caught:
        check_arms(comparison)
    for words in reported:
        assert words in str(caught.value)


def test_arms_are_compared_after_auto_is_resolved() -> None:
    pair = [*TINY, 'arm.a="precision=fp32"', 'arm.b="precision=fp32 steps=STEPS"']
    configs = check_arms(planned([argument.replace("STEPS", "40") for argument in pair]))
    chosen = configs["a"].steps
    assert (type(chosen), configs["b"].steps) == (int, 40)
    with pytest.raises(UserError, match="arm b is the same as the baseline a"):
        check_arms(planned([argument.replace("STEPS", str(chosen)) for argument in pair]))


def test_an_arm_may_change_what_all_arms_have() -> None:
    """Hydra itself refuses a group that is chosen twice."""
    comparison = planned([*TINY, PAIR, "precision=fp16", "clip=norm", "arm.free=clip=none batch_size=8"])
    configs = check_arms(comparison)
    assert (configs["fp32"].precision.mode, configs["free"].precision.mode) == ("fp32", "fp16")
    assert (configs["bf16"].clip.kind, configs["free"].clip.kind) == ("norm", "none")
    assert (configs["bf16"].batch_size, configs["free"].batch_size) == (4, 8)
    assert merged(["a=1", "+b=2"], ["b=3"], ["c=4", "a=5"]) == ["a=5", "b=3", "c=4"]


def test_a_run_is_train_py_with_overrides_in_a_fresh_process(tmp_path: Path) -> None:
    """Nothing is added to what is trained: the same script, and every difference is on its command line."""
    runner = Runner(tmp_path / "it's", ["steps=20", "precision=fp32", "checkpoint=none"])
    command = runner.command(Arm("null", ("precision=bf16",), 1000), 3)
    script = Path(__file__).parents[2] / "scripts" / "train.py"
    assert command[:2] == [sys.executable, str(script)]
    assert command[2:] == [
        *("steps=20", "precision=bf16", "checkpoint=none", "seed=1003", "run_name=null-s3"),
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
    tmp_path: Path, code: int, first: str, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another seed would not change is not tried with it; what diverged would diverge again."""
    arms, codes, ran = [Arm(label, ()) for label in "abc"], {"b-s0": code}, []

    def launch(command: list[str], log: Path, limit_s: float | None) -> int:
        name = next(text.removeprefix("run_name=") for text in command if text.startswith("run_name="))
        ran.append(name.replace("-s", ""))
        (tmp_path / "runs" / name).mkdir()
        write_json(tmp_path / "runs" / name / "summary.json", {"status": "FINISHED"})
        log.touch()
        return codes.get(name, 0)

    outcomes = Runner(tmp_path, launch=launch).run_all(arms, [0, 1])
    assert ran == first.split()
    assert [o.finished for o in outcomes] == [run != "b0" for run in ran]
    assert capsys.readouterr().out.splitlines()[1].startswith(f"  2/6  b s0  failed with exit code {code}: ")
    ran.clear()
    codes.clear()
    Runner(tmp_path, launch=launch).run_all(arms, [0, 1])
    assert ran == again.split()
    new = [line.split()[1:3] for line in capsys.readouterr().out.splitlines() if "  0 s" in line]
    assert [arm + seed[1:] for arm, seed in new] == ran


def test_another_comparison_in_the_folder_and_a_second_process_are_refused(tmp_path: Path) -> None:
    comparison = planned([*TINY, PAIR, f"output_dir={tmp_path}", "name=it"])
    configs = check_arms(comparison)
    comparison.folder.mkdir(parents=True)
    with in_use(comparison.folder), pytest.raises(UserError, match="in use by another process"):
        compare(comparison, configs)  # it would remove the other's unfinished runs
    write_json(comparison.folder / "plan.json", {"common": ["other"]})
    with pytest.raises(UserError, match=r"holds a comparison with another common.*give this one a name="):
        compare(comparison, configs)


def test_no_file_of_a_comparison_has_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.comparison.compare.Runner", _Ended)
    uri = "tracking.uri=http://me:s3cret@host"
    arguments = [*TINY, PAIR, uri, f"arm.other={uri} clip=norm", "steps=40", f"output_dir={tmp_path}", "name=it"]
    for _ in range(2):  # the second time continues
        comparison = planned(arguments)
        compare(comparison, check_arms(comparison))
        assert uri in comparison.common  # for the runs
    assert all("s3cret" not in file.read_text() for file in comparison.folder.glob("*.json"))


class _Ended:
    """In place of a ``Runner``: every run has ended, with these relative differences of its loss by (arm, seed)."""

    differences: ClassVar[dict[tuple[str, int], float | None]] = {}

    def __init__(self, folder: Path, *_: Any) -> None:
        self.folder = folder

    def run_all(self, arms: list[Arm], seeds: list[int]) -> list[Outcome]:
        found = []
        for arm, seed in itertools.product(arms, seeds):
            difference = self.differences.get((arm.label, seed), 0.0)
            if difference is None:
                found.append(Outcome(arm.label, seed, self.folder, 1, "the disk is full"))
            else:
                shutil.rmtree(self.folder / f"{arm.label}-s{seed}", ignore_errors=True)
                found.append(ended(self.folder, arm.label, seed, [10], [2.0 * (1 + difference)]))
        return found


def test_more_seeds_are_another_look_with_stricter_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command again, and a report with nothing to judge, are none; what a look has decided stands."""
    monkeypatch.setattr("evidence.comparison.compare.Runner", _Ended)
    arguments = [*TINY, "arms=fp32,bf16,fp16", "null=false", f"output_dir={tmp_path}", "name=it"]
    configs = check_arms(planned(arguments))

    def looked(seeds: str, differences: dict[tuple[str, int], float | None]) -> Result:
        monkeypatch.setattr(_Ended, "differences", differences)
        return compare(planned([*arguments, f"seeds={seeds}"]), configs)

    spread = {("bf16", seed): 0.0008 * (-1) ** seed for seed in range(6)}
    wide = {("fp16", seed): 0.02 * (-1) ** seed for seed in range(6)}
    full = {(arm, seed): None for arm in ("bf16", "fp16") for seed in range(6)}
    assert looked("4", full).looks == []
    first = looked("4", spread | wide)
    every = [[arm, seed] for arm in ("bf16", "fp16", "fp32") for seed in range(4)]
    assert first.looks == looked("4", spread | wide).looks == [{"seeds": [0, 1, 2, 3], "ended": every}]
    bf16, fp16 = (arm.quality for arm in first.arms[1:])
    assert (bf16.verdict, fp16.verdict) == ("EQUIVALENT", "INCONCLUSIVE")
    assert (
        sentences(first)[-1]
        == "Look 1 at these arms, 4 seeds: tests of 4 %; with more seeds of 0.5 %; of all looks together 5 %."
    )

    (first.comparison.folder / "comparison.json").unlink()  # the sealed plan has the looks
    second = looked("0,1,2,3,5", spread | wide | {("bf16", 5): 0.004})
    assert [look["seeds"] for look in second.looks] == [[0, 1, 2, 3], [0, 1, 2, 3, 5]]
    kept, fp16 = (arm.quality for arm in second.arms[1:])
    assert (kept.verdict, kept.test, kept.look) == ("EQUIVALENT", bf16.test, 1)
    assert kept.why == "decided at look 1, of 4 seeds"
    assert (fp16.verdict, fp16.look) == ("INCONCLUSIVE", 2)
    assert fp16.test
    assert fp16.test.difference.level == pytest.approx(1 - 0.005 / 2)  # of two arms, by Holm
    assert "tests of 0.5 %" in sentences(second)[-1]

    third = looked("0,1,2,3,5", spread | wide | {("bf16", 5): 0.02, ("bf16", 1): None})
    assert len(third.looks) == 3, "other runs of the same seeds are another look"
    with pytest.raises(UserError, match="seed 5 was judged before and is left out now; keep all seeds"):
        looked("4", spread)


def test_a_look_is_judged_by_the_runs_that_had_ended_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed at the first look and was retried counts at the second one alone, with its stricter tests."""
    monkeypatch.setattr("evidence.comparison.compare.Runner", _Ended)
    arguments = [*TINY, PAIR, "null=false", f"output_dir={tmp_path}", "name=it", "seeds=5"]
    configs, spread = check_arms(planned(arguments)), {("bf16", seed): 0.0025 * (-1) ** seed for seed in range(5)}
    for lost, seen in ((("bf16", 3), 4), (("bf16", 9), 5)):
        monkeypatch.setattr(_Ended, "differences", spread | {("bf16", 4): 0.0, lost: None})
        found = compare(planned(arguments), configs)
        quality = found.arms[1].quality
        assert quality.test
        assert (len(quality.differences), quality.look, quality.verdict) == (seen, len(found.looks), "INCONCLUSIVE")
    (judged,) = judge(found.comparison.arms, "fp32", found.outcomes, 0.003, [])[1:]
    assert judged.quality.verdict == "EQUIVALENT", "as it would be with all runs at the first look"
