"""Test published claims about mixed precision on this machine.

  python scripts/reproduce.py                    the claims, and every verdict so far
  python scripts/reproduce.py claim=two_x        test one, or several: claim=two_x,cpu_bf16
  python scripts/reproduce.py all=true           test what this machine can

  reduced=true       at a tiny size, to see that it runs; nothing is decided or recorded
  pages=true         only make docs/results.md and the README's table anew
  device=cpu         as for train.py
  output_dir=…       of the runs (default: outputs)
  data.path=…        and other overrides that a claim asks for
The same command goes on after a stop, at the same commit. Outcomes go to results/<machine>/<claim>.json,
docs/results.md and the README.
Exit code: 0 whatever the verdict, 1 when a run failed, 2 for a mistake or a claim that needs another machine,
130 when interrupted.
"""

from __future__ import annotations

import signal
import sys

from trainer.errors import RunError


def main(arguments: list[str]) -> int:
    """List the claims, or test some."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from evidence.claims import command as reproduce_cli

    try:
        return reproduce_cli.main(arguments)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
