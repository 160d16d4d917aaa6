"""Send to MLflow what it does not have yet of the runs: ``python scripts/sync.py [run folder …]``."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.errors import RunError
from trainer.mlflow_store import explicit_uri
from trainer.sync import check_run, runs_in, send


def main() -> int:
    """Parse the command line and send; the exit code is 1 where MLflow still lacks something, 2 for a mistake."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="run folder", help="default: every run not complete")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="of the runs (default: outputs)")
    parser.add_argument("--uri", help="default: where each run was to be sent when it was trained")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("mantissa").setLevel(logging.INFO)
    try:
        explicit_uri(options.uri, "--uri")
        folders = [check_run(folder) for folder in options.folders] or runs_in(options.output_dir)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not folders:
        print(f"no runs in {options.output_dir}")
    left_over = False
    try:
        for folder in folders:
            outcome = send(folder, options.uri, named=bool(options.folders))
            left_over |= outcome.left_over
            print(f"{folder}: {outcome.text}", flush=True)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue")
        return 130
    return int(left_over)


if __name__ == "__main__":
    sys.exit(main())
