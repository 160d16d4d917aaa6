"""The best weights of a run as a logged model of MLflow, with signature, example, scores and data."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import BEST, METRICS_FILE, link_or_copy, read_json_lines
from trainer.tracking.mlflow.datasets import VALIDATION
from trainer.tracking.mlflow.record import RunInfo
from trainer.tracking.mlflow.store import cut, valid_key
from trainer.tracking.mlflow.summary_metrics import VALID

if TYPE_CHECKING:
    from mlflow import MlflowClient

SERVING = "serving"
WEIGHTS_TAG = "mantissa.weights_sha256"
"""Finds the model again: the same weights of a run are one model, even if they are sent more than once."""
VERSIONS_TAG = "mlflow.modelVersions"
NEW_TOKENS = 64
PREDICTORS = Path(__file__).with_name("predictors")
_PREFIX = ".mlflow-model-"
_SAVING = threading.Lock()
"""MLflow keeps the model of the file that it has just read in a global variable."""

Progress = Callable[[float], None]
"""Called between two calls of MLflow, with the seconds that the next one may take; it may raise to stop."""


def is_servable(folder: Path) -> bool:
    """Return whether a run folder has what a logged model is made of."""
    return (folder / SERVING / "serving.json").is_file() and (folder / BEST).is_dir()


def log_best(
    client: MlflowClient, run: Any, folder: Path, info: RunInfo, *, progress: Progress, upload_s: float
) -> str | None:
    """Log the best weights of a run as a model of MLflow, or complete one that was started.

    Returns:
        The model's id; None: the store is of a version of MLflow without logged models.

    Args:
        client: of the store.
        run: MLflow's, whose metrics have arrived.
        folder: the run's, see ``is_servable``.
        info: what MLflow gets of the run.
        progress: see ``Progress``.
        upload_s: seconds that the upload may take.
    """
    from mlflow.entities import LoggedModelOutput
    from mlflow.exceptions import MlflowException

    facts = json.loads((folder / SERVING / "serving.json").read_text(encoding="utf-8"))
    try:
        model = _find_or_create(client, run, folder, info.params)
    except MlflowException as error:
        if error.error_code not in ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED"):
            raise
        return None
    progress(0)
    step, run_id, model_id = int(facts["step"]), run.info.run_id, str(model.model_id)
    if str(model.status) != "READY":
        for left in folder.glob(f"{_PREFIX}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder) as scratch:
            with _SAVING:
                _save(Path(scratch, "model"), model, run_id, folder, facts)
            progress(upload_s)
            client.log_model_artifacts(model_id, str(Path(scratch, "model")))
        if not (run.outputs and model_id in [output.model_id for output in run.outputs.model_outputs]):
            client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
        _log_scores(client, run_id, folder, step, model_id, info)
        client.finalize_logged_model(model_id, "READY")
        progress(0)
    if info.register:
        _register(client, info.register, model_id, run_id)
        progress(0)
    return model_id


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
    """Write MLflow's folder. The weights are linked into it at the end, which avoids another copy."""
    with warnings.catch_warnings():  # MLflow warns of its own type hints when it is imported
        warnings.filterwarnings("ignore", ".*type hint is inferred as", UserWarning)
        pyfunc = import_module("mlflow.pyfunc")
    from mlflow.models import Model, ModelSignature

    light = path.with_name(BEST)
    shutil.copytree(folder / BEST, light, ignore=shutil.ignore_patterns("*.safetensors"))
    described = Model(
        artifact_path=model.artifact_location, model_uuid=model.model_id, run_id=run_id, model_id=model.model_id
    )
    example, inputs, outputs, params = _interface(folder, facts)
    code = folder / SERVING / "code"
    pyfunc.save_model(
        str(path),
        python_model=str(PREDICTORS / f"{facts['predictor']}.py"),
        artifacts={BEST: str(light), SERVING: str(folder / SERVING)},
        code_paths=[str(part) for part in sorted(code.iterdir())] if code.is_dir() else None,
        mlflow_model=described,
        signature=ModelSignature(inputs, outputs, params),
        input_example=example,
        pip_requirements=facts["requirements"],
    )
    own = described.flavors["python_function"]  # without the paths of this machine
    own["model_code_path"] = Path(own["model_code_path"]).name
    own["artifacts"] = {name: {"path": entry["path"], "uri": entry["path"]} for name, entry in own["artifacts"].items()}
    if facts["predictor"] == "text_generation":
        _add_transformers(described, path, light, model.name, facts)
    for file in (folder / BEST).rglob("*.safetensors"):
        link_or_copy(file, path / "artifacts" / BEST / file.relative_to(folder / BEST))
    described.model_size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    described.save(str(path / "MLmodel"))


def _add_transformers(described: Any, path: Path, light: Path, name: str, facts: dict[str, Any]) -> None:
    """Add the flavour of transformers, for ``mlflow.transformers.load_model``.

    By hand: MLflow's own way to do it without loading the weights fails with transformers 5.23, whose table of tasks
    holds names where it had classes.
    """
    shutil.copytree(light, path / "components" / "tokenizer")
    config = json.loads((light / "config.json").read_text(encoding="utf-8"))
    versions = dict(requirement.split("==") for requirement in facts["requirements"])
    described.add_flavor(
        "transformers",
        transformers_version=versions["transformers"],
        code=None,
        task="text-generation",
        instance_type="TextGenerationPipeline",
        torch_dtype=None,
        pipeline_model_type=config["architectures"][0],
        source_model_name=name,
        model_binary=f"artifacts/{BEST}",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
    )


def _interface(folder: Path, facts: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return an example of the input, and the schemas of input, output and parameters."""
    import numpy as np
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema, TensorSpec

    kind = facts["predictor"]
    text, length = Schema([ColSpec("string")]), ParamSpec("max_new_tokens", "long", NEW_TOKENS)
    if kind == "text_generation":
        return [facts["example"]], text, text, ParamSchema([length, ParamSpec("do_sample", "boolean", False)])
    if kind == "text_to_text":
        return [facts["example"]], text, text, ParamSchema([length])
    if kind == "question_answering":
        columns = Schema([ColSpec("string", "question"), ColSpec("string", "context")])
        return facts["example"], columns, Schema([ColSpec("string", "answer"), ColSpec("double", "score")]), None
    from safetensors.numpy import load_file

    arrays = load_file(folder / SERVING / "example.safetensors")
    if kind == "image_classifier":
        image = Schema([TensorSpec(np.dtype(np.uint8), (-1, -1, -1, 3))])
        return arrays["input"], image, Schema([ColSpec("string", "label"), ColSpec("double", "probability")]), None

    def spec(dtype: str, shape: list[int], name: str | None) -> TensorSpec:
        return TensorSpec(np.dtype(dtype), (-1, *shape[1:]) if shape else (), name)

    alone = len(arrays) == 1
    inputs = [spec(array.dtype, array.shape, None if alone else name) for name, array in arrays.items()]
    outputs = [spec(each["dtype"], each["shape"], name or None) for name, each in facts["outputs"].items()]
    return next(iter(arrays.values())) if alone else arrays, Schema(inputs), Schema(outputs), None


def _log_scores(client: MlflowClient, run_id: str, folder: Path, step: int, model_id: str, info: RunInfo) -> None:
    """Log the scores of the weights with their dataset: the same points as the run's, or it would have them twice."""
    from mlflow.entities import Metric

    data = next(((entry["name"], entry["digest"]) for entry in info.datasets if entry["context"] == VALIDATION), ())
    name, digest = data or (None, None)
    points = []
    for line in read_json_lines(folder / METRICS_FILE):
        for key in map(valid_key, line if line["step"] == step else ()):
            if key.startswith(VALID):
                stored = [point for point in client.get_metric_history(run_id, key) if point.step == step]
                points += [
                    Metric(key, point.value, point.timestamp, step, model_id, name, digest, run_id)
                    for point in stored[-1:]
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
    if not any((entry["name"], int(entry["version"])) == (name, int(version.version)) for entry in listed):
        # A server does it by itself; for a database it is the client's part.
        listed.append({"name": name, "version": int(version.version)})
        client.set_logged_model_tags(model_id, {VERSIONS_TAG: json.dumps(listed)})
