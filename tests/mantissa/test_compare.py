"""Comparisons: verdicts on known losses, and ``python -m mantissa compare`` with commands of known metrics."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mantissa.__main__ import main
from mantissa.verdict.compare import NOT_JUDGED, Losses, Quality, Store, judge, judge_and_keep
from mantissa.verdict.statistics import BETTER, EQUIVALENT, INCONCLUSIVE, WORSE
from tests.mantissa.test_shell import ends

NOISE = (0.02113, -0.01307, 0.00419, 0.01711, -0.01901, 0.00803, -0.00607, 0.01217)
"""Of the seeds, which all arms share."""
PAIRED = (0.0004, -0.0006, 0.0002, 0.0005, -0.0003, 0.0001, -0.0002, 0.0003)
"""Of an arm that rounds differently."""


class Commands:
    """Fake training commands: each prints what the test has written for its arm and seed, and is noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = folder / "report"

    def add(self, arm: str, loss: Callable[[int], float | str]) -> str:
        """Return the command of an arm with these losses."""
        for seed in (*range(len(NOISE)), *range(1000, 1000 + len(NOISE))):
            value = loss(seed)
            last = value if isinstance(value, str) else f"step 2 val loss {value:.5f}"
            (self.folder / f"{arm}-{seed}").write_text(f"step 1 val loss 9.0\n{last}\ndone\n")
        return f"echo {arm} {{seed}} >> {self.folder}/ran && cat {self.folder}/{arm}-{{seed}}"

    def base(self) -> str:
        return self.add("fp32", lambda seed: 2.5 + (NOISE[seed] if seed < 1000 else NOISE[1000 - seed]))

    def like(self, arm: str, shift: float = 0.0, spread: float = 1.0) -> str:
        """Return an arm whose losses differ from the baseline's by a shift and by noise of its own."""
        return self.add(arm, lambda seed: 2.5 + NOISE[seed % 1000] + shift + spread * PAIRED[seed % 1000])

    def compare(self, *arguments: str) -> int:
        return main(["compare", *arguments, "--metric", "val loss", "--report", str(self.report)])

    def ran(self) -> list[str]:
        path = self.folder / "ran"
        return path.read_text().splitlines() if path.exists() else []

    def verdicts(self) -> dict[str, str]:
        found = json.loads((self.report / "comparison.json").read_text())
        return {label: each["verdict"] for label, each in found["verdicts"].items() if each["verdict"]}


NAN = math.nan
BASE = (2.0, 2.1, 1.9, 2.05)
ALIKE = (2.0002, 2.0997, 1.9001, 2.0499)
OTHERS_DIVERGED = "{} of 4 runs diverged where the baseline's did not"


def verdict(losses: tuple[float | None, ...], base: tuple[float | None, ...] = BASE) -> Quality:
    return judge({"base": dict(enumerate(base)), "arm": dict(enumerate(losses))}, 0.003)["arm"]


@pytest.mark.parametrize(
    ("losses", "base", "expected", "why"),
    [
        (ALIKE, BASE, EQUIVALENT, ""),
        ((2.02, 2.12, 1.92, 2.07), BASE, WORSE, ""),
        ((1.98, 2.08, 1.88, 2.03), BASE, BETTER, ""),
        ((1e6,) * 3, BASE[:3], WORSE, ""),
        ((1e6, 2e6, 1.5e6), BASE[:3], WORSE, ""),
        ((2.01, 2.09, 1.905, 2.04), BASE, INCONCLUSIVE, "about "),
        ((ALIKE[0], None, *ALIKE[2:]), BASE, NOT_JUDGED, "1 of 4 runs failed where the baseline's did not"),
        ((ALIKE[0], None, NAN, ALIKE[3]), BASE, WORSE, OTHERS_DIVERGED.format(1)),
        ((2.02, 2.12, None, 2.07), BASE, NOT_JUDGED, "1 of 4 runs failed where the baseline's did not"),
        (ALIKE, (None, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished"),
        ((None, *ALIKE[1:]), (None, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished"),
        (ALIKE, (NAN, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished; the baseline diverged in 1 where this arm"),
        ((NAN, *ALIKE[1:]), (NAN, *BASE[1:]), EQUIVALENT, "only 3 of 4 pairs finished"),
        ((NAN, *ALIKE[1:]), BASE, WORSE, OTHERS_DIVERGED.format(1)),
        ((math.inf,) * 4, BASE, WORSE, OTHERS_DIVERGED.format(4)),
        ((None, None, *ALIKE[2:]), BASE, NOT_JUDGED, "2 of 4 pairs finished, and a verdict needs 3"),
        (ALIKE[:2], BASE[:2], NOT_JUDGED, "a verdict needs more than 2 seeds; use 5"),
        (
            (NAN, NAN),
            BASE[:2],
            NOT_JUDGED,
            "2 of 2 runs diverged where the baseline's did not; a verdict needs more than 2 seeds",
        ),
        (ALIKE, (0.0, *BASE[1:]), NOT_JUDGED, "the baseline is 0, or on both sides of it"),
        (ALIKE, (-0.1, *BASE[1:]), NOT_JUDGED, "the baseline is 0, or on both sides of it"),
        ((-1.9, -2.0, -1.8, -1.95), tuple(-loss for loss in BASE), WORSE, ""),  # a log-density: higher is worse
    ],
)
def test_a_verdict_is_of_the_pairs_that_ended(
    losses: tuple[float | None, ...], base: tuple[float | None, ...], expected: str, why: str
) -> None:
    found = verdict(losses, base)
    assert (found.verdict, found.why.startswith(why), bool(found.why)) == (expected, True, bool(why))


def test_differences_are_of_runs_of_the_same_seed_in_any_order() -> None:
    found = judge({"base": {0: 2.0, 1: 3.0}, "arm": {1: 3.03, 0: 2.0}}, 0.003)["arm"]
    assert sorted(found.differences) == pytest.approx([0.0, 0.01])


def test_arms_are_corrected_for_their_number_also_for_those_that_failed() -> None:
    """One arm by itself is EQUIVALENT; beside five others that are not, the same runs no longer suffice."""
    noise = dict(enumerate((0.0000, 0.0033, 0.0006, 0.0022, 0.0011)))
    base: Losses = dict.fromkeys(noise, 2.0)
    arm: Losses = {seed: 2 * (1 + noise[seed]) for seed in noise}
    others: dict[str, Losses] = {
        str(n): {seed: 2 * (1 + noise[seed] + 0.001 * n) for seed in noise} for n in range(1, 6)
    }
    alone = judge({"base": base, "arm": arm}, 0.003)["arm"]
    among = judge({"base": base, "arm": arm, **others}, 0.003)["arm"]
    assert alone.test
    assert among.test
    assert (alone.verdict, alone.test.difference.level) == (EQUIVALENT, pytest.approx(0.92))
    assert (among.verdict, 0.04 / 6 < among.test.p_equivalent < 0.04) == (INCONCLUSIVE, True)
    like = dict(enumerate(ALIKE))
    losses: dict[str, Losses] = {"base": dict(enumerate(BASE)), "arm": like, "failed": dict.fromkeys(like)}
    failed = judge(losses, 0.003)["arm"]
    assert failed.test
    assert failed.test.difference.level == pytest.approx(1 - 2 * 0.04 / 2)


def look_at(store: Store, losses: dict[int, float | None], seeds: int) -> tuple[int, Quality]:
    """Judge an arm whose relative differences are given by seed; return how many looks there are, and its quality."""
    base: Losses = {seed: 2.0 + 0.01 * seed for seed in range(seeds)}
    arm = {seed: None if losses[seed] is None else base[seed] * (1 + losses[seed]) for seed in base}  # type: ignore[operator]
    looks, found = judge_and_keep({"base": base, "arm": arm}, 0.003, store)
    assert looks == store.of("look")
    return len(looks), found["arm"]


def test_more_seeds_are_another_look_with_stricter_tests_and_what_one_has_decided_stands() -> None:
    spread: dict[int, float | None] = {seed: 0.0008 * (-1) ** seed for seed in range(6)}
    store = Store()
    assert look_at(store, dict.fromkeys(range(4)), 4)[0] == 0, "nothing is judged"
    first = look_at(store, spread, 4)
    assert (first[0], first[1].verdict, first[1].look) == (1, EQUIVALENT, 1)
    assert look_at(store, spread, 4) == first, "the same runs are no other look"
    looks, second = look_at(store, spread | {4: 0.02}, 5)
    assert (looks, second.verdict, second.test, second.look) == (2, EQUIVALENT, first[1].test, 1)
    assert second.why == "decided at look 1, of 4 seeds"
    looks, failed = look_at(store, spread | {4: 0.02, 1: None}, 5)
    assert (looks, failed.verdict) == (2, NOT_JUDGED), "while a run fails, what it decided before does not stand"
    assert look_at(store, spread, 6)[0] == 3


def test_a_look_is_judged_by_the_runs_that_had_ended_then() -> None:
    """A run that failed at the first look, at which another arm was judged, and was retried, counts at the second."""
    losses: dict[int, float | None] = {seed: 0.0025 * (-1) ** seed for seed in range(4)} | {4: 0.0}
    base: Losses = {seed: 2.0 + 0.01 * seed for seed in range(5)}
    arm = {seed: base[seed] * (1 + losses[seed]) for seed in base}  # type: ignore[operator]
    store = Store()
    first = judge_and_keep({"base": base, "other": arm, "arm": arm | {3: None}}, 0.003, store)[1]["arm"]
    second = judge_and_keep({"base": base, "other": arm, "arm": arm}, 0.003, store)[1]["arm"]
    assert (len(first.differences), first.verdict, first.look) == (4, NOT_JUDGED, 1)
    assert (len(second.differences), second.verdict, second.look) == (5, INCONCLUSIVE, 2)
    assert look_at(Store(), losses, 5)[1].verdict == EQUIVALENT, "as it would be with all runs at the first look"


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def test_arms_take_turns_and_a_command_that_is_given_again_has_other_seeds(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [commands.like("same"), commands.like("copy", spread=0), commands.like("worse", 0.05)]
    arms = [commands.base(), *others, commands.like("noisy", 0, 40)]
    assert commands.compare(*arms, arms[0]) == 1
    ran = commands.ran()
    assert ran[:6] == ["fp32 0", "same 0", "copy 0", "worse 0", "noisy 0", "fp32 1000"]
    assert ran[6:13] == ["fp32 1001", "noisy 1", "worse 1", "copy 1", "same 1", "fp32 1", "fp32 2"]
    assert len(ran) == 6 * 4
    assert commands.verdicts() == {
        "same": "EQUIVALENT",
        "copy": "EQUIVALENT",
        "worse": "WORSE",
        "noisy": "INCONCLUSIVE",
        "fp32-2": "INCONCLUSIVE",
    }
    printed = capsys.readouterr().out
    assert "worse, compared with fp32: val loss +2.00 % [" in printed
    assert [line.split(",")[0] for line in printed.splitlines() if "equal in every digit" in line] == ["copy"]
    assert "Wall times are of whole runs, their start included" in printed
    assert "<h1>fp32 / same / copy / worse / noisy / fp32-2</h1>" in (commands.report / "comparison.html").read_text()


def test_a_higher_metric_may_be_better(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    up, down = commands.like("up", 0.05), commands.like("down", -0.05)
    assert commands.compare(commands.base(), up, down, "--higher-is-better") == 1
    assert commands.verdicts() == {"up": "BETTER", "down": "WORSE"}
    printed = capsys.readouterr().out
    assert "down, compared with fp32: val loss -1.99 % [-2.0" in printed
    assert "one unit" not in printed


def curve(*losses: float) -> str:
    """What a command prints: each loss below its step, after a loss in training."""
    return "".join(f"step {10 * number} loss 9.9\nval loss {loss:.5f}\n" for number, loss in enumerate(losses, 1))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_log_with_steps_says_how_many_it_takes_to_the_final_metric_of_the_first(
    commands: Commands, sign: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second arm needs a third fewer steps, the third never gets there, the fourth diverges."""
    ends = [9 - sign * (9 - each) for each in (4.0, 3.0, 2.0)]
    base = commands.add("fp32", lambda seed: curve(*(each + NOISE[seed % 1000] for each in (*ends, ends[-1]))))
    fast = commands.add(
        "fast", lambda seed: curve(*(each + NOISE[seed % 1000] + PAIRED[seed % 1000] for each in ends[1:]))
    )
    never = commands.add("never", lambda seed: curve(*(each + NOISE[seed % 1000] for each in ends[:2])))
    diverged = commands.add("diverged", lambda seed: curve(*ends) + "val loss nan")
    options = ["--step", "step", *["--higher-is-better"] * (sign < 0)]
    for part, arms in (("a", [fast]), ("b", [never, diverged])):
        commands.report = commands.folder / part
        assert commands.compare(base, *arms, *options) == (part == "b")
    printed = capsys.readouterr().out
    assert re.search(r"EQUIVALENT .*\)\. To the final val loss of fp32: 3[34] % fewer steps\.\n", printed)
    assert printed.count("The final val loss of fp32 is not reached.") == 2
    assert len(re.findall("wall time +steps to equal\n", printed)) == 2
    reached = json.loads((commands.folder / "a" / "comparison.json").read_text())["reached"]
    assert reached["fast"]["steps"]["0"] == pytest.approx(20, abs=1)
    assert reached["fp32"]["steps"]["0"] == pytest.approx(30, abs=1)


def test_a_log_in_which_no_step_is_found_is_a_mistake(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    for step, why in (("epoch", "printed no number after the text 'epoch'"), (" ", "--step is empty")):
        assert commands.compare(commands.base(), commands.like("same"), "--step", step) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(("shift", "verdict"), [(247.5, "BETTER"), (-2.475, "WORSE")])
def test_percents_against_fractions_are_asked_about(
    shift: float, verdict: str, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.compare(commands.base(), commands.like("other", shift), "--higher-is-better") == 1
    assert commands.verdicts() == {"other": verdict}
    assert "check that both print it in one unit" in capsys.readouterr().out


def test_an_arm_that_diverges_where_the_first_does_not_is_worse(commands: Commands) -> None:
    nan = commands.add("nan", lambda seed: "step 2 val loss nan" if seed == 2 else 2.5 + NOISE[seed % 1000])
    assert commands.compare(commands.base(), nan, nan.replace("cat", "cat 1>&2")) == 1  # and one that prints to stderr
    assert set(commands.verdicts().values()) == {"WORSE"}


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        ("echo {seed}; echo no such file >&2; exit 3", "ended with exit code 3; its last lines: 0 / no such file"),
        ("echo loss {seed}", "printed no number after the text 'val loss'; its last lines: loss 0"),
        (
            "echo Val_loss: {seed}; echo val loss: high; echo done",
            "printed no number after the text 'val loss'; lines that are close: Val_loss: 0 / val loss: high",
        ),
        ("sleep 100 & echo {seed}; wait", "was still running after 0.2 s and was ended; its last lines: 0"),
    ],
)
def test_a_command_that_fails_at_once_ends_the_comparison_in_one_sentence(
    commands: Commands, command: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.compare(commands.base(), command, "--timeout", "0.2") == 2
    *_, said = capsys.readouterr().err.strip().splitlines()
    remedy = f"for a corrected comparison name another folder with --report, since {commands.report} keeps 1 run"
    assert said.endswith(f"seed 0: `{command.replace('{seed}', '0')}` {reported}; {remedy}")
    assert commands.ran() == ["fp32 0"]


def test_a_later_failure_is_reported_and_tried_again(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    same = commands.like("same")
    (commands.folder / "same-2").rename(commands.folder / "away")
    assert commands.compare(commands.base(), same) == 1
    printed = capsys.readouterr().out
    assert "same, seed 2, failed: `echo same 2" in printed
    assert "NOT JUDGED; 1 of 4 runs failed where the baseline's did not; the same command retries them (" in printed
    (commands.folder / "away").rename(commands.folder / "same-2")
    assert commands.compare(commands.base(), same, "--continue") == 0
    assert commands.ran()[8:] == ["same 2"]
    assert "failed" not in capsys.readouterr().out


def test_more_seeds_are_another_look_and_the_same_again_is_none(commands: Commands) -> None:
    arms = [commands.base(), commands.like("same")]
    for seeds in (4, 4, 6):
        assert commands.compare(*arms, "--seeds", str(seeds), "--continue") == 0
    assert len(commands.ran()) == 2 * 6
    found = json.loads((commands.report / "comparison.json").read_text())
    assert [len(look["seeds"]) for look in found["looks"]] == [4, 6]
    assert found["verdicts"]["same"]["test"]["difference"]["level"] == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ([], "two commands or more"),
        (["echo val loss 1"], "`echo val loss 1` has no {seed}; write {seed} where it takes the seed"),
        (["SAME", "--metric", ""], "--metric is empty"),
        (["SAME", "--report", "/proc/none"], "--report /proc/none cannot be made"),
        (["SAME", "--margin", "3"], "a margin of 3 must be above 0 and below 1"),
        (["SAME"], "keeps 8 runs; add --continue to go on with them, or name another folder with --report"),
        (["SAME", "--continue", "--seeds", "3"], "seed 3 was judged before and is left out now; keep all seeds"),
        (["SAME", "--continue", "--margin", "0.01"], "margin (0.003 there, 0.01 here); name another folder with"),
    ],
)
def test_mistakes(commands: Commands, change: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    base, same = commands.base(), commands.like("same")
    assert commands.compare(base, same) == 0
    ran = commands.ran()
    others = [{"BASE": base, "SAME": same}.get(word, word) for word in change[:1]]
    metric = ["--metric", "val loss"]
    assert main(["compare", base, *others, *metric, "--report", str(commands.report), *change[1:]]) == 2
    assert reported in capsys.readouterr().err
    assert commands.ran() == ran


def test_too_few_seeds_and_a_seed_that_changes_nothing_are_mistakes(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spread would be 0, and any difference certain; and a difference below the last digit would not be seen.

    Digits are checked when two runs have ended.
    """
    arms = [commands.add("fp32", lambda seed: 2.5), commands.like("same")]
    assert commands.compare(*arms, "--seeds", "2") == 2
    assert "a verdict needs more than 2 seeds; use 4 or more" in capsys.readouterr().err
    assert commands.ran() == []
    assert commands.compare(*arms) == 2
    assert "fp32: val loss is 2.5 with every seed" in capsys.readouterr().err
    commands.report = commands.folder / "coarse"
    coarse = commands.add("coarse", lambda seed: f"val loss {2.5 + NOISE[seed % 1000]:.2f}")
    (commands.folder / "ran").unlink()
    assert commands.compare(coarse, arms[1]) == 2
    remedy = "print 4 decimals, or set a wider margin"
    said = f"coarse: the last digit of val loss, 0.01, is more than the margin of 0.3 %, 0.0075; {remedy}"
    assert said in capsys.readouterr().err
    assert len(commands.ran()) < 5


def test_a_crash_before_a_pipe_is_no_end_of_training(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    crash = f"({commands.like('same')}; test {{seed}} != 2) | tee {commands.folder}/log"
    assert commands.compare(commands.base(), crash) == 1
    assert "NOT JUDGED; 1 of 4 runs failed where the baseline's did not" in capsys.readouterr().out


def rounded_pairs(
    difference: str, spread: float, count: int, unit: float, generator: np.random.Generator
) -> list[Losses]:
    """A baseline and an arm whose true difference is the margin, as they are printed."""
    noise = {
        "normal": lambda: generator.normal(size=count),
        "exponential": lambda: generator.choice([-1, 1]) * (generator.exponential(size=count) - 1),
    }[difference]()
    base = 3.5 * (1 + generator.normal(0, 0.003, count)) + generator.uniform(-0.05, 0.05)
    arm = base * (1 + generator.choice([-1, 1]) * 0.003 * (1 + spread * noise))
    return [dict(enumerate((np.round(side / unit) * unit).tolist())) for side in (base, arm)]


@pytest.mark.parametrize("count", [3, 5, 8])
@pytest.mark.parametrize(("difference", "most"), [("normal", 0.06), ("exponential", 0.17)])
def test_rounding_makes_a_difference_of_the_margin_no_more_often_equivalent(
    difference: str, most: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spreads far below the last digit, which make all differences the same, and above it; three deviations of 400."""
    monkeypatch.setattr("mantissa.verdict.statistics._Tested._pairs_needed", lambda *_: None)
    generator = np.random.default_rng(0)
    for unit, spread in itertools.product((1e-2, 5e-3, 1e-3, 1e-4), (0.02, 0.3, 1.0)):
        pairs = [rounded_pairs(difference, spread, count, unit, generator) for _ in range(400)]
        verdicts = [judge({"base": base, "arm": arm}, 0.003)["arm"].verdict for base, arm in pairs]
        assert verdicts.count(EQUIVALENT) / 400 <= most + 3 * (most * (1 - most) / 400) ** 0.5, (unit, spread)


def test_an_accuracy_of_few_samples_shows_no_difference_below_its_steps() -> None:
    """With 64 samples most seeds count the same, whichever the arm; with many, counts are like other metrics."""
    few = {seed: right / 64 for seed, right in enumerate((57, 60, 58, 61))}
    assert judge({"base": few, "arm": few}, 0.003)["arm"].verdict == INCONCLUSIVE
    assert judge({"base": few, "arm": few}, 0.1)["arm"].verdict == EQUIVALENT
    many: Losses = dict(enumerate((9731.0, 9760.0, 9744.0, 9726.0)))
    others: Losses = dict(enumerate((9733.0, 9755.0, 9741.0, 9729.0)))
    assert judge({"base": many, "arm": others}, 0.003)["arm"].verdict == EQUIVALENT


def test_kept_runs_continue_only_where_the_files_that_a_command_names_are_the_same(
    commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program, one in the folder of a ``cd``, one behind an option's ``=``; what a command writes is of no matter."""
    monkeypatch.chdir(commands.folder)
    arms = [f"{commands.base()} > log; cat log", f"{commands.like('same')} --set=conf.txt; (cd old && sh train.sh)"]
    arms = [arm.replace("cat /", "sh print.sh /") for arm in arms]
    (commands.folder / "old").mkdir()
    files = [commands.folder / name for name in ("print.sh", "conf.txt", "old/train.sh")]
    for file in files:
        file.write_text('cat "$1"\n' if file.stem == "print" else "# nothing\n")
    (commands.folder / "log").touch()
    assert commands.compare(*arms) == 0
    (commands.folder / "plot.py").touch()
    for file, before in [(file, file.read_text()) for file in files]:
        file.write_text(f"{before}# edited\n")
        assert commands.compare(*arms, "--continue") == 2
        name = file.relative_to(commands.folder)
        assert f"{name} has changed since the runs in {commands.report} began; name" in capsys.readouterr().err
        file.unlink()
        assert commands.compare(*arms, "--continue") == 2
        assert f"{name} is gone since" in capsys.readouterr().err
        file.write_text(before)
    assert len(commands.ran()) == 2 * 4
    assert commands.compare(*arms, "--continue", "--seeds", "5") == 0
    assert len(commands.ran()) == 2 * 5


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_ends_its_run_and_continues(commands: Commands, signal_number: int) -> None:
    arms = [commands.base(), commands.like("same")]
    pipe = commands.folder / "pipe"
    os.mkfifo(pipe)
    waits = f"(test -p {pipe} && echo $$ > {pipe} && sleep 1000); "  # tells the test, once
    arms[1] = f"test {{seed}} != 1 || {waits}{arms[1]}"
    command = [sys.executable, "-m", "mantissa", "compare", *arms, "--metric", "val loss"]
    process = subprocess.Popen([*command, "--report", str(commands.report)], stderr=subprocess.PIPE, text=True)
    child = int(pipe.read_text())
    while "wait" not in Path(f"/proc/{process.pid}/wchan").read_text():  # the command has begun before Popen returns
        time.sleep(0.01)
    process.send_signal(signal_number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (
        130,
        "loading torch …\ninterrupted; the same command with --continue goes on\n",
    )
    assert ends(child)
    before = commands.ran()
    assert before == ["fp32 0", "same 0"]
    pipe.unlink()
    assert commands.compare(*arms, "--continue") == 0
    assert len(commands.ran()) == 2 * 4
