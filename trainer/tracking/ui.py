"""MLflow's page: the newest runs of a store, the addresses that show them, and the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from trainer.errors import RunError, UserError, first_line
from trainer.tracking.mlflow.store import connect, database_file, without_password
from trainer.tracking.views import share_views

if TYPE_CHECKING:
    from mlflow import MlflowClient

HOST = "127.0.0.1"
FIRST_RUN = "python scripts/train.py recipe=gpt2 precision=bf16"
TRAINING = "workflowType=machine_learning"
"""Without it MLflow's page opens in its view for language-model applications."""
PORT = 5000
STOP_TIMEOUT_S = 10


class Newest(NamedTuple):
    """The experiment with the newest run, and its newest runs, newest first."""

    experiment: str
    experiment_id: str
    run_ids: list[str]
    run_names: list[str]
    views: bool
    """Whether the store has the views of trainer/tracking/views.py."""


def check_store(uri: str) -> None:
    """Check that ``uri`` is a store that this project can show.

    Raises:
        UserError: there is no database file yet, or the store has its own page.
    """
    if uri.startswith(("databricks", "uc")):
        raise UserError(f"the runs are in {uri}, which has its own page: open it in your workspace")
    database = database_file(uri)
    if database and not database.exists():
        raise UserError(f"no runs yet in {database}; train something first: {FIRST_RUN}")


def open_store(uri: str) -> MlflowClient:
    """Connect to a store that exists.

    Raises:
        UserError: it does not answer, or is no MLflow store.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return connect(uri)
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise UserError(f"cannot read an MLflow store at {without_password(uri)}: {first_line(error)}") from None


def newest_runs(uri: str, experiment: str | None, count: int) -> Newest:
    """Find the newest runs, of one experiment or of the one with the newest run.

    Raises:
        UserError: there are none, no such experiment, or the store cannot be read.
    """
    client = open_store(uri)
    experiments = client.search_experiments()
    names = {item.experiment_id: item.name for item in experiments}
    wanted = [key for key, name in names.items() if experiment in (None, name)]
    if not wanted:
        known = ", ".join(sorted(names.values()))
        raise UserError(f"experiment={experiment}: no such experiment; there are: {known}")
    order = ["attributes.start_time DESC"]
    latest = client.search_runs(wanted, order_by=order, max_results=1)
    if not latest:
        raise UserError(f"no runs yet in {without_password(uri)}; train something first: {FIRST_RUN}")
    chosen = latest[0].info.experiment_id
    runs = client.search_runs([chosen], order_by=order, max_results=count)
    run_ids = [run.info.run_id for run in runs]
    views = share_views(client, chosen, run_ids)
    return Newest(names[chosen], chosen, run_ids, [run.info.run_name for run in runs], views)


def server_address(port: int = PORT) -> str:
    """Return the address of a server that ``serve`` has started."""
    return f"http://{HOST}:{port}"


def experiment_address(base: str, experiment_id: str, view: str | None = None) -> str:
    """Return the address of an experiment's table of runs, with the columns of a view (``views.py``)."""
    shared = f"&viewStateShareKey={quote(view)}" if view else ""
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{TRAINING}{shared}"


def curves_address(base: str, experiment_id: str, view: str | None = None) -> str:
    """Return the address of the page that draws each metric of an experiment's runs in one chart."""
    return f"{experiment_address(base, experiment_id, view)}&compareRunsMode=CHART"


def run_address(base: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page."""
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?{TRAINING}"


def comparison_address(base: str, experiment_id: str, run_ids: list[str]) -> str:
    """Return the address of the page that shows the params and metrics of runs side by side."""
    runs, experiments = (quote(json.dumps(ids, separators=(",", ":")), safe="") for ids in (run_ids, [experiment_id]))
    return f"{base.rstrip('/')}/#/compare-runs?runs={runs}&experiments={experiments}&{TRAINING}"


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


def serve(uri: str, port: int) -> None:
    """Run ``mlflow server`` for a store (its password in ``uri``) on the loopback interface, until Ctrl-C ends it.

    Raises:
        KeyboardInterrupt: Ctrl-C; the server has ended.
        RunError: the server has ended by itself; it has printed why.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", f"--no-access-log --timeout-graceful-shutdown {STOP_TIMEOUT_S}"]
    # MLflow takes these from the environment only, but for the store, whose password a command line would show.
    # Its background jobs serve other features, with a set of processes of their own.
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment = {"PYTHONWARNINGS": "ignore"} | quiet | os.environ | {"MLFLOW_BACKEND_STORE_URI": uri}
    # Ctrl-C reaches only us, because uvicorn ends with a traceback where it is interrupted twice.
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True) as server:
        try:
            server.wait()
        except KeyboardInterrupt:
            os.killpg(server.pid, signal.SIGTERM)  # the whole group: mlflow starts uvicorn before it forwards signals
            server.wait()
            raise
    raise RunError(f"the MLflow server ended with status {server.returncode}")
