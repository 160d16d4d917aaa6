"""``scripts/ui.py``: MLflow's page of all runs."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from trainer.errors import UserError, redacted
from trainer.files import command
from trainer.tracking.store import VIEW, VIEW_TAG, connect, database_file, tracking_uri

HOST = "127.0.0.1"
PORT = 5000
TRAINING = "workflowType=machine_learning"
"""Without it MLflow's page opens in its view for language-model applications."""


@dataclass
class UiOptions:
    """Options of scripts/ui.py."""

    port: int = PORT
    uri: str = ""


def ui(options: UiOptions) -> None:
    """Become MLflow's server of a store, until Ctrl-C, or print where the page is that a server has."""
    uri = tracking_uri(options.uri or None, "uri")
    database = database_file(uri)
    if uri.startswith(("databricks", "uc")):
        raise UserError(f"the runs are in {uri}, which has its own page: open it in your workspace")
    if database and not database.exists():
        store = [f"tracking.uri={options.uri}"] if options.uri else []
        example = command("train.py", ["recipe=gpt2", "precision=bf16", *store])
        raise UserError(f"no runs yet in {database}; train something first: {example}")
    if _is_server(uri):
        print(f"the runs are at {redacted(uri)}")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, options.port))
        except (OSError, OverflowError) as error:
            raise UserError(f"port={options.port} cannot be used ({error}); use another, such as port=5001") from None
    from mlflow.exceptions import MlflowException

    page = f"http://{HOST}:{options.port}"
    print(f"starting MLflow on {redacted(uri)}: open {page} when it is running", flush=True)
    with suppress(MlflowException):  # of a store that MLflow does not take, its server says what is wrong
        for experiment in connect(uri).search_experiments():
            if VIEW_TAG in experiment.tags:
                table = f"{page}/#/experiments/{experiment.experiment_id}/runs?{TRAINING}&viewStateShareKey={VIEW}"
                print(f"  {experiment.name:<10}  {table}", flush=True)
    server = [sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(options.port), "--workers", "1"]
    server += ["--uvicorn-opts", "--no-access-log --timeout-graceful-shutdown 10"]
    # MLflow takes the store from the environment, too: a command line would show its password.
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment = {"PYTHONWARNINGS": "ignore"} | quiet | os.environ | {"MLFLOW_BACKEND_STORE_URI": uri}
    os.execve(sys.executable, server, environment)


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))
