"""``init_from=RUN`` of images: the normalisation of the weights, and a head for the classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line.conftest import Train, write_digits
from tests.helpers import start
from trainer.config.compose import compose as composed
from trainer.data.contract import SampleId

SHORT = ("tracking=local", "device=cpu", "batch_size=4", "eval_samples=8", "steps=2")
DARK = ("data=imagefolder", "data.path=dark", "loader.workers=0")


@pytest.fixture
def digits_source(succeed: Train, folder: Path, once: Callable[[Callable[[], object]], None]) -> Path:
    """A finished run on scikit-learn's digits; dark/ has other digits of a tenth of their brightness."""

    def make() -> None:
        write_digits(folder / "dark", 26)
        succeed(*SHORT, "recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "run_name=first")

    once(make)
    return Path("outputs/first")


def normalisation(run: str) -> list[Any]:
    content = json.loads(Path("outputs", run, "best", "config.json").read_text())
    return [content["mean"], content["std"]]


def test_images_are_normalised_as_those_of_the_first_run(digits_source: Path, succeed: Train) -> None:
    new = ("recipe=resnet", f"init_from={digits_source}", *SHORT, *DARK)
    done = succeed(*new, "run_name=part")
    assert "mean=[0.305, 0.305, 0.305]" in " ".join(done.out.split())
    wanted = normalisation("first")
    assert wanted[0] == pytest.approx([0.305] * 3, abs=1e-3)
    shutil.rmtree(digits_source)
    succeed("resume=outputs/part", "steps=3")
    config = json.loads(Path("outputs/part/config.json").read_text())
    assert [config[f"recipe.{name}"] for name in ("mean", "std")] == wanted
    assert normalisation("part") == wanted
    assert config["recipe.image_size"] == 32  # the images in dark/ have 8 pixels


def test_the_normalisation_of_a_run_without_an_export_is_known_and_a_typed_one_stays(digits_source: Path) -> None:
    wanted = normalisation("first")
    shutil.rmtree(digits_source / "best")
    new = ["recipe=resnet", f"init_from={digits_source}", *DARK]
    trainer = start(composed(new))
    batch = trainer.datasets.valid.batch([SampleId(0, None)])["image"]
    own: Any = trainer.model
    assert batch.shape[2:] == (32, 32)
    pixels = own.normalise(batch, torch.contiguous_format)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in wanted)
    torch.testing.assert_close(pixels, (batch / 255 - mean) / std)
    typed: Any = start(composed([*new, "recipe.mean=[0.5,0.5,0.5]", "recipe.std=[0.2,0.2,0.2]"])).datasets
    assert (typed.mean, typed.std) == ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    data: Any = start(composed([*new, "recipe.mean=null", "recipe.std=null"])).datasets
    assert data.mean == (0.485, 0.456, 0.406)  # of a folder of images: ImageNet's
    assert not [choice for choice in trainer.decisions if choice.key == "init_from"]
