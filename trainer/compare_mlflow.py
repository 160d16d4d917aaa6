"""A comparison in MLflow: a parent run with the report, and the runs of its arms below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.compare import Result
from trainer.delivery import first_line, read_record
from trainer.mlflow_store import cut, lasting_uri, valid_key
from trainer.sync import send
from trainer.ui import comparison_address

PORT = 5000
"""Where ``scripts/ui.py`` shows the runs, unless that port is taken."""


def publish(result: Result, uri: str, files: list[Path]) -> list[str]:
    """Send what MLflow lacks of the comparison; what is there already is not sent twice.

    Args:
        result: of the comparison.
        uri: of the tracking store.
        files: of the report.

    Returns:
        What to tell the user: the address of MLflow's page, or why there is none.

    """
    folders = [outcome.folder for outcome in result.outcomes if outcome.finished]
    sent = [(folder, send(folder, uri)) for folder in folders]
    late = [f"{folder.name}: {outcome.text}" for folder, outcome in sent if outcome.left_over]
    if late:
        return [f"not all runs are in MLflow, so neither is the comparison ({late[0]}); the same command tries again"]
    records = [record for folder in folders if (record := read_record(folder)).get("tracking_uri") == lasting_uri(uri)]
    if not records:
        return ["the runs are not in MLflow (tracking=local)"]
    try:
        parent = _parent(result, uri, records, files)
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return [f"MLflow did not take the comparison ({first_line(error)}); the same command tries again"]
    base = uri if uri.startswith(("http://", "https://")) else f"http://127.0.0.1:{PORT}"
    address = comparison_address(base, records[0]["experiment_id"], [parent, *(record["run_id"] for record in records)])
    where = "" if base == uri else " (while python scripts/ui.py runs)"
    return [f"side by side in MLflow{where}:", f"  {address}"]


def _parent(result: Result, uri: str, records: list[dict[str, Any]], files: list[Path]) -> str:
    from trainer.mlflow_store import connect, create_run

    client = connect(uri)
    about = result.comparison
    run_ids = [record["run_id"] for record in records]
    experiment = client.get_experiment(records[0]["experiment_id"]).name
    known = client.get_run(run_ids[0]).data.tags.get("mlflow.parentRunId")
    # Without a parent yet, the first run's id stands for the comparison: the same command finds it again.
    key = f"comparison-of-{run_ids[0]}"
    began = min(client.get_run(run_id).info.start_time for run_id in run_ids) / 1000
    parent = known or create_run(client, uri, experiment, f"compare-{about.name}", key, began).info.run_id
    for run_id in run_ids:
        client.set_tag(run_id, "mlflow.parentRunId", parent)
    params = {"arms": ", ".join(arm.label for arm in about.arms), "baseline": about.baseline, "margin": about.margin}
    for name, value in (params | {"common": " ".join(about.common)}).items():
        client.log_param(parent, name, cut(str(value), 500))
    for arm in result.arms:
        client.set_tag(parent, valid_key(f"quality.{arm.label}"), arm.quality.verdict)
        for name, value in _numbers(arm).items():
            client.log_metric(parent, valid_key(f"{arm.label}/{name}"), value, step=len(about.seeds))
    for file in files:
        client.log_artifact(parent, str(file))
    client.set_terminated(parent, "FINISHED")
    return str(parent)


def _numbers(arm: Any) -> dict[str, float]:
    found = {
        "speed_ratio": arm.speed.ratio and arm.speed.ratio.mean,
        "memory_ratio": arm.memory.ratio and arm.memory.ratio.mean,
        "energy_ratio": arm.energy.ratio and arm.energy.ratio.mean,
        "loss_difference": arm.quality.test and arm.quality.test.difference.mean,
    }
    return {name: value for name, value in found.items() if value is not None}
