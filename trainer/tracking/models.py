"""The best weights of a run as a logged model of MLflow, which ``mlflow.transformers.load_model`` opens.

The models of other libraries are files of the run: ``best/``.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trainer.files import BEST, SUMMARY_FILE, read_object, sha256
from trainer.tracking.datasets import VALIDATION
from trainer.tracking.store import cut, valid_key
from trainer.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

PIPELINES = {
    "GPT2LMHeadModel": ("text-generation", "TextGenerationPipeline"),
    "LlamaForCausalLM": ("text-generation", "TextGenerationPipeline"),
    "BertForMaskedLM": ("fill-mask", "FillMaskPipeline"),
}
"""Task and class of the pipeline that answers with a model of transformers, by the model's class."""
MODEL = "model"
"""The folder of a logged model that is the run's ``best/``."""
WEIGHTS_TAG = "mantissa.weights_sha256"
"""Finds the model again: the same weights of a run are one model, even if they are sent more than once."""


def log_best(client: MlflowClient, run: Any, folder: Path, info: TrackedRun) -> str | None:
    """Log the best weights in a run's folder, whose metrics MLflow has, as a model, or complete one that was started.

    Returns:
        The model's address; None: transformers has no pipeline for it.
    """
    from mlflow.entities import LoggedModelOutput
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    architecture = (read_object(folder / BEST / "config.json").get("architectures") or [""])[0]
    if architecture not in PIPELINES:
        return None
    model = _find_or_create(client, run, folder, info.params)
    run_id, model_id = run.info.run_id, str(model.model_id)
    if str(model.status) != "READY":
        place = get_artifact_repository(model.artifact_location, tracking_uri=client.tracking_uri)
        place.log_artifacts(str(folder / BEST), MODEL)
        with TemporaryDirectory() as scratch:
            _describe(Path(scratch), model, run_id, folder / BEST, architecture)
            place.log_artifacts(scratch)
        summary = read_object(folder / SUMMARY_FILE)
        step = (summary.get("best") or summary).get("step", 0)
        if not (run.outputs and model_id in [output.model_id for output in run.outputs.model_outputs]):
            client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
        _log_scores(client, run, step, model_id, info)
        client.finalize_logged_model(model_id, "READY")
    return f"models:/{model_id}"


def register(client: MlflowClient, name: str, source: str, run_id: str) -> None:
    """Make weights in MLflow (``source``) a version of a registered model, unless they are one."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    quoted = name.replace("'", "''")
    if source not in [known.source for known in client.search_model_versions(f"name = '{quoted}'")]:
        model_id = source.removeprefix("models:/") if source.startswith("models:/") else None
        client.create_model_version(name, source, run_id=run_id, model_id=model_id)


def _find_or_create(client: MlflowClient, run: Any, folder: Path, params: dict[str, object]) -> Any:
    hashes = [sha256(file) for file in sorted((folder / BEST).glob("*.safetensors"))]
    digest = hashlib.sha256("".join(hashes).encode()).hexdigest()
    own = f"source_run_id = '{run.info.run_id}' AND tags.`{WEIGHTS_TAG}` = '{digest}'"
    if known := client.search_logged_models([run.info.experiment_id], filter_string=own, max_results=1):
        return known[0]
    return client.create_logged_model(
        run.info.experiment_id,
        name="".join("_" if letter in "/:.%\"'" else letter for letter in run.info.run_name),
        source_run_id=run.info.run_id,
        tags={WEIGHTS_TAG: digest},
        params={valid_key(key): cut(str(value), 500) for key, value in params.items()},
        model_type=str(params.get("recipe", "")) or None,
    )


def _describe(path: Path, model: Any, run_id: str, best: Path, architecture: str) -> None:
    """Write what MLflow's folder of a model has beside the weights: its flavour of transformers, and the tokenizer.

    ``mlflow.transformers.save_model`` would record this machine's path, and look it up on the hub.
    """
    from mlflow.models import Model, infer_signature

    shutil.copytree(best, path / "components" / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors*"))
    task, pipeline = PIPELINES[architecture]
    described = Model(
        artifact_path=model.artifact_location,
        model_uuid=model.model_id,
        run_id=run_id,
        model_id=model.model_id,
        signature=infer_signature([""], [""], {"max_new_tokens": 64} if task == "text-generation" else None),
    )
    described.add_flavor(
        "transformers",
        transformers_version=version("transformers"),
        code=None,
        task=task,
        instance_type=pipeline,
        torch_dtype=None,
        pipeline_model_type=architecture,
        source_model_name=model.name,
        model_binary=MODEL,
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
    )
    described.add_flavor(
        "python_function", loader_module="mlflow.transformers", python_version=platform.python_version()
    )
    described.save(str(path / "MLmodel"))


def _log_scores(client: MlflowClient, run: Any, step: int, model_id: str, info: TrackedRun) -> None:
    """Log the scores of the weights with their dataset: the same points as the run's, or it would have them twice."""
    from mlflow.entities import Metric

    run_id = run.info.run_id
    data: dict[str, Any] = next((entry for entry in info.datasets if entry["context"] == VALIDATION), {})
    points = [
        Metric(key, point.value, point.timestamp, step, model_id, data.get("name"), data.get("digest"), run_id)
        for key in run.data.metrics
        if key.startswith("valid/")
        for point in client.get_metric_history(run_id, key)
        if point.step == step
    ]
    if points:
        client.log_batch(run_id, metrics=points, synchronous=True)
