"""Evaluation gives what training reported, on its own data and on other data, for every recipe."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from inference.data import open_data
from inference.options import RunOptions
from inference.run_config import configure
from recipes.resnet import ResNet
from tests.command_line.conftest import _command
from tests.inference.conftest import SIZES, photo, script
from trainer.files import read_json_lines

evaluate = script("inference.evaluate:evaluate")


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / name).read_text(encoding="utf-8").splitlines()))


def recorded(run: Path) -> dict[str, float]:
    """The metrics of the evaluation that the run calls its best."""
    best = json.loads((run / "summary.json").read_text())["best"]["step"]
    lines = [line for line in read_json_lines(run / "metrics.jsonl") if line["step"] == best]
    return {key.removeprefix("valid/"): line[key] for line in lines for key in line if key.startswith("valid/")}


@pytest.mark.parametrize("name", ["gpt2", "chars", "windows", "bert", "t5", "images"])
def test_the_best_metrics_of_the_run_come_out_again(name: str, here: Path, tmp_path: Path) -> None:
    done = evaluate(f"run=outputs/{name}", f"output={tmp_path}")
    assert done.code == 0, done.err
    expected = recorded(Path("outputs", name))
    found = results(tmp_path)["metrics"]
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert f"loss {expected['loss']:.4f}" in done.out
    assert "warning" not in done.out


@pytest.mark.parametrize("split", ["valid", "train"])
def test_data_that_has_changed_since_training_is_said(split: str, here: Path, tmp_path: Path) -> None:
    run = shutil.copytree("outputs/chars", tmp_path / "run")
    text = tmp_path / "edited.txt"
    text.write_text(Path("text.txt").read_text().replace("lazy", "calm"))
    options = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(options | {"data.path": str(text)}))
    said = {typed: evaluate(f"run={run}", f"split={split}", *typed.split()).out for typed in ("", "recipe.context=8")}
    assert ["warning" in out for out in said.values()] == [True, False]  # another context asks for other samples


def test_results_are_in_the_run_folder_unless_another_is_given(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    loss = ResNet.loss

    def watched(self: ResNet, model: Any, batch: Any) -> Any:
        output = loss(self, model, batch)
        seen.append((torch.is_inference_mode_enabled(), output.loss_sum.requires_grad, model.training))
        return output

    monkeypatch.setattr(ResNet, "loss", watched)
    assert evaluate("outputs/images", "metrics=[f1_macro]").code == 0
    assert set(seen) == {(True, False, False)}  # no graph is made
    folder = Path("outputs/images/evaluation")
    names = ["classes.csv", "confusion.csv", "evaluation.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    rows = list(csv.reader((folder / "confusion.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["class \\ given", "bright", "dark", "grey"]
    found = results(folder)
    assert sum(int(cell) for row in rows[1:] for cell in row[1:]) == found["samples"]
    scores = [float(row["f1"]) for row in rows_of(folder, "classes.csv")]
    assert found["metrics"]["f1_macro"] == pytest.approx(np.mean(scores))


def test_photos_of_some_of_the_classes_in_another_order_get_the_models_labels(here: Path, tmp_path: Path) -> None:
    for name in ("grey", "dark"):
        shutil.copytree(f"photos/{name}", tmp_path / "two" / name)
    data = ("data=imagefolder", f"data.path={tmp_path}/two", "split=all", "loader.workers=0")
    assert evaluate("run=outputs/images", *data, f"output={tmp_path}").code == 0
    two = {row["name"]: row for row in rows_of(tmp_path, "classes.csv")}
    assert evaluate("run=outputs/images", "split=all", f"output={tmp_path}").code == 0
    own = {row["name"]: row for row in rows_of(tmp_path, "classes.csv")}
    for name in ("grey", "dark"):
        assert (two[name]["samples"], two[name]["recall"]) == ("30.0", own[name]["recall"])
    photo(tmp_path / "two" / "green" / "1.png", 9, np.random.default_rng(0))
    refused = evaluate("run=outputs/images", *data)
    assert refused.code == 2
    assert "the class 'green', which the model was not trained on (its 3 classes: bright, dark, grey)" in refused.err


@pytest.mark.parametrize("name", ["gpt2", "chars", "windows", "bert", "t5"])
def test_other_text_is_encoded_with_the_models_tokenizer(name: str, here: Path, tmp_path: Path) -> None:
    exported = RunOptions(f"outputs/{name}").find()
    overrides = ["data=text", "data.path=other.txt"]
    datasets: Any = open_data(configure(exported, overrides), exported, "valid")
    ids = datasets.tokens.train[:50].tolist()
    text = Path("other.txt").read_text()
    assert text.startswith(AutoTokenizer.from_pretrained(exported.folder).decode(ids))
    assert datasets.vocabulary == exported.config["vocab_size"]
    done = evaluate(f"run=outputs/{name}", *overrides, f"output={tmp_path}")
    assert done.code == 0, done.err
    assert results(tmp_path)["samples"] == len(datasets.valid)


def test_an_exported_folder_alone_has_what_is_needed(here: Path, tmp_path: Path) -> None:
    shutil.copytree("outputs/images/best", tmp_path / "images")
    shutil.copytree("outputs/gpt2/best", tmp_path / "text")
    photos = ("data=imagefolder", "data.path=photos", "loader.workers=0", "precision=bf16", f"output={tmp_path}")
    assert evaluate(f"run={tmp_path}/images", *photos).code == 0
    assert results(tmp_path)["metrics"]["loss"] == pytest.approx(recorded(Path("outputs/images"))["loss"], rel=1e-3)
    text = ("data=text", "data.path=text.txt", "precision=bf16", "eval_samples=24", f"output={tmp_path}")
    assert evaluate(f"run={tmp_path}/text", *text).code == 0
    assert results(tmp_path)["metrics"]["loss"] == pytest.approx(recorded(Path("outputs/gpt2"))["loss"], rel=1e-4)
    refused = evaluate(f"run={tmp_path}/text")
    assert refused.code == 2
    assert "add data=…, such as data=text data.path=notes.txt" in refused.err


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_a_run_in_mlflow_brings_its_weights_and_its_config(
    here: Path, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    data = here / "text.txt"
    monkeypatch.chdir(tmp_path)
    job = ("recipe=gpt2", "recipe.size=nano", "recipe.context=32", "data=text", f"data.path={data}", "steps=2")
    done = _command(*job, "batch_size=4", "eval_samples=8", "run_name=sent", "tracking.system_metrics=false")
    assert done.code == 0, done.err
    run_id = json.loads(Path("outputs/sent/tracking.json").read_text())["run_id"]
    shutil.move("outputs/sent", "gone")
    for again in (False, True):
        done = evaluate(f"run=mlflow:{run_id}")
        assert done.code == 0, done.err
        assert ("fetching" in done.out) is not again
    folder = Path(f"outputs/mlflow-{run_id}")
    assert results(folder / "evaluation")["metrics"]["loss"] == pytest.approx(recorded(Path("gone"))["loss"], rel=1e-6)
    missing = evaluate("run=mlflow:0123")
    assert missing.code == 2
    assert "no such run" in missing.err


def test_a_fine_tuned_model_is_evaluated_with_the_tokenizer_that_it_brought(here: Path, tmp_path: Path) -> None:
    shutil.copytree("outputs/bert/best", tmp_path / "exported")
    tuned = ["recipe=bert", f"init_from={tmp_path}/exported", "recipe.context=32"]
    tuned += ["data=text", "data.path=other.txt"]
    done = _command(*tuned, *SIZES, "steps=2", "run_name=tuned", f"output_dir={tmp_path}")
    assert done.code == 0, done.err
    assert evaluate(f"run={tmp_path}/tuned").code == 0
    found = results(tmp_path / "tuned/evaluation")["metrics"]["loss"]
    assert found == pytest.approx(recorded(tmp_path / "tuned")["loss"], rel=1e-6)
