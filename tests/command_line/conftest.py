"""The real command line, in this process (fast) or in one of its own (signals, exit codes, imports)."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests import forks
from tests.helpers import PROJECT
from trainer.config import options


@dataclass
class Result:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=8")
"""The smallest model."""
SMALLEST = (*BIGNET, "batch_size=4", "data.samples=64", "eval_samples=4")
"""The smallest job, but for its steps."""
Train = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, a separate environment, and caches that only tests use."""
    for name in ("MLFLOW_TRACKING_URI", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    current = tmp_path / "here"
    current.mkdir()
    monkeypatch.chdir(current)
    monkeypatch.setenv("MANTISSA_CACHE", str(tmp_path / "cache"))
    # The machine may be busy with other tests, and two threads that wait for each other then take seconds.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return current


def write_digits(folder: Path, brightness: int) -> None:
    """Images of 8 × 8 pixels below ``brightness`` in ``train/`` and ``val/``, of ten classes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(20):
            path = folder / part / str(number % 10) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, brightness, (8, 8, 3), np.uint8)).save(path)


@pytest.fixture
def user_data(folder: Path) -> None:
    """texts/ with text files, shards/ of token ids, images/ and digits/ with a folder per class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(f"{number}: the quick brown fox jumps over the dog.\n" * 40)
    for index in range(12):
        path = folder / "images" / f"class{index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).save(path)
    write_digits(folder / "digits", 256)
    (folder / "shards").mkdir()
    for name in ("train.bin", "val.bin"):
        rng.integers(0, 99, 3000).astype(np.uint16).tofile(folder / "shards" / name)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], object]], None]:
    """``once(make)``: the current folder as ``make`` fills it; after the first test of a file, a copy of that."""
    kept = tmp_path_factory.mktemp("once") / "kept"

    def fill(make: Callable[[], object]) -> None:
        if kept.is_dir():
            shutil.copytree(kept, Path.cwd(), dirs_exist_ok=True)
        else:
            make()
            shutil.copytree(Path.cwd(), kept)

    return fill


@pytest.fixture
def store(folder: Path, empty_store: Path) -> str:
    """The address of ``mlflow.db`` in the current folder, which is where runs go without any option."""
    return f"sqlite:///{shutil.copy(empty_store, folder / 'mlflow.db')}"


@pytest.fixture
def train(folder: Path, commands_in_this_process: None) -> Train:
    """``train("precision=bf16", …)``: scripts/train.py in this process, with its exit code and output."""
    return _command


def only_run(folder: Path) -> Path:
    """The one run of the current folder."""
    (run,) = (folder / "outputs").iterdir()
    return run


def _command(*overrides: str) -> Result:
    from trainer.run.command import main

    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["scripts/train.py", *overrides]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            code = main()
    finally:
        sys.argv = argv
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture
def succeed(train: Train) -> Train:
    """``train``, which must end without an error."""

    def command(*overrides: str) -> Result:
        done = train(*overrides)
        assert done.code == 0, done.out + done.err
        return done

    return command


@pytest.fixture
def script(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``script(main, "seeds=2", …)``: another script in this process; what it trains are forks, see ``tests.forks``."""
    monkeypatch.setattr("mantissa.verdict.shell.subprocess", forks)

    def command(main: Callable[[list[str]], int], *arguments: str) -> Result:
        capsys.readouterr()
        return Result(options.run(main, None, arguments), *capsys.readouterr())

    return command


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """``start("precision=bf16", …)``: scripts/train.py as a process of its own.

    A fork, see ``tests.forks``, unless ``fresh``: then it imports everything anew, from the script's own project.
    """
    begun: list[subprocess.Popen[str]] = []

    def begin(
        *overrides: str, script: Path = PROJECT / "scripts" / "train.py", fresh: bool = False
    ) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
        process = (subprocess.Popen if fresh else forks.Popen)(
            [sys.executable, str(script), *overrides],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()
