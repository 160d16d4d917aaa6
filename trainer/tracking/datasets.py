"""The datasets of a run in MLflow: name, source, digest, sizes."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from trainer.data.contract import Datasets
    from trainer.recipe import DataSource

DIGEST_LENGTH = 32
"""MLflow takes 36 characters."""


def dataset_facts(source: DataSource, datasets: Datasets) -> list[dict[str, Any]]:
    """Return what ``tracking.json`` keeps of the training and the validation data, plain JSON types."""
    # With torch, which sending a run to MLflow does not need.
    from trainer.data.contract import fingerprint

    options = {entry.name: getattr(source, entry.name) for entry in dataclasses.fields(source)}
    plain = {key: value for key, value in options.items() if isinstance(value, (str, int, float))}
    return [
        {
            "context": context,
            "name": source.kind,
            "digest": fingerprint(part)[:DIGEST_LENGTH],
            "source": {"tags": {"mlflow.source.name": "scripts/train.py", "data": source.kind, **plain}},
            "samples": len(part),
            "description": datasets.description,
        }
        for context, part in (("training", datasets.train), ("validation", datasets.valid))
    ]


def log_datasets(client: MlflowClient, run_id: str, facts: list[dict[str, Any]]) -> None:
    """Log the datasets of a run; those that it has stay as they are."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for entry in facts:
        profile = json.dumps({"num_rows": entry["samples"], "description": entry["description"]})
        data = Dataset(entry["name"], entry["digest"], "code", json.dumps(entry["source"]), None, profile)
        inputs.append(DatasetInput(data, [InputTag("mlflow.data.context", entry["context"])]))
    if inputs:
        client.log_inputs(run_id, inputs)
