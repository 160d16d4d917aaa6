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

from trainer.files import link_or_copy, read_json_lines
from trainer.tracking.mlflow.delivery_record import METRICS_FILE
from trainer.tracking.mlflow.store import cut, valid_key
from trainer.tracking.mlflow.summary_metrics import VALID

if TYPE_CHECKING:
    from mlflow import MlflowClient

BEST, SERVING = "best", "serving"
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
    client: MlflowClient,
    run: Any,
    folder: Path,
    *,
    params: dict[str, object],
    dataset: tuple[str, str] | None,
    register: str | None,
    progress: Progress,
    upload_s: float,
) -> str | None:
    """Log the best weights of a run as a model of MLflow, or complete one that was started.

    Returns:
        The model's id; None: the store is of a version of MLflow without logged models.

    Args:
        client: of the store.
        run: MLflow's, whose metrics have arrived.
        folder: the run's, see ``is_servable``.
        params: of the run, which the model gets too.
        dataset: name and digest of the validation data.
        register: the registered model that gets it as a new version, if any.
        progress: see ``Progress``.
        upload_s: seconds that the upload may take.
    """
    from mlflow.exceptions import MlflowException

    facts = json.loads((folder / SERVING / "serving.json").read_text(encoding="utf-8"))
    try:
        model = _find_or_create(client, run, folder, params)
    except MlflowException as error:
        if error.error_code not in ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED"):
            raise
        return None
    progress(0)
    step, model_id = int(facts["step"]), str(model.model_id)
    if str(model.status) != "READY":
        _upload(client, model, run.info.run_id, folder, facts, lambda: progress(upload_s))
        _link(client, run, model_id, step)
        _log_scores(client, run.info.run_id, folder, step, model_id, dataset)
        client.finalize_logged_model(model_id, "READY")
        progress(0)
    if register:
        _register(client, register, model_id, run.info.run_id)
        progress(0)
    return model_id


def _find_or_create(client: MlflowClient, run: Any, folder: Path, params: dict[str, object]) -> Any:
    digest = _digest(folder / BEST)
    own = f"source_run_id = '{run.info.run_id}' AND tags.`{WEIGHTS_TAG}` = '{digest}'"
    known = client.search_logged_models([run.info.experiment_id], filter_string=own, max_results=1)
    if known:
        return known[0]
    return client.create_logged_model(
        run.info.experiment_id,
        name="".join("_" if letter in "/:.%\"'" else letter for letter in run.info.run_name),
        source_run_id=run.info.run_id,
        tags={WEIGHTS_TAG: digest},
        params={valid_key(key): cut(str(value), 500) for key, value in params.items()},
        model_type=str(params.get("recipe", "")) or None,
    )


def _upload(
    client: MlflowClient, model: Any, run_id: str, folder: Path, facts: dict[str, Any], allow: Callable[[], None]
) -> None:
    for left in folder.glob(f"{_PREFIX}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder) as scratch:
        path = Path(scratch, "model")
        with _SAVING:
            _save(path, model, run_id, folder, facts)
        allow()
        client.log_model_artifacts(model.model_id, str(path))
        there = _sizes(client, model.model_id)
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and there.get(name, -1) not in (None, file.stat().st_size):  # None: it lists no sizes
                raise OSError(f"the upload of the model's {name} is incomplete")


def _sizes(client: MlflowClient, model_id: str, path: str | None = None) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for item in client.list_logged_model_artifacts(model_id, path):
        found |= _sizes(client, model_id, item.path) if item.is_dir else {item.path: item.file_size}
    return found


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
    weights = path / "artifacts" / BEST
    if facts["predictor"] == "text_generation":
        _add_transformers(described, path, light, model.name, facts)
    for file in (folder / BEST).rglob("*.safetensors"):
        link_or_copy(file, weights / file.relative_to(folder / BEST))
    described.model_size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    described.save(str(path / "MLmodel"))


def _add_transformers(described: Any, path: Path, light: Path, name: str, facts: dict[str, Any]) -> None:
    """Add the flavour of transformers, for ``mlflow.transformers.load_model``.

    By hand: MLflow's own way to do it without loading the weights fails with transformers 5.23, whose table of tasks
    holds names where it had classes.
    """
    tokenizer = path / "components" / "tokenizer"
    shutil.copytree(light, tokenizer)
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
    length = [ParamSpec("max_new_tokens", "long", NEW_TOKENS)]
    text = Schema([ColSpec("string")])
    if kind == "text_generation":
        return [facts["example"]], text, text, ParamSchema([*length, ParamSpec("do_sample", "boolean", False)])
    if kind == "text_to_text":
        return [facts["example"]], text, text, ParamSchema(length)
    if kind == "question_answering":
        columns = Schema([ColSpec("string", "question"), ColSpec("string", "context")])
        return facts["example"], columns, _columns(("string", "answer"), ("double", "score")), None
    from safetensors.numpy import load_file

    arrays = load_file(folder / SERVING / "example.safetensors")
    if kind == "image_classifier":
        image = Schema([TensorSpec(np.dtype(np.uint8), (-1, -1, -1, 3))])
        return arrays["input"], image, _columns(("string", "label"), ("double", "probability")), None
    alone = len(arrays) == 1 and facts["positional"]
    inputs = Schema(
        [
            TensorSpec(array.dtype, (-1, *array.shape[1:]) if array.ndim else (), None if alone else name)
            for name, array in arrays.items()
        ]
    )
    outputs = Schema(
        [
            TensorSpec(np.dtype(spec["dtype"]), (-1, *spec["shape"][1:]) if spec["shape"] else (), name or None)
            for name, spec in facts["outputs"].items()
        ]
    )
    return next(iter(arrays.values())) if alone else arrays, inputs, outputs, None


def _columns(*columns: tuple[str, str]) -> Any:
    from mlflow.types import ColSpec, Schema

    return Schema([ColSpec(kind, name) for kind, name in columns])


def _link(client: MlflowClient, run: Any, model_id: str, step: int) -> None:
    from mlflow.entities import LoggedModelOutput

    outputs = client.get_run(run.info.run_id).outputs
    if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
        client.log_outputs(run.info.run_id, [LoggedModelOutput(model_id, step)])


def _log_scores(
    client: MlflowClient, run_id: str, folder: Path, step: int, model_id: str, dataset: tuple[str, str] | None
) -> None:
    """Log the scores of the weights with their dataset: the same points as the run's, or it would have them twice."""
    from mlflow.entities import Metric

    points = []
    name, digest = dataset or (None, None)
    for key, value in _scores(folder / METRICS_FILE, step).items():
        stamps = [point.timestamp for point in client.get_metric_history(run_id, key) if point.step == step]
        if stamps:
            points.append(Metric(key, value, stamps[-1], step, model_id, name, digest, run_id))
    if points:
        client.log_batch(run_id, metrics=points, synchronous=True)


def _scores(log: Path, step: int) -> dict[str, float]:
    scores: dict[str, float] = {}
    for line in read_json_lines(log):
        if line["step"] == step:
            valid = {key: value for key, value in line.items() if key.startswith(VALID)}
            scores |= {valid_key(key): float(value) for key, value in valid.items() if value is not None}
    return scores


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


def _digest(folder: Path) -> str:
    """Return a hash of all weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
