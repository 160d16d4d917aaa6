"""Send to MLflow what is still missing: python scripts/sync.py outputs/gpt2-bf16-s0

  FOLDER …             folders of the runs to send (default: every run that is not complete)
  output_dir=outputs   where the runs are
  uri=…                the tracking store to send them to (default: that of each run when it was trained)
Exit code: 0, 1 if something is still missing in MLflow, 2 for a user error, 130 when interrupted.
"""

from __future__ import annotations

import sys

from trainer.config.options import parse, run


def main(arguments: list[str]) -> int:
    """Send, and print a line for each run."""
    from trainer.tracking.sync import SyncOptions, sync

    options, folders = parse(arguments, SyncOptions, "paths")
    return sync(options, folders)


if __name__ == "__main__":
    sys.exit(run(main, __doc__, continues=True, bare=True))
