"""Commands on a GPU: what is trained there is evaluated, continued and labelled there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.command_line.conftest import _command
from tests.gpu.conftest import IMAGES
from tests.inference.conftest import photo, script
from trainer.hardware import detect

SMALL = ("tracking=local", "steps=2", "batch_size=8", "micro_batch_size=4", "profiler=none")
TEXT = (
    "recipe=gpt2",
    "recipe.size=nano",
    "recipe.context=16",
    "data=synthetic",
    "data.vocab_size=99",
)


def trained(*overrides: str) -> None:
    done = _command("device=cuda", "run_name=run", *SMALL, *overrides)
    assert done.code == 0, done.out + done.err


def answer(command: str, *arguments: str) -> str:
    done = script(f"inference.{command}:{command}")("run=outputs/run", "device=cuda", *arguments)
    assert done.code == 0, done.err
    return done.out


def test_a_language_model_is_evaluated_and_continues_a_text(
    gpu: object, commands_in_this_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    half = detect("cuda").half.name
    trained(*TEXT, f"precision={half}", "ema=default", "checkpoint.every=1", "eval_samples=20")
    out = answer("evaluate", f"precision=fp32,{half}", "loader=plain", "micro_batch_size=1")
    assert half in out
    assert "perplexity" in out
    assert answer("generate", "prompt=<1><2>", "max_new_tokens=4").startswith("<1><2>")


def test_a_classifier_is_evaluated_and_labels_photos(
    gpu: object, commands_in_this_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(*IMAGES, "precision=fp16", "metrics=[f1_macro,auroc]", "eval_samples=8")
    assert "top1" in answer("evaluate", f"precision={detect('cuda').half.name}")
    photo(tmp_path / "photo.png", 90, np.random.default_rng(0))
    answer("predict", "path=photo.png")
    assert "photo.png" in (tmp_path / "outputs" / "run" / "predictions.csv").read_text()
