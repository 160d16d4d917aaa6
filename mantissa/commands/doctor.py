"""``python -m mantissa doctor module:function``: examine the step of a function's model."""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from importlib import import_module
from pathlib import PurePath

from torch import nn

from mantissa.commands import report_folder, say_part, seconds_of
from mantissa.doctor.examine import PRECISIONS, examine
from mantissa.errors import UsageError
from mantissa.names import format_name


def main(arguments: list[str]) -> int:
    """Examine, print the report and write its page; return the exit code of its verdict."""
    parser = argparse.ArgumentParser("python -m mantissa doctor", description="Examine one training step of a model.")
    parser.add_argument("function", help="module:function, which returns model, loss, batches and maybe the optimizer")
    parser.add_argument("--precision", default="bf16", type=format_name, choices=PRECISIONS, help="default: bf16")
    parser.add_argument("--scale", type=float, help="the loss scale (default: 65536 with fp16, else 1)")
    parser.add_argument("--fixed-scale", action="store_true", help="the loss scale stays: no scaler lowers it")
    parser.add_argument("--time-budget", default="60s", help="for the checks, such as 90s or 5min (default: 60s)")
    parser.add_argument("--report", default="mantissa-doctor", help="folder of the page (default: mantissa-doctor)")
    options = parser.parse_args(arguments)
    time_budget_s = seconds_of("--time-budget ", options.time_budget)
    module, _, name = options.function.partition(":")
    if module.endswith(".py"):
        meant = ".".join(PurePath(module).with_suffix("").parts)
        raise UsageError(f"{options.function}: give the module, not its file: {meant}:{name or 'FUNCTION'}")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise UsageError(f"{options.function}: {error}; give module:function, importable from this folder") from None
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise UsageError(f"{options.function}: {error}; give a function that needs no arguments") from None
    returned = None if isinstance(function, nn.Module) else function()
    if not isinstance(returned, tuple) or len(returned) not in (3, 4) or not isinstance(returned[0], nn.Module):
        raise UsageError(f"{options.function} must be a function that returns model, loss, batches[, optimizer]")
    model, loss, batches, *rest = returned
    folder = report_folder(options.report)
    report = examine(
        model,
        loss,
        batches,
        options.precision,
        *rest,
        scale=options.scale,
        fixed_scale=options.fixed_scale,
        time_budget_s=time_budget_s,
        say=say_part,
    )
    print(file=sys.stderr)
    print(report)
    page = report.write(folder, shlex.join(["python", "-m", "mantissa", "doctor", *arguments]))
    print(f"report {page}")
    return report.diagnosis.exit_code
