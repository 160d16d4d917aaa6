"""A run's model in MLflow: its entry in the Models tab, the description of ``best/`` that opens it, its versions."""

from __future__ import annotations

import platform
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import BEST, read_object
from trainer.tracking.store import KEY_TAG, metric_key

if TYPE_CHECKING:
    from mlflow import MlflowClient

PIPELINES = {
    "GPT2LMHeadModel": ("text-generation", "TextGenerationPipeline"),
    "LlamaForCausalLM": ("text-generation", "TextGenerationPipeline"),
    "BertForMaskedLM": ("fill-mask", "FillMaskPipeline"),
}
"""Task and class of the pipeline that answers with a model of transformers, by the model's class."""


def log_model(client: MlflowClient, run_id: str, key: str, lines: list[dict[str, Any]], params: dict[str, str]) -> None:
    """Make the entry of a run in MLflow's Models tab, with the metrics of its best weights.

    The tab shows one value of a metric, the first. So the entry is made anew when the run has other best weights.

    Args:
        client: of the store.
        run_id: MLflow's, of a run that has ended.
        key: ``TrackedRun.key``, which marks the entry: a user may have made others of the run.
        lines: of a metric log.
        params: shown beside the metrics.
    """
    from mlflow.entities import LoggedModelStatus, Metric

    points = {}
    for line in lines:
        for name in line.keys() - {"step", "time"}:
            if line[name] is not None:
                at_ms = int(line["time"] * 1000)
                points[metric_key(name)] = Metric(metric_key(name), float(line[name]), at_ms, line["step"])
    run = client.get_run(run_id)
    for known in client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'"):
        if known.tags.get(KEY_TAG) == key:
            values = {(metric.key, metric.value) for metric in known.metrics or ()}
            if known.status == LoggedModelStatus.READY and values >= {(one.key, one.value) for one in points.values()}:
                return
            client.delete_logged_model(known.model_id)
    name = re.sub(r"[/:.%\"']", "_", run.info.run_name)
    model = client.create_logged_model(run.info.experiment_id, name, run_id, tags={KEY_TAG: key}, params=params)
    metrics = []
    for point in points.values():
        # The run has them, too, and takes the same point no second time: one of before a resume has another time.
        history = client.get_metric_history(run_id, point.key)
        times = [one.timestamp for one in history if (one.step, one.value) == (point.step, point.value)]
        metrics.append(Metric(point.key, point.value, (times or [point.timestamp])[0], point.step, model.model_id))
    client.log_batch(run_id, metrics=metrics, synchronous=True)
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def architecture(folder: Path) -> str:
    """Return the class of the best weights in a run's folder, if it is one of ``PIPELINES``; else an empty string."""
    name = (read_object(folder / BEST / "config.json").get("architectures") or [""])[0]
    return name if name in PIPELINES else ""


def describe(path: Path, best: Path, run_id: str) -> None:
    """Write MLflow's description of exported weights, and the tokenizer where MLflow looks for it.

    ``mlflow.transformers.save_model`` would record this machine's path, and look it up on the hub.

    Args:
        path: an empty folder, whose files MLflow gets beside the weights.
        best: the weights, whose class is one of ``PIPELINES``.
        run_id: MLflow's, of the run.
    """
    from mlflow.models import Model, infer_signature

    shutil.copytree(best, path / "components" / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors*"))
    name = architecture(best.parent)
    task, pipeline = PIPELINES[name]
    signature = infer_signature([""], [""], {"max_new_tokens": 64} if task == "text-generation" else None)
    described = Model(artifact_path=BEST, run_id=run_id, signature=signature)
    described.add_flavor(
        "transformers",
        transformers_version=version("transformers"),
        code=None,
        task=task,
        instance_type=pipeline,
        torch_dtype=None,
        pipeline_model_type=name,
        source_model_name=name,
        model_binary=".",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
    )
    described.add_flavor(
        "python_function", loader_module="mlflow.transformers", python_version=platform.python_version()
    )
    described.save(str(path / "MLmodel"))


def register(client: MlflowClient, name: str, run_id: str) -> None:
    """Make the best weights of a run a version of a registered model, unless they are one."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise
    quoted, source = name.replace("'", "''"), f"runs:/{run_id}/{BEST}"
    if source not in [known.source for known in client.search_model_versions(f"name = '{quoted}'")]:
        client.create_model_version(name, source, run_id=run_id)
