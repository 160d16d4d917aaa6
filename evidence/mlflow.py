"""A run in MLflow above others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import first_line
from trainer.tracking.store import connect, create_run, usable_uri
from trainer.tracking.tracked_run import TrackedRun
from trainer.tracking.ui import shown_at

if TYPE_CHECKING:
    from mlflow import MlflowClient


def publish(what: str, uri: str, send: Callable[[MlflowClient], Any]) -> str:
    """Send a report to MLflow. Where that fails, a line says so: the report is on the disk, and is sent again later.

    Args:
        what: what is sent, in words, such as "the search".
        uri: MLflow's address.
        send: takes the client, sends what MLflow lacks, and returns the run.

    Returns:
        A line to print: the address of the run's page, or why there is none.
    """
    try:
        uri = usable_uri(uri)
        run = send(connect(uri))
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return f"{what} is not in MLflow ({first_line(error)}); run the same command again to retry"
    return shown_at(uri, run.info.experiment_id, run.info.run_id)


def run_above(client: MlflowClient, runs: Sequence[TrackedRun], name: str, key: str, began_s: float) -> Any:
    """Create the run that MLflow's pages fold others under, or find it by its key, and return it."""
    experiment = client.get_experiment(runs[0].experiment_id).name
    above = create_run(client, experiment, name, key, began_s)
    client.set_tag(above.info.run_id, "precision", ", ".join(dict.fromkeys(run.tags["precision"] for run in runs)))
    for run in runs:
        client.set_tag(str(run.run_id), "mlflow.parentRunId", above.info.run_id)
    if above.info.status != "FINISHED":
        client.set_terminated(above.info.run_id)
    return above
