"""Several runs from one command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncher

from tests import forks
from tests.command_line.conftest import SMALLEST, Train
from tests.tracked import asked
from trainer.config.command_line import CommandLine
from trainer.run import command
from trainer.run import run as run_module
from trainer.tracking.store import VIEW_TAG
from trainer.trainer import Trainer

NAMES = ["bignet-bf16-s0", "bignet-bf16-s1", "bignet-fp32-s0", "bignet-fp32-s1"]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def mlflow_runs(store: str) -> list[tuple[str, str, str]]:
    query = "select experiments.name, runs.name, runs.status from runs join experiments using (experiment_id)"
    return asked(store, f"{query} order by runs.name")


def outputs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "outputs").iterdir())


def test_a_sweep_makes_a_folder_and_an_mlflow_run_for_each(
    succeed: Train, folder: Path, store: str, scratch: Path
) -> None:
    done = succeed("-m", *SMALLEST, "precision=fp32,bf16", "seed=0,1", "steps=2", "profiler=none")
    assert done.err == ""
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == [NAMES[2], NAMES[3], NAMES[0], NAMES[1]]
    assert lines[4] == ""
    assert lines[5].split()[:3] == ["precision", "seed", "best"]
    assert lines[-1] == f"best: {lines[6].split()[0].join(['bignet-', '-s'])}{lines[6].split()[1]}"
    assert max(map(len, lines)) <= 100
    assert len(lines) == 14  # with a mean for each precision
    assert outputs(folder) == NAMES
    assert mlflow_runs(store) == [("bignet", name, "FINISHED") for name in NAMES]
    for name in NAMES:
        _, precision, seed = name.split("-")
        config = json.loads((folder / "outputs" / name / "config.json").read_text())
        assert (config["precision.mode"], f"s{config['seed']}") == (precision, seed)
        assert config["tags"] == {"group": "sweep-precision-seed", "swept": "precision seed"}
    ((view,),) = asked(store, "select value from experiment_tags where key = ?", VIEW_TAG)
    assert re.findall("params.`(.+?)`", view)[0] == "seed"
    assert len(set(asked(store, "select run_uuid from metrics where key = 'valid/loss'"))) == 4
    # What Hydra writes about a sweep is gone, and nothing of it is in the current folder.
    assert not list(scratch.glob("mantissa*"))
    assert {path.name for path in folder.iterdir()} == {"mlartifacts", "mlflow.db", "mlflow.db-init.lock", "outputs"}


def test_a_failing_run_does_not_lose_the_others_and_is_not_repeated(train: Train, folder: Path, store: str) -> None:
    diverges = ["optimizer=sgd", "schedule=constant", "schedule.warmup_steps=0", "optimizer.lr=0.01,30", "steps=60"]
    command = ("-m", *SMALLEST, *diverges, "profiler=none", "eval_every=60")
    done = train(*command)
    assert done.code == 3
    assert "Traceback" not in done.out + done.err
    assert "the gradients are not finite" in done.err
    good, bad = "bignet-fp32-s0-lr_0.01", "bignet-fp32-s0-lr_30"
    assert outputs(folder) == [good, bad]
    assert [run[1:] for run in mlflow_runs(store)] == [(good, "FINISHED"), (bad, "FAILED")]
    assert done.err.count("\n") == 1
    assert done.err.startswith(f"error: {bad}: step ")
    head, first, last, _, best = (line.split() for line in done.out.splitlines()[-5:])
    assert (head[0], first[0], first[-1], last) == ("lr", "0.01", "finished", ["30", "failed"])
    assert best == ["best:", good]

    again = train(*command)
    assert again.code == 3
    assert again.out.count("already complete") == 1
    assert again.err.startswith(f"error: {bad}: outputs/{bad} turned non-finite at step ")
    assert again.err.endswith("; remove the folder to repeat the run\n")
    assert outputs(folder) == [good, bad]


def test_each_run_is_freed_before_the_next_begins(
    succeed: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Trainer]] = []
    alive: list[int] = []

    class Watched(Trainer):
        def __init__(self, *arguments: Any) -> None:
            alive.append(sum(trainer() is not None for trainer in made))
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(run_module.Run, "trainer_class", Watched)
    succeed("-m", *SMALLEST, "seed=0,1,2", "steps=2", "tracking=local")
    assert alive == [0, 0, 0]  # a run that stays counts as the next one's memory


def test_a_command_runs_only_what_is_missing_and_other_options_make_other_runs(succeed: Train, folder: Path) -> None:
    command = ("-m", *SMALLEST, "precision=fp32,bf16", "checkpoint=none", "tracking=local", "eval_every=2")
    first = succeed(*command, "steps=2", "seed=0")
    assert "already complete" not in first.out
    files = {path: path.stat().st_mtime_ns for path in (folder / "outputs").rglob("*") if path.name != ".lock"}
    again = succeed(*command, "steps=2", "seed=0,1")
    assert again.err == ""
    assert again.out.count("is already complete") == 2
    assert outputs(folder) == NAMES
    assert {path: path.stat().st_mtime_ns for path in files} == files
    scores = {tuple(line.split()[:2]): line.split()[2] for line in again.out.splitlines()[-8:-4]}
    assert len(scores) == 4
    before = {(line.split()[0], "0"): line.split()[1] for line in first.out.splitlines()[-4:-2]}
    assert before.items() <= scores.items()

    longer = succeed(*command, "steps=3", "seed=0")  # resumed, its schedule would not be that of three steps
    assert "already complete" not in longer.out
    assert outputs(folder) == sorted([*NAMES, "bignet-bf16-s0-2", "bignet-fp32-s0-2"])
    assert succeed(*command, "steps=2", "seed=0").out.count("already complete") == 2


def test_what_auto_became_does_not_make_it_another_run(succeed: Train, folder: Path) -> None:
    small = ("recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "loader.workers=auto")
    command = (*small, "batch_size=2", "eval_samples=2", "steps=1", "tracking=local", "resume=same")
    succeed(*command)
    (name,) = outputs(folder)
    assert succeed(*command).out == f"outputs/{name} is already complete\n"
    assert outputs(folder) == [name]


def test_an_interrupted_sweep_is_continued_by_the_same_command(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("-m", *SMALLEST, "seed=0,1,2", "steps=4", "eval_every=1", "tracking=local")
    step = Trainer.train_step

    def interrupted(trainer: Trainer, microbatches: Any) -> Any:
        if trainer.config.seed == 1 and trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        return step(trainer, microbatches)

    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "train_step", interrupted)
        stopped = train(*command)
    assert stopped.code == 130
    assert [line.split()[-1] for line in stopped.out.splitlines()[-6:-4]] == ["finished", "stopped"]
    done = train(*command)
    assert (done.code, done.err) == (0, "")
    assert done.out.count("already complete") == 1
    assert "\nbignet-fp32-s1, resumed after step 3  valid loss " in done.out
    assert outputs(folder) == [f"bignet-fp32-s{seed}" for seed in range(3)]
    assert sorted(line.split()[0] for line in done.out.splitlines()[-6:-3]) == ["0", "1", "2"]


def test_an_interrupt_while_a_run_is_closed_ends_the_sweep_after_it(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_best = run_module.export_best

    def interrupted(*given: Any) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        return export_best(*given)

    monkeypatch.setattr(run_module, "export_best", interrupted)
    done = train("-m", *SMALLEST, "seed=0,1", "steps=2", "tracking=local")
    assert done.code == 130
    assert done.err == "received SIGINT at the end of the run, which is complete\n"
    assert outputs(folder) == [NAMES[2]]
    assert json.loads((folder / "outputs" / NAMES[2] / "summary.json").read_text())["status"] == "FINISHED"


def elsewhere() -> None:
    """The program of the following test: scripts/train.py, whose launcher starts each job in a process of its own."""
    launch = BasicLauncher.launch

    def in_processes(self: BasicLauncher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        for number, overrides in enumerate(job_overrides):
            if not (pid := os.fork()):
                with contextlib.suppress(BaseException):
                    launch(self, [overrides], initial_job_idx + number)
                os._exit(0)
            os.waitpid(pid, 0)
        raise ValueError("submitted, then:\na job was lost")

    BasicLauncher.launch = in_processes  # type: ignore[method-assign]
    CommandLine.value = lambda self, key, default=None: key == "hydra/launcher" or default  # type: ignore[assignment]
    sys.argv[0] = "scripts/train.py"
    sys.exit(command.main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork")
def test_a_sweep_of_jobs_elsewhere_fails_with_its_launcher_and_their_table_follows(train: Train, folder: Path) -> None:
    options = [*SMALLEST, "steps=2", "profiler=none", "tracking=local", "clip=norm"]
    # In a process of its own: a fork of this one cannot train once an earlier test has started autograd's threads.
    program = ["-c", "from tests.command_line.test_sweep import elsewhere; elsewhere()", "-m", *options, "seed=0,1"]
    done = forks.run([sys.executable, *program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: a job or its launcher failed: ValueError: a job was lost\n" in done.stderr
    assert outputs(folder) == [".jobs", "bignet-fp32-s0", "bignet-fp32-s1"]
    (jobs,) = (folder / "outputs" / ".jobs").iterdir()
    assert f"what the jobs printed: {jobs}" in done.stdout
    again = train("-m", *options, "seed=0,1")
    assert again.out.count("already complete") == 2


def test_a_value_that_is_named_twice_is_trained_once(succeed: Train, folder: Path) -> None:
    done = succeed("-m", *SMALLEST, "seed=0,1,0", "steps=1", "tracking=local")
    assert outputs(folder) == [NAMES[2], NAMES[3]]
    assert "mean of 2" in done.out


def test_a_sweep_in_a_yaml_file_is_refused_with_what_to_type(train: Train, folder: Path) -> None:
    experiment = folder / "mine/conf/experiment/swept.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 0,1\n")
    for flag in ([], ["-m"]):
        refused = train(*flag, *SMALLEST, "recipe_path=mine", "experiment=swept", "steps=1")
        assert (refused.code, "remove it there, and type -m seed=0,1\n" in refused.err) == (2, True), refused.err
    assert not (folder / "outputs").exists()
