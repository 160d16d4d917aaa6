"""Tiny trained models, and the command lines that use them, in this process."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line.conftest import Result, _command
from trainer.config.options import run as run_script

TEXT = "The quick brown fox jumps over the lazy dog; “naïve” ones wait.\n"
SIZES = ("batch_size=8", "eval_every=2", "eval_samples=24", "tracking=local", "log_every=2")
JOBS = {
    "gpt2": ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "precision=bf16", "data.vocab_size=300"),
    "chars": ("recipe=llama", "recipe.context=16", "data.tokenizer=chars"),
    "windows": (
        *("recipe=causal_lm", "recipe.model_type=gemma3_text", "recipe.context=16", "data.vocab_size=300"),
        *("recipe.config.num_hidden_layers=2", "recipe.config.hidden_size=32", "recipe.config.intermediate_size=48"),
        *("recipe.config.num_attention_heads=4", "recipe.config.num_key_value_heads=2", "recipe.config.head_dim=8"),
        *("recipe.config.layer_types=[sliding_attention,full_attention]", "recipe.config.sliding_window=8"),
        *("recipe.config.max_position_embeddings=16", "recipe.config.initializer_range=0.2"),
    ),
    "bert": ("recipe=bert", "recipe.context=32", "data.vocab_size=300"),
    "t5": ("recipe=t5", "recipe.context=32", "data.vocab_size=300"),
    "images": (
        *("recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "recipe.image_size=32", "precision=bf16"),
        "augment.mixup=0.2",
    ),
}


def photo(path: Path, brightness: int, rng: np.random.Generator, size: tuple[int, int] = (40, 36)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((rng.integers(0, 60, (*size, 3)) + brightness).astype(np.uint8)).save(path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with data (text.txt, other.txt, photos/), and outputs/ with a run of each of JOBS."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("".join(f"{number}: {TEXT}" for number in range(300)))
    (folder / "other.txt").write_text("".join(f"{TEXT}{number * 7}\n" for number in range(150)))
    rng = np.random.default_rng(0)
    for number in range(30):
        for name, brightness in (("bright", 180), ("dark", 0), ("grey", 90)):
            photo(folder / "photos" / name / f"{number}.png", brightness, rng)
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTISSA_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        for name, job in JOBS.items():
            data = "data=text data.path=text.txt"
            if name == "images":
                data = "data=imagefolder data.path=photos loader.workers=0"
            done = _command(*job, *data.split(), *SIZES, f"run_name={name}", "steps=4")
            assert done.code == 0, done.err
    os.chdir(before)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def here(trained: Path, commands_in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the trained models as the current one; what commands write goes to ``tmp_path / "out"``."""
    monkeypatch.chdir(trained)
    monkeypatch.setenv("MANTISSA_CACHE", str(trained / "cache"))
    return trained


def script(main: str) -> Callable[..., Result]:
    """``script("inference.evaluate:evaluate")("run=…")``: its exit code and output."""

    def call(*arguments: str) -> Result:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_script(main, "", list(arguments))
        out.flush()
        return Result(code, out.buffer.getvalue().decode(), err.getvalue())  # type: ignore[attr-defined]

    return call
