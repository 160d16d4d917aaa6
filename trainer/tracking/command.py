"""The commands of scripts/sync.py and scripts/ui.py, and their options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.tracking.mlflow.store import explicit_uri, tracking_uri, without_password
from trainer.tracking.mlflow.sync import SyncStatus, check_run, runs_in, send
from trainer.tracking.ui import (
    PORT,
    Newest,
    check_store,
    comparison_address,
    curves_address,
    experiment_address,
    free_port,
    newest_runs,
    serve,
    server_address,
)
from trainer.tracking.views import COMPARISON, VIEW


@dataclass
class SyncOptions:
    """Of scripts/sync.py."""

    output_dir: Path = Path("outputs")
    uri: str = ""


@dataclass
class UiOptions:
    """Of scripts/ui.py."""

    port: int = PORT
    uri: str = ""
    experiment: str = ""
    runs: int = 6


def sync(options: SyncOptions, named: Sequence[str]) -> int:
    """Send runs to MLflow, and print a line for each.

    Args:
        options: of the command line.
        named: run folders; none: every run that is not complete.

    Returns:
        The exit code: 1 if something is still missing in MLflow.

    Raises:
        UserError: ``uri`` is not one, or a folder holds no run.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("mantissa").setLevel(logging.INFO)
    uri = options.uri or None
    explicit_uri(uri, "uri")
    folders = [check_run(Path(folder)) for folder in named] or runs_in(options.output_dir)
    if not folders:
        print(f"no runs in {options.output_dir}")
    incomplete = False
    for folder in folders:
        result = send(folder, uri, named=bool(named))
        incomplete |= result.status is SyncStatus.INCOMPLETE
        print(f"{folder}: {result.message}")
    return int(incomplete)


def ui(options: UiOptions) -> int:
    """Print the addresses of the newest runs, and serve MLflow's page until Ctrl-C where no server does."""
    try:
        uri = tracking_uri(options.uri or None, "uri")
        check_store(uri)
        newest = newest_runs(uri, options.experiment or None, options.runs)
        if uri.startswith(("http://", "https://")):
            _show(uri, newest)
        else:
            port = free_port(options.port)
            if port != options.port:
                print(f"port {options.port} is taken, using {port}")
            _show(server_address(port), newest)
            print(f"starting MLflow on {without_password(uri)}: open these addresses when it is running")
            serve(uri, port)
    except KeyboardInterrupt:
        print("\nstopped")
    return 0


def _show(base: str, newest: Newest) -> None:
    """Print what to open."""
    table, compared = (VIEW, COMPARISON) if newest.views else (None, None)
    print(f"experiment {newest.experiment}: {experiment_address(base, newest.experiment_id, table)}")
    print(f"its curves: {curves_address(base, newest.experiment_id, table)}")
    if len(newest.run_ids) > 1:
        print(f"compare {', '.join(newest.run_names)}:")
        print(f"  {curves_address(base, newest.experiment_id, compared)}")
        print("all params and metrics of these runs, side by side:")
        print(f"  {comparison_address(base, newest.experiment_id, newest.run_ids)}")
