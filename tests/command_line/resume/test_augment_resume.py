"""A run keeps its augmentation when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RUN = [
    "recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "recipe.image_size=32", "data=imagefolder", "data.path=photos",
    "batch_size=4", "eval_samples=2", "eval_every=2", "schedule=constant", "schedule.warmup_steps=0",
    "loader.workers=0", "deterministic=true", "tracking=local",
]  # fmt: skip


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes()


def test_a_run_resumes_with_its_augmentation(train: Callable[..., Any], folder: Path) -> None:
    for index in range(12):  # small, so that auto would leave them whole
        (folder / "photos" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / "ab"[index % 2] / f"{index}.png")
    whole, old, new = (folder / "outputs" / name for name in ("whole", "old", "new"))

    assert train(*RUN, "augment=imagenet", "steps=4", "run_name=whole").code == 0
    assert train(*RUN, "augment=imagenet", "steps=2", "run_name=old").code == 0
    done = train(*RUN, "augment=none", "steps=4", f"resume={old}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "augment was imagenet, now none" in done.err
    assert train(*RUN, "steps=4", f"resume={old}").code == 0
    assert weights(old) == weights(whole)
    assert json.loads((old / "config.json").read_text())["augment"] == "imagenet"

    done = train(*RUN, "steps=2", "run_name=new")
    assert done.code == 0
    assert "augment=none" in done.out  # chosen, and shown with what else there is
    assert "augment=light" in done.out
    assert json.loads((new / "config.json").read_text())["augment"] == "none"
    assert train(*RUN, "steps=4", f"resume={new}").code == 0
    assert weights(new) != weights(whole)
