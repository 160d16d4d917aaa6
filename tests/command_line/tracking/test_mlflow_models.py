"""The best weights of a run are a model of MLflow, which others load, query, rank and register."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.command_line.conftest import Train
from tests.command_line.tracking.test_mlflow import forget
from trainer.files import TRACKING_FILE
from trainer.tracking.store import connect
from trainer.tracking.sync import send

SMALL = ("steps=2", "batch_size=2", "eval_samples=2", "tracking.system_metrics=false", "tracking.flush_every_s=0.1")
TEXT = ("data=text", "data.path=text.txt", "data.cache_dir=cache", "data.tokenizer=chars", "recipe.context=32")
JOBS = {
    "gpt2": ("recipe=gpt2", "recipe.size=nano", *TEXT, "tracking.register=writer"),
    "t5": ("recipe=t5", *TEXT),
    "resnet": ("recipe=resnet", "recipe.arch=shufflenet_v2_x0_5"),
    "bignet": ("recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=8"),
}
ELSEWHERE = """
import importlib.util, json, sys
from pathlib import Path
import mlflow, numpy as np
sys.path[:] = [each for each in sys.path if not Path(each, "trainer").is_dir()]
assert not any(importlib.util.find_spec(name) for name in ("trainer", "recipes"))
mlflow.set_tracking_uri(sys.argv[1])
answers = {}
for name, model_id in json.loads(sys.argv[2]).items():
    model = mlflow.pyfunc.load_model(f"models:/{model_id}")
    assert model.metadata.signature.inputs and model.metadata.signature.outputs
    answer = model.predict(model.input_example)
    answers[name] = answer.to_dict("list") if hasattr(answer, "to_dict") else np.asarray(answer).tolist()
pipeline = mlflow.transformers.load_model(f"models:/{json.loads(sys.argv[2])['gpt2']}")
answers["pipeline"] = pipeline("the fox", max_new_tokens=4, do_sample=False)[0]["generated_text"]
writer = mlflow.pyfunc.load_model("models:/writer/1")
answers["continued"] = writer.predict(["the fox"], params={"max_new_tokens": 4})[0]
print(json.dumps(answers))
"""


@pytest.fixture(autouse=True)
def text(folder: Path) -> None:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)


def models_of(uri: str) -> dict[str, Any]:
    """The models of a store by the recipe that they are of."""
    client = connect(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    models = client.search_logged_models(experiments)
    assert len({model.model_type for model in models}) == len(models)
    return {model.model_type: model for model in models}


def elsewhere(uri: str, models: dict[str, Any], folder: Path, script: str = ELSEWHERE) -> Any:
    ids = json.dumps({name: model.model_id for name, model in models.items()})
    done = subprocess.run([sys.executable, "-P", "-c", script, uri, ids], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_recipe_is_served_without_this_project(succeed: Train, folder: Path, store: str) -> None:
    for overrides in JOBS.values():
        done = succeed(*SMALL, *overrides)
        folder_line, addresses = done.out.splitlines()[-2:]
        assert folder_line.endswith("; compare runs with: python scripts/ui.py")
        sent = json.loads((Path(folder_line.split()[2].strip(";")) / TRACKING_FILE).read_text())
        assert addresses == f"in MLflow runs:/{sent['run_id']}, {sent['model']}"
    models = models_of(store)
    assert models.keys() == JOBS.keys()
    assert sent["model"] == f"models:/{models['bignet'].model_id}"
    assert {model.status for model in models.values()} == {"READY"}
    files = [path for path in (folder / "mlartifacts").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".pkl", ".pickle", ".bin", ".pt", ".pth")]
    described = [path.read_text() for path in files if path.name == "MLmodel"]
    assert len(described) == len(JOBS)
    assert not [text for text in described if str(folder / "outputs") in text or "/trainer/" in text]

    answers = elsewhere(store, models, folder)
    assert len(answers["gpt2"]) == len(answers["t5"]) == 1
    assert answers["continued"].startswith("the fox")
    assert answers["continued"] == answers["pipeline"]
    (label,), (probability,) = answers["resnet"]["label"], answers["resnet"]["probability"]
    assert label in map(str, range(10))
    assert 0.1 <= probability <= 1

    import numpy as np
    from safetensors.numpy import load_file

    run = folder / "outputs" / "bignet-fp32-s0"
    weights, x = load_file(run / "best" / "model.safetensors"), load_file(run / "serving" / "example.safetensors")
    for name in sorted({name.rpartition(".")[0] for name in weights}):
        (value,) = x.values()
        x = {"": np.maximum(value, 0) if name != "0.0" else value}
        x = {"": x[""] @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]}
    assert np.allclose(answers["bignet"], x[""], atol=1e-5)


@pytest.mark.usefixtures("plots")
def test_models_are_ranked_by_their_scores_on_a_dataset(succeed: Train, store: str) -> None:
    for lr in ("1e-3", "0.3"):
        succeed(*SMALL, *JOBS["bignet"], f"optimizer.lr={lr}", "steps=6", "eval_every=2")
    client = connect(store)
    experiment = client.get_experiment_by_name("bignet")
    assert experiment
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    ranked = client.search_logged_models(
        [experiment.experiment_id], order_by=[{"field_name": "metrics.valid/loss", "ascending": True}]
    )
    scores = []
    for model in ranked:
        run = runs[model.source_run_id]
        best = json.loads(Path(f"outputs/{run.info.run_name}/summary.json").read_text())["best"]
        (score,) = [metric for metric in model.metrics if metric.key == "valid/loss"]
        assert (score.step, score.value) == (best["step"], best["value"])
        data = {entry.tags[0].value: entry.dataset for entry in run.inputs.dataset_inputs}
        assert set(data) == {"training", "validation"}
        assert (score.dataset_name, score.dataset_digest) == (data["validation"].name, data["validation"].digest)
        assert json.loads(data["training"].profile)["num_rows"] == 8
        (output,) = run.outputs.model_outputs
        assert (output.model_id, output.step) == (model.model_id, score.step)
        history = [point.step for point in client.get_metric_history(run.info.run_id, "valid/loss")]
        assert history == [2, 4, 6]  # linking the score to the model adds no second point
        note = run.data.tags["mlflow.note.content"]
        assert f"best loss: {score.value:.4g} at step {score.step}." in note
        assert f"get-artifact?path=plots%2Floss.png&run_uuid={run.info.run_id}" in note
        assert f"models:/{model.model_id}" in note
        scores.append((score.value, score.step))
    assert len(scores) == 2
    assert scores == sorted(scores)
    assert min(step for _, step in scores) < 6  # after which it was worse


def test_sent_again_it_is_the_same_model_and_a_resumed_run_replaces_what_is_served(
    succeed: Train, folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = (*SMALL, *JOBS["bignet"], "tracking.register=net", "run_name=run")
    real = MlflowClient.log_model_artifacts
    broken: Iterator[None] = iter([None])

    def fail_once(self: MlflowClient, *given: Any, **options: Any) -> None:
        for _ in broken:
            raise ConnectionError("the line is down")
        real(self, *given, **options)

    monkeypatch.setattr(MlflowClient, "log_model_artifacts", fail_once)
    succeed(*job)
    (first,) = models_of(store).values()
    client = connect(store)
    client.set_tag(first.source_run_id, "mlflow.note.content", "in the user's own words")
    record = folder / "outputs" / "run" / TRACKING_FILE
    forget(record.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert send(folder / "outputs" / "run").status == "sent"
    (again,) = models_of(store).values()
    assert (again.model_id, again.status) == (first.model_id, "READY")
    assert client.get_run(first.source_run_id).data.tags["mlflow.note.content"] == "in the user's own words"
    versions = client.search_model_versions("name = 'net'")
    assert [(version.version, version.source) for version in versions] == [(1, f"models:/{first.model_id}")]
    assert json.loads(again.tags["mlflow.modelVersions"]) == [{"name": "net", "version": 1}]
    assert not list((folder / "outputs" / "run").glob(".mlflow-model-*"))
    assert "not as a servable model" not in succeed(*job, "steps=4", "resume=auto").out
    served, summary = (
        json.loads((record.parent / name).read_text()) for name in ("serving/serving.json", "summary.json")
    )
    assert served["step"] == summary["best"]["step"] > 2


def test_a_recipe_that_cannot_be_watched_is_sent_as_files(
    train: Train, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.tracking.serving._watch", lambda *given: 1 / 0)
    done = train(*SMALL, *JOBS["bignet"])
    assert done.code == 0
    assert "MLflow gets the best weights as files, not as a servable model" in done.out
    client = connect(store)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert client.list_artifacts(run.info.run_id, "best")
