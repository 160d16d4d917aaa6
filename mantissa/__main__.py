"""``python -m mantissa COMMAND``: the library's commands."""

from __future__ import annotations

import sys
from importlib import import_module

from mantissa.errors import FormatError, UsageError, refusal

COMMANDS = {
    "doctor": "examines a training step of your model: what breaks in 16 bits, where, and what cures it",
    "compare": "says whether two commands train equally well: precisions, commits, versions of torch",
    "checkup": "says in which precisions a transformers model can be trained, and what cures the others",
}
"""By name, with a line of help; each is a module ``mantissa.commands.NAME`` with ``main(arguments) -> int``."""


def main(arguments: list[str]) -> int:
    """Run a command, and return its exit code: 2 for a mistake of the user, 130 when interrupted."""
    name, rest = (arguments or ["--help"])[0], arguments[1:]
    if name not in COMMANDS:
        if name not in ("-h", "--help"):
            print(f"{name} is no command; use one of {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
        print("python -m mantissa COMMAND …    (COMMAND --help says more)\n")
        print("\n".join(f"  {command:<9} {text}" for command, text in COMMANDS.items()))
        print("\nThese are for any trainer. For the recipes of this repository: python scripts/compare.py --help")
        return 0
    sys.path.insert(0, "")  # the user's modules, as `python script.py` finds them
    try:
        if "torch" not in sys.modules:
            print("loading torch …", file=sys.stderr, flush=True)
        return int(import_module(f"mantissa.commands.{name}").main(rest))
    except (UsageError, FormatError, OSError) as error:
        if isinstance(error, OSError) and not refusal(error):
            raise
        print(refusal(error) or error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
