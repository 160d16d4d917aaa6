"""A run's model in MLflow: its entry in the Models tab, the description of ``best/`` that opens it, its versions."""

from __future__ import annotations

import platform
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import BEST, read_object

if TYPE_CHECKING:
    from mlflow import MlflowClient

PIPELINES = {
    "GPT2LMHeadModel": ("text-generation", "TextGenerationPipeline"),
    "LlamaForCausalLM": ("text-generation", "TextGenerationPipeline"),
    "BertForMaskedLM": ("fill-mask", "FillMaskPipeline"),
}
"""Task and class of the pipeline that answers with a model of transformers, by the model's class."""


EVALUATED = ("valid/", "test_")
"""How the names of the metrics begin that the model of a run has, too."""


def logged_model(client: MlflowClient, run: Any, params: dict[str, str]) -> Any:
    """Return the model of a run in MLflow's Models tab; the first call makes it.

    Args:
        client: of the store.
        run: MLflow's.
        params: shown beside the model's metrics.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    run_id, experiment_id = run.info.run_id, run.info.experiment_id
    known = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1)
    name = re.sub(r"[/:.%\"']", "_", run.info.run_name)
    model = known[0] if known else client.create_logged_model(experiment_id, name, run_id, params=params)
    if model.status != LoggedModelStatus.READY:  # new, or made by a process that was killed
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        model = client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return model


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
