"""Show all runs in MLflow: python scripts/ui.py

  port=5000   port of the page
  uri=…       the tracking store (default: $MLFLOW_TRACKING_URI, else mlflow.db in this folder)
Exit code: 0 where Ctrl-C stopped it, 2 for a user error; else MLflow's.
"""

from __future__ import annotations

import sys

from trainer.config.options import parse, run


def main(arguments: list[str]) -> int:
    """Serve the page, and print where it is."""
    from trainer.tracking.ui import UiOptions, ui

    options, _ = parse(arguments, UiOptions)
    ui(options)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__, bare=True))
