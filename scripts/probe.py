"""Measure one thing that is no training run: ``python scripts/probe.py gemm size=4096 precision=bf16``."""

from __future__ import annotations

import sys

from trainer.errors import RunError


def main(arguments: list[str]) -> int:
    """Measure, and print the summary's path and the numbers."""
    from evidence import probes

    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        for name, probe in probes.PROBES.items():
            print(f"\n{name}\n{probe.__doc__}")
        return 0
    try:
        path = probes.run(arguments)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(path.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
