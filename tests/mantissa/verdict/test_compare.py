"""``python -m mantissa compare`` with commands of known metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mantissa.__main__ import main
from tests.mantissa.verdict.test_shell import ends

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
        return {arm: quality["verdict"] for arm, quality in found["verdicts"].items() if quality["verdict"]}


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def test_arms_take_turns_and_a_command_that_is_given_again_has_other_seeds(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [commands.like("same"), commands.like("copy", spread=0), commands.like("worse", 0.05)]
    arms = [commands.base(), *others, commands.like("noisy", 0, 40)]
    assert commands.compare(*arms, arms[0]) == 1
    assert commands.ran()[:7] == ["fp32 0", "same 0", "copy 0", "worse 0", "noisy 0", "fp32 1000", "fp32 1001"]
    assert len(commands.ran()) == 6 * 4
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
    assert "\nLower val loss counts as better; higher_is_better, or --higher-is-better, turns it round.\n" in printed
    assert "Wall times are of whole runs, their start included" in printed
    assert "<h1>fp32 / same / copy / worse / noisy / fp32-2</h1>" in (commands.report / "comparison.html").read_text()


@pytest.mark.parametrize(
    ("shift", "said", "verdict"),
    [(0.05, "+2.0", "BETTER"), (-0.05, "-1.99 % [-2.0", "WORSE"), (247.5, "+", "BETTER"), (-2.475, "-", "WORSE")],
)
def test_a_higher_metric_may_be_better_and_percents_against_fractions_are_asked_about(
    shift: float, said: str, verdict: str, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.compare(commands.base(), commands.like("other", shift), "--higher-is-better") == 1
    assert commands.verdicts() == {"other": verdict}
    printed = capsys.readouterr().out
    assert f"other, compared with fp32: val loss {said}" in printed
    assert "\nHigher val loss counts as better; higher_is_better, or --higher-is-better, says so.\n" in printed
    assert ("check that both print it in one unit" in printed) == (abs(shift) > 1)


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
    broken = "step 5 loss 9.9\nval loss nan\n"  # an evaluation that JSON has no number for
    fast = commands.add(
        "fast", lambda seed: broken + curve(*(each + NOISE[seed % 1000] + PAIRED[seed % 1000] for each in ends[1:]))
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
    lines = (commands.folder / "a" / "runs.jsonl").read_text().splitlines()
    runs = [run for kind, run in (json.loads(line, parse_constant=pytest.fail) for line in lines) if kind == "run"]
    assert [run["curve"][1][-1] for run in runs] == [run["values"]["loss"] for run in runs]
    reached = json.loads((commands.folder / "a" / "comparison.json").read_text())["reached"]
    assert reached["fast"]["steps"]["0"] == pytest.approx(20, abs=1)
    assert reached["fp32"]["steps"]["0"] == pytest.approx(30, abs=1)


def test_a_log_in_which_no_step_is_found_is_a_mistake(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    for step, why in (("epoch", "printed no number after the text 'epoch'"), (" ", "--step is empty")):
        assert commands.compare(commands.base(), commands.like("same"), "--step", step) == 2
        assert why in capsys.readouterr().err


def test_an_arm_that_diverges_where_the_first_does_not_is_worse(commands: Commands) -> None:
    nan = commands.add("nan", lambda seed: "step 2 val loss nan" if seed == 2 else 2.5 + NOISE[seed % 1000])
    assert commands.compare(commands.base(), nan, nan.replace("cat", "cat 1>&2")) == 1  # and one that prints to stderr
    assert set(commands.verdicts().values()) == {"WORSE"}


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        ("echo {seed}; echo no such file >&2; exit 3", "ended with exit code 3; its last lines: 0 / no such file"),
        (
            "echo Val_loss: {seed}; echo val loss: high; echo done",
            "printed no number after the text 'val loss'; lines that are close: Val_loss: 0 / val loss: high",
        ),
        ("sleep 100 & echo {seed}; wait", "was still running after 3 s and was ended; its last lines: 0"),
    ],
)
def test_a_command_that_fails_at_once_ends_the_comparison_in_one_sentence(
    commands: Commands, command: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.compare(commands.base(), command, "--timeout", "3") == 2
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


@pytest.mark.parametrize("change", [[], ["--continue", "--margin", "0.01"], ["--continue", "--margin", "3"]])
def test_a_mistake_that_no_run_shows_is_found_before_any_run(commands: Commands, change: list[str]) -> None:
    arms = [commands.base(), commands.like("same")]
    assert commands.compare(*arms) == 0
    assert commands.compare(*arms, "--seeds", "5", *change) == 2
    assert len(commands.ran()) == 2 * 4


def test_too_few_seeds_are_told_how_many_are_enough(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    arms = [commands.base(), commands.like("same")]
    assert commands.compare(*arms, "--seeds", "2") == 2
    enough = re.search(r"use (\d+) or more", capsys.readouterr().err)
    assert enough
    assert commands.compare(*arms, "--seeds", enough[1]) != 2
    assert enough[1] == "3"


def test_digits_that_are_too_few_for_a_verdict_are_a_mistake_as_soon_as_they_show(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spread would be 0, and any difference certain; and a difference below the last digit would not be seen."""
    digit = "the last digit of val loss, 0.01, is more than the margin of 0.3 %, 0.0075; print 4 decimals"
    coarse = [lambda seed: 2.5, lambda seed: f"val loss {2.5 + NOISE[seed % 1000]:.2f}"]
    for loss, said, most in zip(coarse, ("is 2.5 with every seed", digit), (6, 4), strict=True):
        (commands.folder / "ran").unlink(missing_ok=True)
        commands.report = commands.folder / str(most)
        assert commands.compare(commands.add("fp32", loss), commands.like("same")) == 2
        assert said in capsys.readouterr().err
        assert len(commands.ran()) <= most


def test_a_crash_before_a_pipe_is_no_end_of_training(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    crash = f"({commands.like('same')}; test {{seed}} != 2) | tee {commands.folder}/log"
    assert commands.compare(commands.base(), crash) == 1
    assert "NOT JUDGED; 1 of 4 runs failed where the baseline's did not" in capsys.readouterr().out


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
        assert f"in another folder, or with a {name} that is gone from here" in capsys.readouterr().err
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
    deadline = time.monotonic() + 60
    while "wait" not in Path(f"/proc/{process.pid}/wchan").read_text():  # the command has begun before Popen returns
        assert time.monotonic() < deadline
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
