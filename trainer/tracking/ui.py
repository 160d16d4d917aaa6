"""MLflow's page over the runs of this project: which server to start, and which addresses to open."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from trainer.errors import RunError, UserError, first_line
from trainer.tracking.mlflow.store import connect, database_file, without_password
from trainer.tracking.views import share_views

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

HOST = "127.0.0.1"
FIRST_RUN = "python scripts/train.py recipe=gpt2 precision=bf16"
TRAINING = "workflowType=machine_learning"
"""Without it MLflow's page opens in its view for language-model applications."""
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0


class Newest(NamedTuple):
    """The experiment that was worked on last, and its newest runs, newest first."""

    experiment: str
    experiment_id: str
    run_ids: list[str]
    run_names: list[str]
    views: bool = False
    """Whether the store has the views of trainer/tracking/views.py."""


def check_store(uri: str) -> None:
    """Refuse to show a store that is not there.

    Raises:
        UserError: no database file yet, or a store that has a page of its own.

    """
    if uri.startswith(("databricks", "uc")):
        raise UserError(f"the runs are in {uri}, which has its own page: open it in your workspace")
    database = database_file(uri)
    if database and not database.exists():
        raise UserError(f"no runs yet in {database}; train something first: {FIRST_RUN}")


def open_store(uri: str) -> MlflowClient:
    """Connect to a store that should be there.

    Raises:
        UserError: it does not answer, or is no MLflow store.

    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return connect(uri)
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no MLflow can be read at {without_password(uri)}: {reason}") from None


def newest_runs(uri: str, experiment: str | None, count: int) -> Newest:
    """Find the newest runs, of one experiment or of the one that was worked on last.

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
    return Newest(names[chosen], chosen, run_ids, [run.info.run_name for run in runs], _shared(client, chosen, run_ids))


def _shared(client: MlflowClient, experiment_id: str, run_ids: list[str]) -> bool:
    try:
        share_views(client, experiment_id, run_ids)
    except Exception as error:  # of many kinds: a store that may only be read is shown as it is
        log.warning("The columns and charts of this project cannot be stored in MLflow (%s).", first_line(error))
        return False
    return True


def experiment_address(base: str, experiment_id: str, view: str | None = None) -> str:
    """Return the address of an experiment's table of runs, with the columns of a view (``views.py``)."""
    shared = f"&viewStateShareKey={view}" if view else ""
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
    """Return the first port from ``wanted`` on that nothing listens on.

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
    raise UserError(f"port={wanted}: no free port from there on; name another, such as port=5000")


class Server:
    """An MLflow server over a store, bound to the loopback interface; a context manager that stops it."""

    def __init__(self, uri: str, port: int) -> None:
        self.address = f"http://{HOST}:{port}"
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
        command += ["--backend-store-uri", uri, "--workers", "1"]
        # Its background jobs serve other features of MLflow, with a set of processes of their own.
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._process = subprocess.Popen(
            command,
            env=quiet | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches only us, and stopping reaches all its children
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self._process.wait()
        self._log.close()

    def wait_until_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            RunError: it ended, or did not answer in time; with the end of what it printed.

        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RunError(f"the MLflow server ended at once:\n{self._last_words()}")
            if answers(self.address):
                return
            time.sleep(0.2)
        raise RunError(f"the MLflow server does not answer at {self.address}:\n{self._last_words()}")

    def wait(self) -> int:
        """Wait until the server ends, and return its exit status."""
        return self._process.wait()

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-15:])


def answers(address: str, timeout_s: float = 5.0) -> bool:
    """Tell whether an MLflow server answers at this address. A proxy is not asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address.rstrip('/')}/health", timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
