"""The best weights of a run are a model of MLflow, which others load, rank and register, or files of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from tests.command_line.conftest import Train
from tests.command_line.tracking.test_mlflow import forget
from trainer.files import TRACKING_FILE
from trainer.tracking.store import connect
from trainer.tracking.sync import send

SMALL = ("steps=2", "batch_size=2", "eval_samples=2", "tracking.system_metrics=false", "tracking.flush_every_s=0.1")
TEXT = ("data=text", "data.path=text.txt", "data.cache_dir=cache", "data.tokenizer=chars", "recipe.context=32")
JOBS = {
    "gpt2": ("recipe=gpt2", "recipe.size=nano", *TEXT),
    "bert": ("recipe=bert", *TEXT),
    "bignet": ("recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=8"),
}
ELSEWHERE = """
import importlib.util, json, sys
from pathlib import Path
import mlflow
sys.path[:] = [each for each in sys.path if not Path(each, "trainer").is_dir()]
assert not any(importlib.util.find_spec(name) for name in ("trainer", "recipes"))
mlflow.set_tracking_uri(sys.argv[1])
gpt2, bert, registered = sys.argv[2:]
written = mlflow.transformers.load_model(gpt2)("the fox", max_new_tokens=4, do_sample=False)[0]["generated_text"]
filled = mlflow.transformers.load_model(bert)("the f[MASK]x")[0]["sequence"]
served = mlflow.pyfunc.load_model(registered).predict(["the fox"], params={"max_new_tokens": 4})
print(json.dumps([written, filled, served]))
"""


@pytest.fixture(autouse=True)
def text(folder: Path) -> None:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)


def models_of(uri: str) -> list[Any]:
    """The logged models of a store."""
    client = connect(uri)
    return list(client.search_logged_models([each.experiment_id for each in client.search_experiments()]))


def test_a_language_model_opens_without_this_project_and_others_are_files(
    succeed: Train, folder: Path, store: str
) -> None:
    addresses = {}
    for name, overrides in JOBS.items():
        done = succeed(*SMALL, *overrides, f"tracking.register={name}")
        folder_line, last = done.out.splitlines()[-2:]
        assert folder_line.endswith("; compare runs with: python scripts/ui.py")
        sent = json.loads((Path(folder_line.split()[2].strip(";")) / TRACKING_FILE).read_text())
        addresses[name] = sent["model"]
        assert last == f"in MLflow runs:/{sent['run_id']}" + (f", {sent['model']}" if sent["model"] else "")
    assert {model.model_type for model in models_of(store)} == {"gpt2", "bert"}
    files = [path for path in (folder / "mlartifacts").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".pkl", ".pickle", ".bin", ".pt", ".pth")]
    assert not [path for path in files if path.name == "MLmodel" and str(folder / "outputs") in path.read_text()]

    command = [sys.executable, "-P", "-c", ELSEWHERE, store, addresses["gpt2"], addresses["bert"], "models:/gpt2/1"]
    elsewhere = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert elsewhere.returncode == 0, elsewhere.stderr
    written, filled, served = json.loads(elsewhere.stdout.splitlines()[-1])
    assert written.startswith("the fox")
    assert served[0].startswith("the fox")
    assert filled

    assert addresses["bignet"] is None
    (version,) = connect(store).search_model_versions("name = 'bignet'")
    assert version.source == f"runs:/{sent['run_id']}/best"
    (weights,) = [path for path in files if path.name == "model.safetensors" and sent["run_id"] in path.parts]
    assert weights.read_bytes() == (folder / "outputs/bignet-fp32-s0/best/model.safetensors").read_bytes()


@pytest.mark.usefixtures("plots")
def test_models_are_ranked_by_their_scores_on_a_dataset(succeed: Train, store: str) -> None:
    for lr in ("1e-3", "0.3"):
        succeed(*SMALL, *JOBS["gpt2"], f"optimizer.lr={lr}", "steps=6", "eval_every=2")
    client = connect(store)
    experiment = client.get_experiment_by_name("gpt2")
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
        assert json.loads(data["training"].profile)["num_rows"] > 0
        (output,) = run.outputs.model_outputs
        assert (output.model_id, output.step) == (model.model_id, score.step)
        history = [point.step for point in client.get_metric_history(run.info.run_id, "valid/loss")]
        assert history == [2, 4, 6]  # linking the score to the model adds no second point
        note = run.data.tags["mlflow.note.content"]
        assert f"best loss: {score.value:.4g} at step {score.step}." in note
        assert f"get-artifact?path=plots%2Floss.png&run_uuid={run.info.run_id}" in note
        assert f"models:/{model.model_id}" in note
        scores.append(score.value)
    assert len(scores) == 2
    assert scores == sorted(scores)


def test_weights_sent_again_are_the_same_model(
    succeed: Train, folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalArtifactRepository.log_artifacts
    broken: Iterator[None] = iter([None])

    def fail_once(self: LocalArtifactRepository, *given: Any, **options: Any) -> None:
        for _ in broken:
            raise ConnectionError("the line is down")
        real(self, *given, **options)

    monkeypatch.setattr(LocalArtifactRepository, "log_artifacts", fail_once)
    succeed(*SMALL, *JOBS["gpt2"], "tracking.register=net", "run_name=run")
    (first,) = models_of(store)
    client = connect(store)
    client.set_tag(first.source_run_id, "mlflow.note.content", "in the user's own words")
    run = folder / "outputs" / "run"
    forget(run)
    assert send(run).status == "sent"
    (again,) = models_of(store)
    assert (again.model_id, again.status) == (first.model_id, "READY")
    assert client.get_run(first.source_run_id).data.tags["mlflow.note.content"] == "in the user's own words"
    versions = client.search_model_versions("name = 'net'")
    assert [(version.version, version.source) for version in versions] == [(1, f"models:/{first.model_id}")]
