"""Send to MLflow what it does not have yet of the runs: ``python scripts/sync.py [run folder …]``.

  run folder …         these (default: every run that is not complete)
  output_dir=outputs   where the runs are
  uri=…                where to send them (default: where each run was to be sent when it was trained)
Exit code: 0, 1 where MLflow still lacks something, 2 for a mistake, 130 when interrupted.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from trainer.config.options import parse
from trainer.errors import RunError
from trainer.tracking.mlflow.store import explicit_uri
from trainer.tracking.mlflow.sync import check_run, runs_in, send


def main() -> int:
    """Parse the command line and send; the exit code is 1 where MLflow still lacks something, 2 for a mistake."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("mantissa").setLevel(logging.INFO)
    try:
        options, named = parse(sys.argv[1:], {"output_dir": "outputs", "uri": ""})
        uri = options["uri"] or None
        explicit_uri(uri, "uri")
        folders = [check_run(Path(folder)) for folder in named] or runs_in(Path(options["output_dir"]))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not folders:
        print(f"no runs in {options['output_dir']}")
    left_over = False
    try:
        for folder in folders:
            outcome = send(folder, uri, named=bool(named))
            left_over |= outcome.left_over
            print(f"{folder}: {outcome.text}", flush=True)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue")
        return 130
    return int(left_over)


if __name__ == "__main__":
    sys.exit(main())
