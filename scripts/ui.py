"""Show the runs in MLflow's page: ``python scripts/ui.py``.

  port=5000          where it is served; the next free one is taken
  uri=…              where the runs are (default: $MLFLOW_TRACKING_URI, else mlflow.db in this folder)
  experiment=…       which are shown (default: the one with the newest run)
  runs=6             how many to show side by side
Exit code: 0, 1 when the server fails, 2 for a mistake. Ctrl-C stops it.
"""

from __future__ import annotations

import signal
import sys

from trainer.config.options import no_more, parse, whole_number
from trainer.errors import RunError
from trainer.tracking.mlflow.store import tracking_uri, without_password
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


def show(base: str, newest: Newest) -> None:
    """Print what to open."""
    table, compared = (VIEW, COMPARISON) if newest.views else (None, None)
    print(f"experiment {newest.experiment}: {experiment_address(base, newest.experiment_id, table)}")
    print(f"its curves: {curves_address(base, newest.experiment_id, table)}")
    if len(newest.run_ids) > 1:
        print(f"compare {', '.join(newest.run_names)}:")
        print(f"  {curves_address(base, newest.experiment_id, compared)}")
        print("every param and metric of these, side by side:")
        print(f"  {comparison_address(base, newest.experiment_id, newest.run_ids)}", flush=True)


def main() -> int:
    """Parse the command line, and turn errors into exit codes."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options, others = parse(sys.argv[1:], {"port": str(PORT), "uri": "", "experiment": "", "runs": "6"})
        no_more(others)
        port, runs = whole_number(options, "port"), whole_number(options, "runs")
        uri = tracking_uri(options["uri"] or None, "uri")
        check_store(uri)
        newest = newest_runs(uri, options["experiment"] or None, runs)
        if uri.startswith(("http://", "https://")):
            show(uri, newest)
        else:
            chosen = free_port(port)
            if chosen != port:
                print(f"port {port} is taken, using {chosen}")
            show(server_address(chosen), newest)
            print(f"starting MLflow on {without_password(uri)}: open these as soon as it runs", flush=True)
            serve(uri, chosen)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
