"""Reports in MLflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.errors import first_line
from trainer.tracking.store import connect, usable_uri
from trainer.tracking.ui import shown_at

if TYPE_CHECKING:
    from mlflow import MlflowClient


def publish(what: str, uri: str, send: Callable[[MlflowClient], Any]) -> str:
    """Send a report to MLflow. Where that fails, a line says so: the report is on the disk, and is sent again later.

    Args:
        what: what is sent, in words, such as "the comparison".
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
