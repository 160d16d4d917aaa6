"""The params and tags that MLflow gets when a run begins, with its datasets and its first Description."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainer.tracking.mlflow.datasets import log_datasets
from trainer.tracking.mlflow.description import opening_description, write_description
from trainer.tracking.mlflow.store import cut, valid_key

if TYPE_CHECKING:
    from mlflow import MlflowClient


def log_params_and_tags(
    client: MlflowClient,
    run: Any,
    given_params: dict[str, object],
    given_tags: dict[str, str],
    datasets: list[dict[str, Any]],
) -> None:
    """Log them. MLflow's params cannot be changed, so what a resumed run changed goes into a tag."""
    from mlflow.entities import Param, RunTag
    from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_TAG_VAL_LENGTH

    params = {
        valid_key(key): cut(value if isinstance(value, str) else json.dumps(value, default=str), MAX_PARAM_VAL_LENGTH)
        for key, value in given_params.items()
    }
    tags = dict(given_tags)
    known = run.data.params
    changed = [f"{key}={value}" for key, value in params.items() if known.get(key, value) != value]
    if changed:
        tags["changed_on_resume"] = " ".join(changed)
    new = [Param(key, value) for key, value in params.items() if key not in known]
    tag_list = [RunTag(valid_key(key), cut(str(value), MAX_TAG_VAL_LENGTH)) for key, value in tags.items()]
    client.log_batch(run.info.run_id, params=new, synchronous=True)  # the client divides what is too long
    client.log_batch(run.info.run_id, tags=tag_list, synchronous=True)
    log_datasets(client, run.info.run_id, datasets)
    write_description(client, run, opening_description(given_tags, datasets))
