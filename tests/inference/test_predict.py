"""The classes of photos: as the model evaluates them, with names, for one photo and for a folder."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file

from inference.predict import Photos
from tests.inference.conftest import photo, script
from trainer.data.contract import SampleId

predict = script("inference.predict:predict")
evaluate = script("inference.evaluate:evaluate")


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_a_photo_gets_the_probabilities_of_the_exported_model(here: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.png"
    photo(file, 90, np.random.default_rng(1), size=(50, 70))
    done = predict("run=outputs/images/best", f"path={file}", "precision=fp32", f"output={tmp_path}/one.csv")
    assert done.code == 0, done.err
    config = json.loads(Path("outputs/images/best/config.json").read_text())
    model = torchvision.models.get_model(config["arch"], **config["arch_options"])
    model.load_state_dict(load_file("outputs/images/best/model.safetensors"))
    with Image.open(file) as image:  # what config.json says: the middle square, scaled
        box = (10, 0, 60, 50)
        scaled = image.resize((32, 32), Image.Resampling.BILINEAR, box=box)
    pixels = torch.from_numpy(np.asarray(scaled).copy()).permute(2, 0, 1)[None] / 255
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected = model.eval()((pixels - mean) / std).softmax(1)[0]
    (row,) = read(tmp_path / "one.csv")
    assert "\n1 photo, written to" in done.out
    assert row["path"] == str(file)
    order = expected.argsort(descending=True).tolist()
    assert [row[f"class_{place}"] for place in (1, 2, 3)] == [config["classes"][index] for index in order]
    found = [float(row[f"probability_{place}"]) for place in (1, 2, 3)]
    assert found == pytest.approx(expected[order].tolist(), rel=1e-4)
    assert re.search(rf"one.png +{row['class_1']} {found[0]:.3f}  {row['class_2']} {found[1]:.3f}", done.out)


def test_a_folder_of_photos_is_classified_as_in_evaluation(here: Path, tmp_path: Path) -> None:
    shutil.copytree("outputs/images/best", tmp_path / "best")
    Path(tmp_path / "best" / "notes.txt").write_text("no photo")
    done = predict(f"run={tmp_path}/best", "path=photos", "top=2", "batch_size=7", "precision=bf16")
    assert done.code == 0, done.err
    rows = read(tmp_path / "best" / "predictions.csv")
    assert [row["path"] for row in rows] == sorted(str(path) for path in Path("photos").rglob("*.png"))
    assert list(rows[0]) == ["path", "class_1", "probability_1", "class_2", "probability_2"]
    right = sum(Path(row["path"]).parent.name == row["class_1"] for row in rows)
    whole = ("split=all", "eval_samples=90", "micro_batch_size=7")
    assert evaluate("run=outputs/images", *whole, f"output={tmp_path}").code == 0
    found: dict[str, Any] = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["metrics"]["top1"] == pytest.approx(right / 90)


def test_the_evaluated_part_of_the_export_is_what_is_cut(tmp_path: Path) -> None:
    photo(tmp_path / "a.png", 10, np.random.default_rng(0), size=(80, 80))
    whole, middle = (Photos([tmp_path / "a.png"], {"image_size": 40, "evaluated_part": part}) for part in (1.0, 0.5))
    with Image.open(tmp_path / "a.png") as image:
        for photos, box in ((whole, (0, 0, 80, 80)), (middle, (20, 20, 60, 60))):
            expected = np.asarray(image.resize((40, 40), Image.Resampling.BILINEAR, box=box))
            assert np.array_equal(photos.batch([SampleId(0, None)])["image"][0].permute(1, 2, 0), expected)


def test_a_photo_that_cannot_be_read_is_named_and_all_others_are_classified(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("photos/grey", tmp_path / "photos")
    damaged = tmp_path / "photos/1.png"
    damaged.write_bytes(damaged.read_bytes()[:500])
    rows, messages = [], []
    for limit in (256, 8):  # files from which on other processes decode
        monkeypatch.setattr("inference.predict._WORKERS_FROM", limit)
        done = predict("run=outputs/images", f"path={tmp_path}/photos", "batch_size=4", f"output={tmp_path}/found.csv")
        assert done.code == 1
        assert "\n29 photos, written to" in done.out
        rows.append(read(tmp_path / "found.csv"))
        messages.append(done.err)
    assert messages == 2 * [f"{damaged} cannot be read as an image; it is left out\n"]
    damaged.unlink()
    (tmp_path / "photos/IMG_1.HEIC").touch()
    done = predict("run=outputs/images", f"path={tmp_path}/photos", "batch_size=4", f"output={tmp_path}/all.csv")
    assert (done.code, done.err) == (0, "")
    assert "/all.csv; passed over: 1 .heic\n" in done.out
    whole = read(tmp_path / "all.csv")
    for found in rows:
        assert [(row["path"], row["class_1"]) for row in found] == [(row["path"], row["class_1"]) for row in whole]
        for name in ("probability_1", "probability_3"):  # in batches of other photos, which rounds otherwise
            assert [float(row[name]) for row in found] == pytest.approx([float(row[name]) for row in whole], abs=0.02)
