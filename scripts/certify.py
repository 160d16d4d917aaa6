"""Certify that a job resumes exactly: ``python scripts/certify.py recipe=gpt2 precision=bf16 [kills=20] [key=value]``.

Runs it once as it is and once killed again and again with SIGKILL, and compares every step and every tensor. Further
options: seed=0 (when and how it is killed), max_ulp=4, output_dir=outputs; all others go to the job.
Exit code: 0 BITWISE, 5 equal within max_ulp units in the last place, 6 DIVERGED, 2 a mistake, 1 a run that failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from evidence.certificate.certify import certify
from trainer.errors import RunError, UserError

OPTIONS = {"kills": int, "seed": int, "max_ulp": float, "output_dir": Path}


def main(arguments: list[str]) -> int:
    """Parse the options, certify, show the table."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    options: dict[str, object] = {"output_dir": Path("outputs")}
    overrides = []
    try:
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if not equals:
                raise UserError(f"{argument!r} is not an option; write key=value, such as kills=20")
            if key not in OPTIONS:
                overrides.append(argument)
                continue
            try:
                options[key] = OPTIONS[key](value)
            except ValueError:
                raise UserError(f"{argument} is not a number; write {key}=4, for example") from None
        options["output_dir"] = Path(str(options["output_dir"])).expanduser().absolute()
        result = certify(overrides, **options)  # type: ignore[arg-type]
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(result.table())
    print(f"{result.verdict} ({result.wall_time_s:.0f} s)")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
