"""``scripts/ui.py``: MLflow's page of all runs, the addresses that show them, and the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from trainer.errors import RunError, UserError, first_line, redacted
from trainer.tracking.mlflow.addresses import database_file, tracking_uri
from trainer.tracking.mlflow.store import connect
from trainer.tracking.options import is_own_tag

HOST = "127.0.0.1"
PORT = 5000
FIRST_RUN = "train something first: python scripts/train.py recipe=gpt2 precision=bf16"
TRAINING = "workflowType=machine_learning"
"""Without it MLflow's page opens in its view for language-model applications."""
STOP_TIMEOUT_S = 10
MOST_RUNS = 200
"""The newest ones, of which the columns follow."""
MOST_COLUMNS = 8
VIEW = "mantissa"
"""The key of the shared view (what MLflow's button "Share" makes) that ``share_view`` writes."""
_PLACES = ("run_name", "output_dir", "resume", "hardware.", "tracking.", "checkpoint.")
"""Params, or the beginnings of their names, that say nothing about what was trained."""


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
        experiments, runs = newest_runs(uri, options.experiment or None)
        query = share_view(uri, [*experiments], runs)
        if _is_server(uri):
            _show(uri, experiments, runs[: options.runs], query)
        else:
            port = free_port(options.port)
            if port != options.port:
                print(f"port {options.port} is taken, using {port}")
            _show(server_address(port), experiments, runs[: options.runs], query)
            print(f"starting MLflow on {redacted(uri)}: open these addresses when it is running")
            _serve(uri, port)
    except KeyboardInterrupt:
        print("\nstopped")
    return 0


def newest_runs(uri: str, experiment: str | None = None, count: int = MOST_RUNS) -> tuple[dict[str, str], list[Any]]:
    """Find the newest runs, of one experiment or of all.

    Returns:
        The names of the experiments by MLflow's id, and MLflow's runs, newest first.

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
    runs = client.search_runs(wanted, order_by=["attributes.start_time DESC"], max_results=count)
    if not runs:
        raise UserError(f"no runs yet in {redacted(uri)}; {FIRST_RUN}")
    used = {run.info.experiment_id for run in runs}
    return {key: names[key] for key in sorted(wanted) if key in used or key != "0"}, runs  # 0: MLflow's own, Default


def columns(runs: Sequence[Any]) -> dict[str, int]:
    """Return MLflow's names of the columns for a table of runs, with the characters of the longest value in each.

    They are the tags that users have set, the params whose values differ within an experiment (of several that differ
    together one, those with most values first), and the scores.
    """
    tags = {key for run in runs for key in run.data.tags if not is_own_tag(key)}
    texts = {f"tags.`{key}`": [run.data.tags.get(key) for run in runs] for key in sorted(tags)}
    places = [run.info.experiment_id for run in runs]
    varied: dict[tuple[int, ...], str] = {}  # by which runs have the same value
    for key in sorted({key for run in runs for key in run.data.params if not key.startswith(_PLACES)}, key=len):
        values = [run.data.params.get(key) for run in runs]
        varied.setdefault(tuple(map(values.index, values)), key)

    def kinds(alike: Sequence[int]) -> int:
        return len(set(zip(places, alike, strict=True)))

    differ = sorted((alike for alike in varied if kinds(alike) > len(set(places))), key=kinds, reverse=True)
    for key in (varied[alike] for alike in differ[:MOST_COLUMNS]):
        texts[f"params.`{key}`"] = [run.data.params.get(key) for run in runs]
    best = sorted({key for run in runs for key in run.data.metrics if key.startswith("best/")})
    texts |= {f"metrics.`{key}`": ["12345.6789"] for key in (*best, "final/throughput", "final/peak_memory_mib")}
    return {column: max(len(text or "") for text in values) for column, values in texts.items()}


def share_view(uri: str, experiment_ids: Sequence[str], runs: Sequence[Any]) -> str:
    """Store in MLflow how the table of runs is shown; return what an address needs for it, nothing if MLflow refuses.

    It is wide enough for the runs' names, and has the columns of ``columns``.
    """
    chosen = columns(runs)
    widths = {column: 32 + 7 * max(len(column.split("`")[1]), min(longest, 40)) for column, longest in chosen.items()}
    first = {"attributes.`Run Name`": 60 + 6 * max(len(run.info.run_name) for run in runs), "runDateAndNestInfo": 150}
    if len(experiment_ids) > 1:
        first["attributes.`Experiment Name`"] = 140
    widths = first | widths
    view = {"selectedColumns": [*widths][2:], "columnOrder": [*widths], "columnWidths": widths}
    try:
        connect(uri).set_experiment_tag(experiment_ids[0], f"mlflow.sharedViewState.{VIEW}", json.dumps(view))
    except Exception:  # of many kinds, such as that of a server without the right to write
        return ""
    return f"&viewStateShareKey={VIEW}"


def server_address(port: int = PORT) -> str:
    """Return the address of the server that ``ui`` starts."""
    return f"http://{HOST}:{port}"


def table_address(base: str, experiment_ids: Sequence[str]) -> str:
    """Return the address of the table of the runs of experiments."""
    if len(experiment_ids) == 1:
        return f"{base.rstrip('/')}/#/experiments/{experiment_ids[0]}/runs?{TRAINING}"
    return f"{base.rstrip('/')}/#/compare-experiments/s?experiments={_listed(experiment_ids)}&{TRAINING}"


def curves_address(base: str, experiment_ids: Sequence[str], run_ids: Sequence[str] = ()) -> str:
    """Return the address of the page that draws each metric of the runs of experiments, or of some, in one chart."""
    address = f"{table_address(base, experiment_ids)}&compareRunsMode=CHART"
    if not run_ids:
        return address
    runs = ", ".join(f"'{run_id}'" for run_id in run_ids)
    # In the order of time, MLflow hides the runs of a comparison below their parent, and draws nothing of them.
    chosen = {"searchFilter": f"attributes.run_id IN ({runs})", "orderByKey": "tags.`mlflow.runName`"}
    return f"{address}&{urlencode(chosen, quote_via=quote)}&orderByAsc=true"


def comparison_address(base: str, experiment_ids: Sequence[str], run_ids: Sequence[str]) -> str:
    """Return the address of the page that shows the params and metrics of runs side by side."""
    place = f"runs={_listed(run_ids)}&experiments={_listed(experiment_ids)}"
    return f"{base.rstrip('/')}/#/compare-runs?{place}&{TRAINING}"


def _listed(ids: Sequence[str]) -> str:
    return quote(json.dumps([*ids], separators=(",", ":")), safe="")


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


def _show(base: str, experiments: Mapping[str, str], runs: Sequence[Any], query: str) -> None:
    """Print what to open; ``query``: see ``share_view``."""
    every, ids = [*experiments], [run.info.run_id for run in runs]
    print(f"all runs ({', '.join(experiments.values())}):")
    print(f"  {table_address(base, every)}{query}")
    print(f"their curves:\n  {curves_address(base, every)}")
    if len(runs) > 1:
        own = list(dict.fromkeys(run.info.experiment_id for run in runs))
        print(f"compare {', '.join(run.info.run_name for run in runs)}:")
        print(f"  {curves_address(base, own, ids)}")
        print("all params and metrics of these runs, side by side:")
        print(f"  {comparison_address(base, own, ids)}")


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
