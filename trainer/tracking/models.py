"""The best weights of a run as a logged model of MLflow, with signature, example, scores and data."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import BEST, read_object
from trainer.tracking.datasets import VALIDATION
from trainer.tracking.store import cut, valid_key
from trainer.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

SERVING = "serving"
WEIGHTS_TAG = "mantissa.weights_sha256"
"""Finds the model again: the same weights of a run are one model, even if they are sent more than once."""
VERSIONS_TAG = "mlflow.modelVersions"
NEW_TOKENS = 64
_PREFIX = ".mlflow-model-"


def log_best(client: MlflowClient, run: Any, folder: Path, info: TrackedRun) -> str | None:
    """Log the best weights in a run's folder, whose metrics MLflow has, as a model, or complete one that was started.

    Returns:
        The model's id; None: they cannot be served.
    """
    from mlflow.entities import LoggedModelOutput

    facts = read_object(folder / SERVING / "serving.json")
    if not facts:
        return None
    model = _find_or_create(client, run, folder, info.params)
    step, run_id, model_id = int(facts["step"]), run.info.run_id, str(model.model_id)
    if str(model.status) != "READY":
        for left in folder.glob(f"{_PREFIX}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder) as scratch:
            _save(Path(scratch, "model"), model, run_id, folder, facts)
            client.log_model_artifacts(model_id, str(Path(scratch, "model")))
        if not (run.outputs and model_id in [output.model_id for output in run.outputs.model_outputs]):
            client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
        _log_scores(client, run, step, model_id, info)
        client.finalize_logged_model(model_id, "READY")
    if info.register:
        _register(client, info.register, model_id, run_id)
    return model_id


def _import_pyfunc() -> Any:
    with warnings.catch_warnings():  # MLflow warns of its own type hints when it is imported
        warnings.filterwarnings("ignore", ".*type hint is inferred as", UserWarning)
        return import_module("mlflow.pyfunc")


def _find_or_create(client: MlflowClient, run: Any, folder: Path, params: dict[str, object]) -> Any:
    digest = hashlib.sha256()
    for file in sorted((folder / BEST).rglob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    own = f"source_run_id = '{run.info.run_id}' AND tags.`{WEIGHTS_TAG}` = '{digest.hexdigest()}'"
    known = client.search_logged_models([run.info.experiment_id], filter_string=own, max_results=1)
    if known:
        return known[0]
    return client.create_logged_model(
        run.info.experiment_id,
        name="".join("_" if letter in "/:.%\"'" else letter for letter in run.info.run_name),
        source_run_id=run.info.run_id,
        tags={WEIGHTS_TAG: digest.hexdigest()},
        params={valid_key(key): cut(str(value), 500) for key, value in params.items()},
        model_type=str(params.get("recipe", "")) or None,
    )


def _save(path: Path, model: Any, run_id: str, folder: Path, facts: dict[str, Any]) -> None:
    """Write MLflow's folder."""
    from mlflow.models import Model

    described = Model(
        artifact_path=model.artifact_location, model_uuid=model.model_id, run_id=run_id, model_id=model.model_id
    )
    code = folder / SERVING / "code"
    example, signature = _interface(folder, facts)
    _import_pyfunc().save_model(
        str(path),
        python_model=str(Path(__file__).with_name("predictor.py")),
        artifacts={BEST: str(folder / BEST), SERVING: str(folder / SERVING)},
        code_paths=[str(part) for part in sorted(code.iterdir())] if code.is_dir() else None,
        mlflow_model=described,
        signature=signature,
        input_example=example,
        pip_requirements=facts["requirements"],
    )
    own = described.flavors["python_function"]  # without the paths of this machine
    own["model_code_path"] = Path(own["model_code_path"]).name
    own["artifacts"] = {name: {"path": entry["path"], "uri": entry["path"]} for name, entry in own["artifacts"].items()}
    if facts["predictor"] == "text_generation":
        _add_transformers(described, path, model.name, facts)
    described.save(str(path / "MLmodel"))


def _add_transformers(described: Any, path: Path, name: str, facts: dict[str, Any]) -> None:
    """Add the flavour of transformers, for ``mlflow.transformers.load_model``.

    By hand: MLflow's own way to do it without loading the weights fails with transformers 5.23, whose table of tasks
    holds names where it had classes.
    """
    best = path / "artifacts" / BEST
    shutil.copytree(best, path / "components" / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    versions = dict(requirement.split("==") for requirement in facts["requirements"])
    described.add_flavor(
        "transformers",
        transformers_version=versions["transformers"],
        code=None,
        task="text-generation",
        instance_type="TextGenerationPipeline",
        torch_dtype=None,
        pipeline_model_type=read_object(best / "config.json")["architectures"][0],
        source_model_name=name,
        model_binary=f"artifacts/{BEST}",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
    )


def _interface(folder: Path, facts: dict[str, Any]) -> tuple[Any, Any]:
    """Return an example of the input, and the signature: the schemas of input, output and parameters."""
    import numpy as np
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types import Schema, TensorSpec

    kind, example = facts["predictor"], facts.get("example")
    if kind in ("text_generation", "text_to_text"):
        choice = {"do_sample": False} if kind == "text_generation" else {}
        return [example], infer_signature([example], [example], {"max_new_tokens": NEW_TOKENS} | choice)
    if kind == "question_answering":
        return example, infer_signature(example, {"answer": "", "score": 0.0})
    from safetensors.numpy import load_file

    arrays = load_file(folder / SERVING / "example.safetensors")
    if kind == "image_classifier":
        answer = infer_signature({"label": "", "probability": 0.0}).inputs
        return arrays["input"], ModelSignature(Schema([TensorSpec(np.dtype(np.uint8), (-1, -1, -1, 3))]), answer)
    example = arrays if len(arrays) > 1 else next(iter(arrays.values()))
    outputs = [
        TensorSpec(np.dtype(each["dtype"]), (-1, *each["shape"][1:]) if each["shape"] else (), name or None)
        for name, each in facts["outputs"].items()
    ]
    return example, ModelSignature(infer_signature(example).inputs, Schema(outputs))


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


def _register(client: MlflowClient, name: str, model_id: str, run_id: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    quoted, source = name.replace("'", "''"), f"models:/{model_id}"
    known = [version for version in client.search_model_versions(f"name = '{quoted}'") if version.source == source]
    version = known[0] if known else client.create_model_version(name, source, run_id=run_id, model_id=model_id)
    listed = json.loads(client.get_logged_model(model_id).tags.get(VERSIONS_TAG, "[]"))
    if name not in [entry["name"] for entry in listed]:
        # A server does it by itself; for a database it is the client's part.
        listed.append({"name": name, "version": int(version.version)})
        client.set_logged_model_tags(model_id, {VERSIONS_TAG: json.dumps(listed)})
