"""The table of a run's modules and their dtypes on MLflow's page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.files import read_object

if TYPE_CHECKING:
    from mlflow import MlflowClient

MODULES_TABLE = "precision_modules.json"


def log_modules(client: MlflowClient, run_id: str, precision: Path) -> None:
    """Log the modules in a run's ``precision.json`` as ``MlflowClient.log_table`` does, which would append to it later.

    Nothing if there are none: the run is of an earlier version.
    """
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    rows = read_object(precision).get("modules")
    if not rows:
        return
    table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
    client.log_dict(run_id, table, MODULES_TABLE)
    shown = json.loads(client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
    entry = {"path": MODULES_TABLE, "type": "table"}  # MLflow's page shows these files as tables
    if entry not in shown:
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*shown, entry]))
