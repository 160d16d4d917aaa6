"""``python -m mantissa certify`` with real processes, which wait where they are to be killed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mantissa.__main__ import main
from mantissa.killing import START, Attempt, Moment, planned, run

LOOP = """
import json, os, random, signal, sys
out, kind = sys.argv[1], sys.argv[2]
path = os.path.join(out, "last.json")
state = {"step": 0, "loss": 1.0}
noise = random.Random(1 if kind != "random" else None)
if os.path.exists(path) and kind != "no checkpoint":
    state = json.load(open(path))
    if kind == "broken":
        sys.exit("the checkpoint is unreadable")
while state["step"] < 20:
    state["step"] += 1
    state["loss"] = state["loss"] * 0.9 if kind != "random" else noise.random()
    mark = os.path.join(out, "waited at %d" % state["step"])
    waits = out.endswith("killed") and state["step"] in (7, 12) and not os.path.exists(mark)
    if waits:
        open(mark, "w")
    print("step", state["step"], "samples", [state["step"]])
    print("step", state["step"], "loss", state["loss"])
    if state["step"] % 5 == 0:
        json.dump(state, open(path + ".new", "w"))
        os.replace(path + ".new", path)
    if waits:
        signal.pause()
"""
METRIC = r"step (\d+) loss (\S+)"


@pytest.fixture
def certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Certifies the loop, which is killed after two steps and once as it starts."""
    here = tmp_path / "a folder [1]"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(
        "mantissa.commands.certify.planned",
        lambda *plan: [Moment(7, 0.0), Moment(START, 0.0), Moment(12, 0.0)],
    )
    Path("loop.py").write_text(LOOP)

    def command(kind: str, *options: str) -> int:
        given = {"--metric": METRIC, "--data": r"step (\d+) samples (.*)", "--same": "{out}/last.json"}
        given |= dict(zip(options[::2], options[1::2], strict=True))
        command = f"{sys.executable} loop.py {{out}} '{kind}'"
        return main(["certify", command, *(part for option in given.items() for part in option)])

    return command


def test_a_loop_that_loses_nothing(certify: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert certify("good") == 0
    told = capsys.readouterr().out
    assert told.startswith("BITWISE\n3 SIGKILLs, 2 resumed after the first step, 4 steps replayed.\n")
    assert "Compared: the lines of 20 steps, 2 values in files" in told
    written = {path.suffix: path.read_text() for path in Path("mantissa-certificate").glob("certificate.*")}
    assert written[".txt"] == told
    assert "BITWISE" in written[".html"]
    found = json.loads(written[".json"])
    assert [start["steps"] for start in found["starts"]] == [[1, 7], None, [6, 12], [11, 20]]
    assert (certify("good"), "exists; remove it" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("no checkpoint", "None of 4 starts continued where the one before was: each began at step 1."),
        ("broken", "Start 3 ended with status 1: the checkpoint is unreadable"),
    ],
)
def test_what_does_not_resume(
    kind: str, named: str, certify: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify(kind) == 6
    assert capsys.readouterr().out.splitlines()[:2] == ["NOT RESUMED", f"- {named}"]


def test_a_loop_that_is_not_deterministic(certify: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert certify("random") == 0
    verdict, *facts = capsys.readouterr().out.splitlines()
    assert verdict == "BITWISE WHERE DETERMINISTIC"
    assert facts[-2:] == [
        "Not judged, since two undisturbed runs differ: 20 metric lines (1, 2, 3, 4, 5, …).",
        "Not judged, since two undisturbed runs differ: 1 value (last.json: loss).",
    ]
    command = f"{sys.executable} loop.py {{out}} random"
    assert main(["certify", command, "--metric", METRIC, "--report", "other"]) == 2
    assert "agree in nothing; let it set its seeds" in capsys.readouterr().err


def test_clean_in_the_place_of_a_folder_for_each_run(certify: Callable[..., int]) -> None:
    again = "rm -rf here && mkdir here"
    assert main(["certify", f"{sys.executable} loop.py here good", "--metric", METRIC, "--clean", again]) == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--metric", "loss"), "has 0 groups; give two"),
        (("--metric", "("), "is no regular expression"),
        (("--metric", "epoch (.*) loss (.*)"), "matches --metric"),
        (("--data", "epoch (.*) data (.*)"), "matches --data"),
        (("--metric", r"(step) \d+ (.*)"), "finds the step 'step'; let (…) find a whole number"),
        (("--kills", "0"), "--kills 0 certifies nothing; give 1 or more"),
        (("--same", "{out}/first.json"), "wrote no file {out}/first.json"),
    ],
)
def test_mistakes(
    options: tuple[str, ...], named: str, certify: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify("good", *options) == 2
    assert named in capsys.readouterr().err


def test_a_command_without_a_folder_or_that_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = str(tmp_path / "report")
    assert main(["certify", "true", "--metric", METRIC, "--report", report]) == 2
    assert "write {out} for the folder of results in the command, or give --clean" in capsys.readouterr().err
    assert main(["certify", "echo {out}; false", "--metric", METRIC, "--report", report]) == 2
    assert f"ended with status 1, undisturbed: {report}/whole" in capsys.readouterr().err
    cleaned = ("--clean", "false", "--report", f"{report}s")
    assert main(["certify", "true", "--metric", METRIC, *cleaned]) == 2
    assert "--clean 'false' ended with exit code 1" in capsys.readouterr().err


def test_kills_reach_processes_in_groups_of_their_own(tmp_path: Path) -> None:
    """As the workers of torchrun are."""
    worker = "import os, time; parent = os.getppid(); print('step 1 loss 1', flush=True)\n"
    worker += "while os.getppid() == parent: time.sleep(0.01)\nprint('survived')"
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], start_new_session=True)"
    (tmp_path / "starter.py").write_text(starter)
    command = f"{sys.executable} {tmp_path}/starter.py; true"
    done = run(command, tmp_path / "log", re.compile(METRIC), Moment(1, 0.0))
    assert done.killed
    assert [line for _, line in done.lines] == ["step 1 loss 1"]


def test_moments_are_drawn_after_steps_in_their_order() -> None:
    lines = [(2.0 + step / 10, f"step {step} loss 1") for step in range(1, 101)]
    moments = planned(Attempt([(0.5, "hello"), *lines], 40.0), re.compile(METRIC), 20, seed=3)
    assert moments == planned(Attempt([(0.5, "hello"), *lines], 40.0), re.compile(METRIC), 20, seed=3)
    after = [moment for moment in moments if moment.step != START]
    assert (len(moments), len(after)) == (20, 16)
    assert [moment.step for moment in after] == sorted(moment.step for moment in after)
    assert all(0 <= moment.delay_s <= 0.1 for moment in after if moment.step < 100)
    assert after[-1].step > 80
    assert all(0 <= moment.delay_s <= 2.1 for moment in moments if moment.step == START)
    assert moments[0].step > 0
