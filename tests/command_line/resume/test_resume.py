"""Stopped, killed and resumed through real processes: the result is that of a run that was never stopped."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forks
from tests.command_line.conftest import SMALLEST, Start, Train
from tests.helpers import PROJECT
from trainer.data.evaluation import Evaluation
from trainer.files import read_json_lines
from trainer.run.run import Run
from trainer.run.scores import Score
from trainer.run.signals import CLEARED, OUTSIDE
from trainer.trainer import Trainer

# Steps of some ten milliseconds, with dropout and accumulation, and log lines that a stop falls between.
RUN = [
    "recipe=gpt2", "recipe.size=nano", "recipe.context=16", "recipe.dropout=0.1", "data=synthetic",
    "data.vocab_size=300", "batch_size=2", "micro_batch_size=1", "eval_samples=4", "steps=60", "eval_every=10",
    "checkpoint.every=5", "log_every=3", "deterministic=true", "tracking=local",
]  # fmt: skip
NAME = "gpt2-fp32-s0"
SMALL = [
    *SMALLEST, "checkpoint.every=5", "log_every=3", "steps=60", "eval_every=10", "tracking=local", "profiler=none",
    "run_name=small",
]  # fmt: skip
"""Where bits do not matter."""


def logged(run: Path) -> list[dict[str, float]]:
    return list(read_json_lines(run / "metrics.jsonl"))


def wait_for(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert process.poll() is None, process.communicate(timeout=300)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_step(step: int, run: Path, process: subprocess.Popen[str]) -> None:
    wait_for(lambda: any(point["step"] >= step for point in logged(run)), process)


def test_a_signal_saves_and_the_printed_command_resumes(start: Start, folder: Path) -> None:
    """SIGINT is in the tests of sweeps; that a resumed run has the same bits is in those of parity."""
    run = folder / "outputs" / NAME
    process = start(*RUN)
    wait_for_step(12, run, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert "finishing the step, then saving; press Ctrl-C again to stop now\n" in out
    stopped, command = err.splitlines()
    step = int(max(path.name for path in (run / "checkpoints").iterdir()).removeprefix("step-"))
    assert 12 <= step < 60
    assert stopped == f"stopped by SIGTERM after step {step}, saved. Resume with:"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("KILLED", step)

    python, *arguments = shlex.split(command)
    assert python == "python"
    done = forks.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{NAME}, resumed after step {step}\n" in done.stdout
    assert [point["step"] for point in logged(run) if "loss" in point] == [1, *range(3, 61, 3)]
    assert json.loads((run / "summary.json").read_text())["status"] == "FINISHED"
    assert [path.name for path in (folder / "outputs").iterdir()] == [NAME]


def test_a_closed_terminal_saves(folder: Path) -> None:
    """The terminal is gone, and SIGHUP comes twice: from the kernel and from the shell."""
    run, (reading, writing) = folder / "outputs" / NAME, os.openpty()
    command = [sys.executable, str(PROJECT / "scripts" / "train.py"), *RUN, "steps=100000", "log_every=1"]
    process = forks.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing)
    os.close(writing)
    wait_for_step(3, run, process)
    os.close(reading)
    wait_for_step(max(point["step"] for point in logged(run)) + 2, run, process)  # it trains on, unwatched
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
    assert process.wait() == 129
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "KILLED"
    assert (run / "checkpoints" / f"step-{summary['step']:08d}").is_dir()


def test_a_run_whose_folder_is_moved_away_fails_at_once(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step = folder / "outputs" / NAME, Trainer.train_step

    def train_step(self: Trainer, microbatches: Any) -> Any:
        if self.step == 6:
            while not list(run.glob("checkpoints/step-*/manifest.json")):  # of step 5
                time.sleep(0.01)
            run.rename(folder / "kept")
        return step(self, microbatches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        done = train(*RUN)
    said = "metrics.jsonl was removed or moved away while the run trained; put it back and resume"
    assert (done.code, said in done.err, run.exists()) == (1, True, False)
    (folder / "kept").rename(run)
    assert "resumed after step 5" in train(*RUN, "resume=auto").out


def test_a_run_that_does_not_save_removes_no_checkpoints(succeed: Train, folder: Path) -> None:
    saving = ("checkpoint.every=1", "checkpoint.keep=9", "eval_every=100", "schedule=constant")
    succeed(*SMALL, *saving, "steps=4")
    kept = folder / "outputs" / "small" / "checkpoints"
    succeed("resume=outputs/small", "steps=5", "checkpoint=none")
    assert [path.name[-1] for path in sorted(kept.iterdir())] == ["1", "2", "3", "4"]


def test_resume_auto_starts_a_run_or_takes_the_newest_of_that_name(train: Train, succeed: Train, folder: Path) -> None:
    done = train(*SMALL, "steps=2", "resume=auto")
    assert (done.code, "resumed" in done.out) == (0, False), done.err
    again = succeed(*SMALL, "steps=2").out
    assert "small exists; this run is small-2 (resume=auto would have continued it)\n" in again
    for how in ("resume=null", "resume=auto"):  # of a run that saved nothing, as one that was killed at its start
        done = succeed(*SMALL, "steps=2", "run_name=none", "checkpoint=none", how)
        (folder / "outputs/none/summary.json").unlink(missing_ok=True)
    assert "none exists; this run is none-2 (none has no checkpoint)\n" in done.out
    for path in (folder / "outputs").glob("none*"):
        shutil.rmtree(path)
    done = train(*SMALL, "steps=3", "resume=auto")
    assert "small-2, resumed after step 2\n" in done.out
    assert sorted(path.name for path in (folder / "outputs").iterdir()) == ["small", "small-2"]


def test_a_finished_run_is_reported_as_complete(train: Train, succeed: Train, folder: Path) -> None:
    succeed(*SMALL, "steps=2")
    run = folder / "outputs" / "small"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for resume in ("auto", "outputs/small"):
        done = train(*SMALL, "steps=2", f"resume={resume}")
        assert (done.code, done.err) == (0, "")
        assert done.out == "outputs/small is already complete (2 steps); set steps=4 to continue\n"
    done = train(*SMALL, "steps=1", "resume=auto")
    assert done.out == "outputs/small is already complete (2 steps); steps=1 is below that; set steps=4 to continue\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    done = succeed(*SMALL, "steps=4", "resume=auto")
    assert [point["step"] for point in logged(run) if "loss" in point] == [1, 2, 3, 4]


@pytest.mark.parametrize("kept", ["checkpoint.keep=0", "checkpoint=none"])
def test_a_finished_run_is_complete_whatever_it_has_kept(kept: str, train: Train, succeed: Train) -> None:
    job = (*SMALL, "checkpoint.every=auto", "steps=2", kept)
    succeed(*job)
    for resume in ("auto", "outputs/small"):
        done = succeed(*job, f"resume={resume}")
        assert done.out == "outputs/small is already complete (2 steps); it has kept no checkpoint to continue from\n"
    for changed in ("steps=4", "optimizer.lr=0.5"):  # another run, which needs the weights
        assert train(*job, changed, "resume=auto").code == 2
    assert os.listdir("outputs") == ["small"]


def test_a_schedule_that_more_steps_stretch_is_said_with_its_rates(succeed: Train, folder: Path) -> None:
    every = (*SMALL, "log_every=1")
    for run, schedule in (("small", "cosine"), ("flat", "constant")):
        succeed(*every, "steps=9", f"schedule={schedule}", f"run_name={run}")
        done = succeed(f"resume=outputs/{run}", "steps=17")
        found = re.search(r"the schedule now spans 17 steps, not 9: lr (\S+) → (\S+)", done.out + done.err)
        assert (found is not None) == (run == "small")
        if found:
            lr = {line["step"]: f"{line['lr']:.1e}" for line in logged(folder / "outputs" / run) if "lr" in line}
            assert float(found[1]) < float(lr[9]) < float(found[2])
            assert found[2] == lr[10]


@pytest.fixture
def interrupt_at_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Run.evaluate

    def interrupted(run: Run) -> Score | None:
        signal.raise_signal(signal.SIGINT)
        return evaluate(run)

    monkeypatch.setattr(Run, "evaluate", interrupted)


@pytest.mark.usefixtures("interrupt_at_evaluation")
def test_a_signal_ends_an_evaluation_without_checkpoints(train: Train) -> None:
    done = train(*RUN, "eval_every=4", "checkpoint=none", "checkpoint.every=auto")
    said = "stopped by SIGINT after step 4; nothing was saved (checkpoint=none)\n"
    assert (done.code, done.err) == (130, said)


def test_a_signal_ends_the_evaluation_of_the_first_weights(
    train: Train, succeed: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed(*SMALL, "steps=2", "run_name=source")
    batches: list[int] = []
    sums = Evaluation.sums

    def interrupted(evaluation: Evaluation, forward: Any, *given: Any) -> Any:
        def counting(batch: Any, counts: bool) -> Any:
            if not batches:
                signal.raise_signal(signal.SIGINT)
            batches.append(len(batches))
            return forward(batch, counts)

        return sums(evaluation, counting, *given)

    monkeypatch.setattr(Evaluation, "sums", interrupted)
    done = train(*SMALL, "init_from=outputs/source", "eval_samples=16")
    assert (done.code, done.err) == (130, "stopped by SIGINT after step 0; nothing was saved\n")
    assert len(batches) == 1


@pytest.mark.usefixtures("interrupt_at_evaluation")
def test_a_second_signal_ends_the_wait_for_the_checkpoint_and_not_the_summary(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Run._close

    def interrupted_again(run: Run, *given: Any) -> None:
        monkeypatch.setattr(run.writer, "finish", lambda: signal.raise_signal(signal.SIGINT))
        close(run, *given)

    monkeypatch.setattr(Run, "_close", interrupted_again)
    done = train(*RUN, "eval_every=4")
    assert done.code == 130
    assert done.err.startswith("stopped by SIGINT after step 4, saved. Resume with:")
    assert json.loads((folder / "outputs" / NAME / "summary.json").read_text())["status"] == "KILLED"


def test_signals_to_the_whole_process_group_do_not_end_the_loading_processes(start: Start, folder: Path) -> None:
    run = folder / "outputs" / NAME
    process = start(
        *RUN, "loader=pinned", "loader.workers=2", "checkpoint.save_on_signal=[USR1]", "eval_every=20",
        "checkpoint.every=100000", "steps=100000", "schedule=constant", "checkpoint.keep=100",
    )  # fmt: skip
    wait_for_step(3, run, process)

    def signal_all(number: signal.Signals) -> None:
        helpers = psutil.Process(process.pid).children(recursive=True)
        assert len(helpers) >= 4  # the server, Python's tracker of shared memory, and the workers
        for child in helpers:
            child.send_signal(number)
        process.send_signal(number)

    signal_all(signal.SIGUSR1)
    wait_for(lambda: list((run / "checkpoints").glob("step-*/manifest.json")), process)
    saved = logged(run)[-1]["step"]
    wait_for_step(int(saved) + 25, run, process)  # over an evaluation, which starts workers of its own
    signal_all(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert re.fullmatch(r"stopped by SIGTERM after step \d+, saved\. Resume with:\n.*\n", err)


def test_a_killed_run_leaves_no_loading_processes_behind(start: Start, folder: Path) -> None:
    process = start(*RUN, "loader=pinned", "loader.workers=2", "steps=100000", "schedule=constant")
    wait_for_step(3, folder / "outputs" / NAME, process)
    helpers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=300)  # they would hold its output open
    assert not psutil.wait_procs(helpers, timeout=300)[1]


def test_a_second_interrupt_ends_the_run_immediately(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_step, received = Trainer.train_step, []

    def interrupted(trainer: Trainer, microbatches: Any) -> Any:
        record = take_step(trainer, microbatches)
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
            received.append(trainer.step)  # the first one waits for the end of the step
            signal.raise_signal(signal.SIGINT)
        return record

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    done = train(*RUN)
    assert (done.code, done.err, received) == (
        130,
        "second signal: stopped immediately. No checkpoint was saved.\n",
        [2],
    )
    assert not (folder / "outputs" / NAME / "checkpoints").exists()
    assert not (folder / "outputs" / NAME / "summary.json").exists()


def test_an_interrupt_before_training_leaves_no_traceback(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "text.txt").write_text("a text for a tokenizer of its own. " * 100)
    monkeypatch.setattr("recipes.data.text.tokens._build", lambda *_: signal.raise_signal(signal.SIGINT))
    done = train("recipe=gpt2", "data=text", "data.path=text.txt", "tracking=local")
    assert done.code == 130
    assert done.out.startswith("tokenizing text")
    assert done.err.strip() == "interrupted before or after training; saved files are unchanged"
    assert not (folder / "outputs").exists()


def test_a_signal_while_the_program_is_loaded_leaves_no_traceback(folder: Path) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, PROJECT / "scripts/train.py", *RUN], cwd=folder, stderr=theirs)
    said = b""
    while not said.endswith("recipes …".encode()):  # a terminal may hand on what was written in parts
        said += os.read(ours, 99)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143
    with os.fdopen(ours, newline="\n") as terminal:
        assert terminal.readline() == f"{CLEARED}{OUTSIDE}\r\n"
