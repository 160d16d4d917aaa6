"""``scripts/ui.py``: MLflow's page of the newest runs, the addresses that show them, and the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from trainer.errors import RunError, UserError, first_line, redacted
from trainer.tracking.mlflow.addresses import database_file, tracking_uri
from trainer.tracking.mlflow.store import connect

HOST = "127.0.0.1"
PORT = 5000
FIRST_RUN = "train something first: python scripts/train.py recipe=gpt2 precision=bf16"
TRAINING = "workflowType=machine_learning"
"""Without it MLflow's page opens in its view for language-model applications."""
STOP_TIMEOUT_S = 10


@dataclass
class UiOptions:
    """Of scripts/ui.py."""

    port: int = PORT
    uri: str = ""
    experiment: str = ""
    runs: int = 6


def ui(options: UiOptions) -> int:
    """Print the addresses of the newest runs, and serve MLflow's page until Ctrl-C where no server does."""
    try:
        uri = tracking_uri(options.uri or None, "uri")
        experiment, runs = newest_runs(uri, options.experiment or None, options.runs)
        if _is_server(uri):
            _show(uri, experiment, runs)
        else:
            port = free_port(options.port)
            if port != options.port:
                print(f"port {options.port} is taken, using {port}")
            _show(server_address(port), experiment, runs)
            print(f"starting MLflow on {redacted(uri)}: open these addresses when it is running")
            _serve(uri, port)
    except KeyboardInterrupt:
        print("\nstopped")
    return 0


def newest_runs(uri: str, experiment: str | None, count: int) -> tuple[str, list[Any]]:
    """Find the newest runs, of one experiment or of the one with the newest run.

    Returns:
        The experiment's name, and MLflow's ``info`` of its runs, newest first.

    Raises:
        UserError: there are none, no such experiment, the store cannot be read, or has its own page.
    """
    if uri.startswith(("databricks", "uc")):
        raise UserError(f"the runs are in {uri}, which has its own page: open it in your workspace")
    database = database_file(uri)
    if database and not database.exists():
        raise UserError(f"no runs yet in {database}; {FIRST_RUN}")
    try:
        client = connect(uri)
        names = {item.experiment_id: item.name for item in client.search_experiments()}
    except UserError:
        raise
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        raise UserError(f"cannot read an MLflow store at {redacted(uri)}: {first_line(error)}") from None
    wanted = [key for key, name in names.items() if experiment in (None, name)]
    if not wanted:
        known = ", ".join(sorted(names.values()))
        raise UserError(f"experiment={experiment}: no such experiment; there are: {known}")
    order = ["attributes.start_time DESC"]
    latest = client.search_runs(wanted, order_by=order, max_results=1)
    if not latest:
        raise UserError(f"no runs yet in {redacted(uri)}; {FIRST_RUN}")
    chosen = latest[0].info.experiment_id
    return names[chosen], [run.info for run in client.search_runs([chosen], order_by=order, max_results=count)]


def server_address(port: int = PORT) -> str:
    """Return the address of the server that ``ui`` starts."""
    return f"http://{HOST}:{port}"


def experiment_address(base: str, experiment_id: str) -> str:
    """Return the address of an experiment's table of runs."""
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{TRAINING}"


def curves_address(base: str, experiment_id: str, run_ids: Sequence[str] = ()) -> str:
    """Return the address of the page that draws each metric of an experiment's runs, or of some, in one chart."""
    address = f"{experiment_address(base, experiment_id)}&compareRunsMode=CHART"
    if not run_ids:
        return address
    runs = ", ".join(f"'{run_id}'" for run_id in run_ids)
    # In the order of time, MLflow hides the runs of a comparison below their parent, and draws nothing of them.
    chosen = {"searchFilter": f"attributes.run_id IN ({runs})", "orderByKey": "tags.`mlflow.runName`"}
    return f"{address}&{urlencode(chosen, quote_via=quote)}&orderByAsc=true"


def comparison_address(base: str, experiment_id: str, run_ids: list[str]) -> str:
    """Return the address of the page that shows the params and metrics of runs side by side."""
    runs, experiments = (quote(json.dumps(ids, separators=(",", ":")), safe="") for ids in (run_ids, [experiment_id]))
    return f"{base.rstrip('/')}/#/compare-runs?runs={runs}&experiments={experiments}&{TRAINING}"


def page_of(uri: str) -> str:
    """Return the base of a store's addresses."""
    return uri if _is_server(uri) else server_address()


def shown_at(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the line that says where in MLflow a run is."""
    when = "" if _is_server(uri) else ", while python scripts/ui.py runs"
    return f"in MLflow{when}: {page_of(uri).rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?{TRAINING}"


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


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _show(base: str, experiment: str, runs: list[Any]) -> None:
    """Print what to open."""
    experiment_id, ids = runs[0].experiment_id, [run.run_id for run in runs]
    print(f"experiment {experiment}: {experiment_address(base, experiment_id)}")
    print(f"its curves: {curves_address(base, experiment_id)}")
    if len(runs) > 1:
        print(f"compare {', '.join(run.run_name for run in runs)}:")
        print(f"  {curves_address(base, experiment_id, ids)}")
        print("all params and metrics of these runs, side by side:")
        print(f"  {comparison_address(base, experiment_id, ids)}")


def _serve(uri: str, port: int) -> None:
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
