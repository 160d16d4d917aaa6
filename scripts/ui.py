"""Show the runs in MLflow's page: ``python scripts/ui.py``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.errors import RunError
from trainer.mlflow_store import tracking_uri, without_password
from trainer.ui import (
    Newest,
    Server,
    check_store,
    comparison_address,
    curves_address,
    experiment_address,
    free_port,
    newest_runs,
)


def show(base: str, newest: Newest) -> None:
    """Print what to open."""
    print(f"experiment {newest.experiment}: {experiment_address(base, newest.experiment_id)}")
    print(f"its curves: {curves_address(base, newest.experiment_id)}")
    if len(newest.run_ids) > 1:
        print(f"side by side ({', '.join(newest.run_names)}):")
        print(f"  {comparison_address(base, newest.experiment_id, newest.run_ids)}", flush=True)


def serve(uri: str, port: int, newest: Newest) -> None:
    """Run an MLflow server until Ctrl-C."""
    chosen = free_port(port)
    if chosen != port:
        print(f"port {port} is taken, using {chosen}")
    print(f"starting MLflow on {without_password(uri)} …", flush=True)
    with Server(uri, chosen) as server:
        server.wait_until_ready()
        show(server.address, newest)
        print("Ctrl-C stops it.", flush=True)
        status = server.wait()
    raise RunError(f"the MLflow server ended with status {status}")


def main() -> int:
    """Parse the command line, and turn errors into exit codes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=5000, help="the next free one is taken (default: 5000)")
    parser.add_argument("--uri", help="default: $MLFLOW_TRACKING_URI, else mlflow.db in this folder")
    parser.add_argument("--experiment", help="default: the one with the newest run")
    parser.add_argument("--runs", type=int, default=6, help="how many to show side by side (default: 6)")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        uri = tracking_uri(options.uri, "--uri")
        check_store(uri)
        newest = newest_runs(uri, options.experiment, options.runs)
        if uri.startswith(("http://", "https://")):
            show(uri, newest)
        else:
            serve(uri, options.port, newest)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
