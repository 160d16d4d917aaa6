"""``scripts/ui.py``: MLflow's page of all runs, and the addresses of runs on it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from trainer.errors import UserError, redacted
from trainer.tracking.store import database_file, tracking_uri

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
        example = "python scripts/train.py recipe=gpt2 precision=bf16"
        raise UserError(f"no runs yet in {database}; train something first: {example}")
    if _is_server(uri):
        print(f"the runs are at {redacted(uri)}")
        return
    port = free_port(options.port)
    if port != options.port:
        print(f"port {options.port} is taken, using {port}")
    print(f"starting MLflow on {redacted(uri)}: open http://{HOST}:{port} when it is running", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--no-access-log --timeout-graceful-shutdown 10"]
    # MLflow takes the store from the environment, too: a command line would show its password.
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment = {"PYTHONWARNINGS": "ignore"} | quiet | os.environ | {"MLFLOW_BACKEND_STORE_URI": uri}
    os.execve(sys.executable, command, environment)


def free_port(wanted: int) -> int:
    """Return the first free port, from ``wanted`` on.

    Raises:
        UserError: there is none among the next hundred.
    """
    for port in range(wanted, min(wanted + 100, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise UserError(f"port={wanted}: no free port from this one on; use another, such as port=5000")


def shown_at(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the line that says where in MLflow a run is."""
    when = "" if _is_server(uri) else ", while python scripts/ui.py runs"
    return f"in MLflow{when}: {page_of(uri)}/#/experiments/{experiment_id}/runs/{run_id}?{TRAINING}"


def curves_address(uri: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """Return the address of the page that draws each metric of some runs of an experiment in one chart."""
    runs = ", ".join(f"'{run_id}'" for run_id in run_ids)
    chosen = f"searchFilter={quote(f'attributes.run_id IN ({runs})')}"
    # In the order of time, MLflow hides the runs of a comparison below their parent, and draws nothing of them.
    order = f"orderByKey={quote('tags.`mlflow.runName`')}&orderByAsc=true"
    return f"{page_of(uri)}/#/experiments/{experiment_id}/runs?{TRAINING}&compareRunsMode=CHART&{chosen}&{order}"


def page_of(uri: str) -> str:
    """Return the beginning of the addresses on a store's page."""
    return uri.rstrip("/") if _is_server(uri) else f"http://{HOST}:{PORT}"


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))
