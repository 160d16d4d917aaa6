"""The best weights of a run are files of it in MLflow, which others load and register."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from tests.command_line.conftest import BIGNET, SMALLEST, Train
from tests.command_line.tracking.test_mlflow import forget
from trainer.files import TRACKING_FILE
from trainer.tracking.store import connect
from trainer.tracking.sync import send

SMALL = ("steps=2", "batch_size=2", "eval_samples=2", "tracking.system_metrics=false", "tracking.flush_every_s=0.1")
TEXT = ("data=text", "data.path=text.txt", "data.cache_dir=cache", "data.tokenizer=chars", "recipe.context=32")
JOBS = {
    "gpt2": ("recipe=gpt2", "recipe.size=nano", *TEXT),
    "bert": ("recipe=bert", *TEXT),
    "bignet": (*BIGNET, "data.samples=8"),
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


def test_a_language_model_opens_without_this_project_and_others_are_files(
    succeed: Train, folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)  # as mlflow.set_tracking_uri does
    addresses = {}
    for name, overrides in JOBS.items():
        done = succeed(*SMALL, *overrides, f"tracking.register={name}")
        (best,) = re.findall(r"^(outputs/.*)/best\b", done.out, re.MULTILINE)
        sent = json.loads((Path(best) / TRACKING_FILE).read_text())
        address = f"runs:/{sent['run_id']}"
        addresses[name] = f"{address}/best"
        assert re.search(rf"\n{address} +in MLflow\n", done.out)
        assert re.search(rf"/ui.py uri={store}\n$", done.out), "nothing that a shell would read with it"
        (version,) = connect(store).search_model_versions(f"name = '{name}'")
        assert version.source == addresses[name]
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

    (weights,) = [
        path for path in files if path.name == "model.safetensors" and {sent["run_id"], "best"} <= {*path.parts}
    ]
    assert weights.read_bytes() == (folder / "outputs/bignet-fp32-s0/best/model.safetensors").read_bytes()


@pytest.mark.usefixtures("plots")
def test_the_description_says_how_to_open_them_and_a_users_own_stays(
    succeed: Train, folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalArtifactRepository.log_artifacts
    broken: Iterator[None] = iter([None])

    def fail_once(self: LocalArtifactRepository, *given: Any, **options: Any) -> None:
        for _ in broken:
            raise ConnectionError("the line is down")
        real(self, *given, **options)

    monkeypatch.setattr(LocalArtifactRepository, "log_artifacts", fail_once)
    succeed(*SMALL, *JOBS["gpt2"], "tracking.register=net", "run_name=run", "steps=6", "eval_every=2")
    run, client = folder / "outputs" / "run", connect(store)
    run_id = json.loads((run / TRACKING_FILE).read_text())["run_id"]
    best = json.loads((run / "summary.json").read_text())["best"]
    note = client.get_run(run_id).data.tags["mlflow.note.content"]
    assert f"best loss: {best['value']:.4g} at step {best['step']}." in note
    assert f"get-artifact?path=plots%2Floss.png&run_uuid={run_id}" in note
    assert f'mlflow.transformers.load_model("runs:/{run_id}/best")' in note

    client.set_tag(run_id, "mlflow.note.content", "in the user's own words")
    forget(run)
    assert send(run).status == "sent"
    assert client.get_run(run_id).data.tags["mlflow.note.content"] == "in the user's own words"
    versions = client.search_model_versions("name = 'net'")
    assert [(version.version, version.source) for version in versions] == [(1, f"runs:/{run_id}/best")]


def test_a_run_has_one_entry_among_the_models_with_the_metrics_of_its_best_weights(
    succeed: Train, folder: Path, store: str
) -> None:
    run, client = folder / "outputs/run", connect(store)

    def entry() -> Any:
        stored = client.get_run(json.loads((run / TRACKING_FILE).read_text())["run_id"])
        (model,) = client.search_logged_models([stored.info.experiment_id], "name = 'run'")
        assert client.search_logged_models([stored.info.experiment_id], "name = 'a-users'")
        assert (model.source_run_id, model.status, model.params["precision"]) == (stored.info.run_id, "READY", "bf16")
        (metric,) = model.metrics
        points = [point.step for point in client.get_metric_history(stored.info.run_id, "valid/loss")]
        assert points == sorted({*points})
        return metric.key, metric.step, metric.value

    succeed(*SMALLEST, "steps=3", "eval_every=1", "precision=bf16", "run_name=run", "schedule=constant")
    stored = client.get_run(json.loads((run / TRACKING_FILE).read_text())["run_id"])
    client.create_logged_model(stored.info.experiment_id, "a-users", stored.info.run_id)
    for more in ((), ("steps=30",), ()):
        succeed(f"resume={run}", *more)
        best = json.loads((run / "summary.json").read_text())["best"]
        assert entry() == ("valid/loss", best["step"], best["value"])
        forget(run)
        assert send(run).status == "sent"  # all of it once more
        assert entry() == ("valid/loss", best["step"], best["value"])
