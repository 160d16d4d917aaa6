"""Measurements in a fresh process each: ``python -m MODULE OPTIONS OVERRIDE…``, which answers in JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mantissa.verdict import shell
from trainer.config.compose import compose
from trainer.errors import OutOfMemory, RunError, UserError, first_line, is_out_of_memory


class ProcessError(RunError):
    """A measurement whose process ended with an error, or did not end in time."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code
        """Exit code, minus a signal's number where one killed it; None: it was ended at its limit."""


def measure_isolated(
    module: str,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    env: Mapping[str, str] = {},
    limit_s: float | None = None,
) -> Any:
    """Return what a module measures, as JSON holds it, with these overrides and options in a fresh process.

    Args:
        module: calls ``answer`` where it is the main one.
        overrides: as for scripts/train.py.
        options: JSON types.
        env: variables beside those of this process.
        limit_s: seconds after which it is ended.

    Raises:
        UserError: train.py would refuse these overrides, too.
        ProcessError: it failed for another reason.
    """
    # -P: modules in the current folder are not imported.
    command = [sys.executable, "-P", "-m", module, json.dumps(options), *overrides]
    ended = shell.run(command, errors_apart=True, env=os.environ | env, limit_s=limit_s)
    if ended.code == 0:
        return json.loads(ended.output.splitlines()[-1])
    if ended.code is None:
        raise ProcessError(f"it did not end within {limit_s:.0f} s", None)
    how = f"signal {signal.Signals(-ended.code).name}" if ended.code < 0 else f"exit code {ended.code}"
    message = (ended.errors.strip().splitlines() or [f"its process ended with {how}"])[-1]
    if ended.code == UserError.exit_code:
        raise UserError(message)
    raise ProcessError(message, ended.code)


def answer(measure: Callable[..., Any]) -> int:
    """Measure the config of this process's command line, print the result as its last line; return the exit code.

    Args:
        measure: takes a config and options, and returns a dataclass or a JSON type.
    """
    options, *overrides = sys.argv[1:]
    try:
        result = measure(compose(overrides), **json.loads(options))
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"out of memory: {first_line(error)}", file=sys.stderr)
        return OutOfMemory.exit_code
    print(json.dumps(result, default=asdict))
    return 0
