"""``python -m mantissa compare``: commands of known metrics, in turns, judged, kept and continued."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mantissa.__main__ import main
from mantissa.errors import UsageError
from mantissa.printed import last_number

NOISE = (0.021, -0.013, 0.004, 0.017, -0.019, 0.008, -0.006, 0.012)
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
        return main(["compare", *arguments, "--metric", "val loss ([0-9.]+)", "--report", str(self.report)])

    def ran(self) -> list[str]:
        path = self.folder / "ran"
        return path.read_text().splitlines() if path.exists() else []

    def verdicts(self) -> dict[str, str]:
        found = json.loads((self.report / "comparison.json").read_text())
        return {label: each["verdict"] for label, each in found["verdicts"].items() if each["verdict"]}


def ends(process: int) -> bool:
    """Whether a process, of any parent, has ended or does so."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    with open(descriptor, "rb"):
        return bool(select.select([descriptor], [], [], 10)[0])


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.mark.parametrize(
    ("metric", "text", "value"),
    [
        ("val loss ([0-9.]+)", "val loss 3.5\nval loss 2.25\nlr 1\n", 2.25),
        ("val loss ([0-9.]+)", "val loss 2.25.", 2.25),
        ("val loss ([0-9.]+)", "val loss 9.8e-06", 9.8e-06),  # a group without an exponent
        ("val loss ([0-9.]+)", "val loss 2.25\nval loss nan\n", math.nan),  # a group without letters
        ("val loss ([0-9.]+)", "val loss 2.25\nval loss inf\n", math.inf),
        (r"loss=(\S+)", "loss=-1.5E3", -1500.0),
        ("acc [0-9.]+", "acc 0.91, banana", 0.91),
        (r"^loss ([0-9.]+)$", "loss 1\nloss 2\n", 2.0),
        ("val loss ([0-9.]+)", "train loss 3", None),
    ],
)
def test_the_last_number_is_read_to_its_end_and_a_nan_is_never_passed_over(
    metric: str, text: str, value: float | None
) -> None:
    assert last_number(metric, text) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("text", ["loss: high", "loss: 12,345.6"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"put \(…\) around the number alone"):
        last_number("loss: (.*)", text)


def test_arms_take_turns_and_the_null_arm_is_the_first_command_with_other_seeds(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = [commands.base(), commands.like("same"), commands.like("worse", 0.05), commands.like("noisy", 0, 40)]
    assert commands.compare(*arms) == 1
    ran = commands.ran()
    assert ran[:5] == ["fp32 0", "same 0", "worse 0", "noisy 0", "fp32 1000"]
    assert ran[5:11] == ["fp32 1001", "noisy 1", "worse 1", "same 1", "fp32 1", "fp32 2"]
    assert len(ran) == 5 * 4
    assert commands.verdicts() == {
        "same": "EQUIVALENT",
        "worse": "WORSE",
        "noisy": "INCONCLUSIVE",
        "null": "INCONCLUSIVE",
    }
    printed = capsys.readouterr().out
    assert "worse, compared with fp32: val loss +2.00 % [" in printed
    assert "Wall times are of whole runs, their start included" in printed
    assert "<h1>fp32 / same / worse / noisy</h1>" in (commands.report / "comparison.html").read_text()


def test_two_that_train_alike_are_equivalent_and_better_is_not(commands: Commands) -> None:
    assert commands.compare(commands.base(), commands.like("same")) == 0
    commands.report = commands.folder / "other"
    assert commands.compare(commands.base(), commands.like("better", -0.05)) == 1
    assert commands.verdicts()["better"] == "BETTER"


def test_a_higher_metric_may_be_better(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    up, down = commands.like("up", 0.05), commands.like("down", -0.05)
    assert commands.compare(commands.base(), up, down, "--higher-is-better") == 1
    assert commands.verdicts() | {"null": ""} == {"up": "BETTER", "down": "WORSE", "null": ""}
    assert "down, compared with fp32: val loss -1.99 % [-2.0" in capsys.readouterr().out


def test_an_arm_that_diverges_where_the_first_does_not_is_worse(commands: Commands) -> None:
    nan = commands.add("nan", lambda seed: "step 2 val loss nan" if seed == 2 else 2.5 + NOISE[seed % 1000])
    assert commands.compare(commands.base(), nan, nan.replace("cat", "cat 1>&2")) == 1  # and one that prints to stderr
    assert set(commands.verdicts().values()) == {"WORSE", "INCONCLUSIVE"}
    commands.report = commands.folder / "other"
    also = commands.add("also", lambda seed: "step 2 val loss nan" if seed == 2 else 2.5 + NOISE[seed % 1000])
    assert commands.compare(nan, also, "--no-null") == 0


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        ("echo {seed}; echo no such file >&2; exit 3", "ended with exit code 3; its last lines: 0 / no such file"),
        ("echo loss {seed}", "printed nothing that 'val loss ([0-9.]+)' matches; its last lines: loss 0"),
        ("sleep 100 & echo {seed}; wait", "was still running after 0.2 s and was ended; its last lines: 0"),
    ],
)
def test_a_command_that_fails_at_once_ends_the_comparison_in_one_sentence(
    commands: Commands, command: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.compare(commands.base(), command, "--timeout", "0.2") == 2
    *_, said = capsys.readouterr().err.strip().splitlines()
    assert said.endswith(f"seed 0: `{command.replace('{seed}', '0')}` {reported}")
    assert commands.ran() == ["fp32 0"]


def test_a_later_failure_is_reported_and_tried_again(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    same = commands.like("same")
    (commands.folder / "same-2").rename(commands.folder / "away")
    assert commands.compare(commands.base(), same) == 0
    printed = capsys.readouterr().out
    assert "same, seed 2, failed: `echo same 2" in printed
    assert "only 3 of 4 pairs finished" in printed
    (commands.folder / "away").rename(commands.folder / "same-2")
    assert commands.compare(commands.base(), same) == 0
    assert commands.ran()[12:] == ["same 2"]
    assert "failed" not in capsys.readouterr().out


def test_what_a_command_leaves_running_ends_with_it(commands: Commands) -> None:
    """As a server or a worker would disturb the next run."""
    leaves = f"sleep 1000 & echo $! >> {commands.folder}/left; {commands.like('same')}"
    assert commands.compare(commands.base(), leaves, "--no-null") == 0
    left = [int(line) for line in (commands.folder / "left").read_text().split()]
    assert len(left) == 4
    assert all(map(ends, left))


def test_more_seeds_are_another_look_and_the_same_again_is_none(commands: Commands) -> None:
    arms = [commands.base(), commands.like("same")]
    for seeds in (4, 4, 6):
        assert commands.compare(*arms, "--seeds", str(seeds)) == 0
    assert len(commands.ran()) == 3 * 6
    found = json.loads((commands.report / "comparison.json").read_text())
    assert [len(look["seeds"]) for look in found["looks"]] == [4, 6]
    assert found["verdicts"]["same"]["test"]["difference"]["level"] == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ([], "two commands or more"),
        (["echo val loss 1"], "`echo val loss 1` has no {seed}; write {seed} where it takes the seed"),
        (["BASE"], "is given twice"),
        (["SAME", "--metric", "loss ("], "is no regular expression"),
        (["SAME", "--report", "/proc/none"], "--report /proc/none cannot be made"),
        (["SAME", "--margin", "3"], "a margin of 3 must be above 0 and below 1"),
        (["SAME", "--seeds", "3"], "--seeds 3 leaves out seeds that were judged before"),
        (["SAME", "--margin", "0.01"], "holds another comparison; give this one another folder with --report"),
    ],
)
def test_mistakes(commands: Commands, change: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    base, same = commands.base(), commands.like("same")
    assert commands.compare(base, same) == 0
    ran = commands.ran()
    others = [{"BASE": base, "SAME": same}.get(word, word) for word in change[:1]]
    metric = ["--metric", "val loss ([0-9.]+)"]
    assert main(["compare", base, *others, *metric, "--report", str(commands.report), *change[1:]]) == 2
    assert reported in capsys.readouterr().err
    assert commands.ran() == ran


def test_too_few_seeds_and_a_seed_that_changes_nothing_are_mistakes(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spread would be 0, and any difference certain; and a difference below the last digit would not be seen."""
    arms = [commands.add("fp32", lambda seed: 2.5), commands.like("same")]
    assert commands.compare(*arms, "--seeds", "2") == 2
    assert "2 seeds are too few for a verdict; use 4 or more" in capsys.readouterr().err
    assert commands.ran() == []
    assert commands.compare(*arms) == 2
    assert "fp32: val loss is 2.5 with every seed" in capsys.readouterr().err
    commands.report = commands.folder / "coarse"
    assert commands.compare(commands.add("fp32", lambda seed: f"val loss {2.5 + NOISE[seed % 1000]:.2f}"), arms[1]) == 2
    assert "fp32: the last digit of val loss, 0.01, is more than the margin of 0.3 %" in capsys.readouterr().err


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_ends_its_run_and_continues(commands: Commands, signal_number: int) -> None:
    arms = [commands.base(), commands.like("same")]
    pipe = commands.folder / "pipe"
    os.mkfifo(pipe)
    waits = f"(test -p {pipe} && echo $$ > {pipe} && sleep 1000); "  # tells the test, once
    arms[1] = f"test {{seed}} != 1 || {waits}{arms[1]}"
    command = [sys.executable, "-m", "mantissa", "compare", *arms, "--metric", "val loss ([0-9.]+)"]
    process = subprocess.Popen([*command, "--report", str(commands.report)], stderr=subprocess.PIPE, text=True)
    child = int(pipe.read_text())
    while "wait" not in Path(f"/proc/{process.pid}/wchan").read_text():  # the command has begun before Popen returns
        time.sleep(0.01)
    process.send_signal(signal_number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "interrupted; the same command continues\n")
    assert ends(child)
    before = commands.ran()
    assert before == ["fp32 0", "same 0", "fp32 1000", "fp32 1001"]
    pipe.unlink()
    assert commands.compare(*arms) == 0
    assert len(commands.ran()) == 3 * 4


def test_an_upgrade_of_a_library_is_compared_in_the_commands_themselves(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """As two virtual environments or two commits are: nothing is imported here."""
    (commands.folder / "train.py").write_text(
        "import random, sys, library\n"
        "seed = int(sys.argv[1])\n"
        "print('val loss', 2 + random.Random(seed).gauss(0, 0.02) + library.shift(seed))\n"
    )
    for version, shift in {
        "old": "0",
        "docs": "0.0",
        "patch": "1e-5 * (seed % 3)",
        "major": "0.1 + 1e-5 * (seed % 3)",
    }.items():
        (commands.folder / version).mkdir()
        (commands.folder / version / "library.py").write_text(f"def shift(seed):\n    return {shift}\n")
    begin, end = f"cd {commands.folder} && PYTHONPATH=", f"{sys.executable} train.py {{seed}}"
    assert commands.compare(*(f"{begin}{each} {end}" for each in ("old", "docs", "patch", "major")), "--no-null") == 1
    assert commands.verdicts() == {"docs": "EQUIVALENT", "patch": "EQUIVALENT", "major": "WORSE"}
    said = [line for line in capsys.readouterr().out.splitlines() if "equal in every digit, with each seed" in line]
    assert [line.split(",")[0] for line in said] == ["docs"]
