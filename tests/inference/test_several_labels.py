"""A model of images with several labels: trained, evaluated, asked for the labels of photos, and trained further."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score, precision_recall_fscore_support

from tests.command_line.conftest import Result, _command
from tests.inference.conftest import script

evaluate, predict = script("inference.evaluate:evaluate"), script("inference.predict:predict")
TAGS = ("red", "green", "blue")
JOB = ("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=imagefolder", "data.path=photos")
SIZES = ("batch_size=8", "eval_every=3", "tracking=local", "loader.workers=0", "data.valid_fraction=0.4")


def train(*overrides: str) -> Result:
    done = _command(*JOB, *SIZES, *overrides)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """photos/ of three colours that may be mixed, sorted.csv and columns.csv with their labels, one.csv with the first
    one's, and outputs/several.
    """
    folder, rng = tmp_path_factory.mktemp("several"), np.random.default_rng(0)
    (folder / "photos").mkdir()
    tables: dict[str, list[str]] = {
        "sorted.csv": ["file_name,blue,green,red"],
        "columns.csv": ["file_name,blue,red,green"],
        "one.csv": ["file_name,label"],
    }
    for number in range(40):
        on = rng.integers(0, 2, 3)
        pixels = (rng.integers(0, 60, (32, 32, 3)) + 180 * on).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"photos/p{number}.png")
        tables["sorted.csv"].append(f"p{number}.png,{on[2]},{on[1]},{on[0]}")
        tables["columns.csv"].append(f"p{number}.png,{on[2]},{on[0]},{on[1]}")
        tables["one.csv"].append(f"p{number}.png,{'red' if on[0] else 'blue'}")
    for name, lines in tables.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTISSA_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        mixing = ("augment.mixup=0.2", "checkpoint.best=valid/mAP", "steps=3", "run_name=several")
        train("data.labels=sorted.csv", *mixing)
    return folder


@pytest.fixture
def here(trained: Path, commands_in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setenv("MANTISSA_CACHE", str(trained / "cache"))
    return trained


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_by_class_is_scikit_learns_and_the_runs_metrics_come_out_again(here: Path, tmp_path: Path) -> None:
    summary = json.loads(Path("outputs/several/summary.json").read_text())
    done = evaluate("run=outputs/several", f"output={tmp_path}/a")
    assert done.code == 0, done.err
    metrics = json.loads((tmp_path / "a/evaluation.json").read_text())["metrics"]
    assert set(metrics) == {"loss", "exact_match", "mAP", "f1_macro"}
    assert metrics["mAP"] == pytest.approx(summary["best"]["value"], abs=1e-6)
    # The probabilities that predict.py writes, of all photos, are what evaluate.py has counted.
    assert evaluate("run=outputs/several", "split=all", f"output={tmp_path}/b").code == 0
    assert predict("run=outputs/several", "path=photos", f"output={tmp_path}/given.csv").code == 0
    given = {Path(row.pop("path")).stem: [*map(float, row.values())] for row in rows_of(tmp_path / "given.csv")}
    truth = {
        Path(row["file_name"]).stem: [int(row[tag]) for tag in ("blue", "green", "red")]
        for row in rows_of(Path("columns.csv"))
    }
    labels, shares = (np.array([found[name] for name in truth]) for found in (truth, given))
    expected = precision_recall_fscore_support(labels, shares > 0.5, zero_division=np.nan)
    table = rows_of(tmp_path / "b/classes.csv")
    assert [row["name"] for row in table] == ["blue", "green", "red"]
    for name, values in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        assert [float(row[name] or "nan") for row in table] == pytest.approx(values.tolist(), nan_ok=True)
    scores = average_precision_score(labels, shares, average=None)
    assert [float(row["average_precision"]) for row in table] == pytest.approx(scores.tolist(), abs=1e-4)
    assert not (tmp_path / "b/confusion.csv").exists()


def test_labels_in_another_order_are_the_models(here: Path, tmp_path: Path) -> None:
    results = []
    for table in ("sorted.csv", "columns.csv"):
        other = ("data=imagefolder", "data.path=photos", f"data.labels={table}")
        done = evaluate("run=outputs/several/best", "split=all", *other, f"output={tmp_path}")
        assert done.code == 0, done.err
        results.append(json.loads((tmp_path / "evaluation.json").read_text())["metrics"])
    assert results[0]["mAP"] == pytest.approx(results[1]["mAP"], abs=1e-4)
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-4)


def test_data_of_the_other_kind_is_refused(here: Path) -> None:
    refused = evaluate(
        "run=outputs/several", "split=all", "data=imagefolder", "data.path=photos", "data.labels=one.csv"
    )
    assert refused.code == 2
    assert "gives any number of labels to a sample, and in this data one has one label" in refused.err


def test_a_number_of_classes_to_show_is_refused(here: Path) -> None:
    refused = predict("run=outputs/several", "path=photos", "top=2")
    assert refused.code == 2
    assert "top=2 has no effect: a photo may have several labels; leave it out" in refused.err


def test_photos_get_the_labels_above_a_half_perhaps_none(here: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_text("no image")
    for name in ("p0", "p1"):
        (tmp_path / f"{name}.png").write_bytes(Path(f"photos/{name}.png").read_bytes())
    done = predict("run=outputs/several", f"path={tmp_path}", f"output={tmp_path}/given.csv")
    assert done.code == 1
    rows = rows_of(tmp_path / "given.csv")
    assert [list(row) for row in rows] == [["path", "blue", "green", "red"]] * 2
    for row in rows:
        (line,) = [line for line in done.out.splitlines() if line.startswith(row["path"])]
        sure = {tag for tag in TAGS if float(row[tag]) > 0.5}
        assert {tag for tag in TAGS if f" {tag} " in line} == sure
        assert ("no label above 0.5" in line) == (not sure)


def test_a_run_starts_from_it_and_resumes_bit_for_bit(here: Path) -> None:
    done = train("init_from=outputs/several", "data.labels=one.csv", "steps=1", "run_name=one", "--why")
    assert "a new head" in done.out
    typed = ("data.labels=sorted.csv", "deterministic=true", "schedule=constant")
    train(*typed, "steps=4", "run_name=whole")
    train(*typed, "steps=2", "run_name=part")
    assert _command("resume=outputs/part", "steps=4").code == 0
    whole, part = (load_file(f"outputs/{name}/best/model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(tensor, part[name]) for name, tensor in whole.items())
