"""The command line of scripts/train.py: Hydra's, with errors in one sentence and an exit code for each kind.

Names of groups and choices are checked before torch is imported, which takes longer than a typing mistake should be
waited for.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from mantissa.errors import refusal
from trainer.config import help
from trainer.config.command_line import read
from trainer.config.compose import check_values, with_all_values
from trainer.config.explain import explained
from trainer.config.text import say
from trainer.errors import Interrupted, RunError, UserError, first_line, redacted
from trainer.parallel.world import check_launch, launched_processes, tell_torchrun
from trainer.run import provenance
from trainer.run.signals import OUTSIDE, clear_line
from trainer.run.sweep import Sweep
from trainer.terminal import leave_unread


def main() -> int:
    """Run ``sys.argv`` and return the exit code: 0, 2 a user error, 3 not finite, 4 out of memory, 128 + signal."""
    if any(argument.partition("=")[0] in ("-h", "--help") for argument in sys.argv[1:]):
        return _help()
    if "--version" in sys.argv[1:]:
        print(provenance.environment())
        return 0
    if not (typed := sys.argv[1:]):
        print(help.USAGE, file=sys.stderr)
        return 2
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, where it would print and exit with 1
    try:
        check_launch()
        # Read the command line, and let Hydra compose each of its runs, which ``_train_one`` trains.
        codes = _sweep(Sweep(read(typed)))
    except (UserError, OSError) as error:
        return _report(error)
    # Leave the other processes.
    if _in_a_group() and not any(codes):  # after a failure the other ranks may have exited
        sys.modules["torch.distributed"].destroy_process_group()
    return max(codes, default=0)


def _help() -> int:
    try:
        print(help.page(sys.argv[1:]), flush=True)
    except UserError as error:
        return _report(error)
    except BrokenPipeError:  # of ``--help | head``
        leave_unread()
    return 0


def _in_a_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def _sweep(sweep: Sweep) -> list[int]:
    """Train every run of a command line, print their table, and return their exit codes."""
    failed = []
    try:
        with explained():
            if sweep.keys:  # no run is to end before another is found to be a mistake
                check_values(sweep.line)
            sweep.run(_train_one)
    except UserError as error:
        raise with_all_values(error, sweep.line) from None
    except Exception as error:
        if sweep.jobs is None:
            raise
        last = str(error).strip().rpartition("\n")[2]  # the other jobs may have ended well
        failed.append(_report(RunError(f"a job or its launcher failed: {type(error).__name__}: {last}")))
    if (launched_processes() < 2 or os.environ["RANK"] == "0") and (table := sweep.table()):
        print(f"\n{table}", flush=True)
        if any(row.stopped for row in sweep.rows):
            print("\nrun the same command again to continue the sweep", flush=True)
    if sweep.jobs is not None:
        print(f"what the jobs printed: {sweep.jobs}; without hydra/launcher the command shows their table", flush=True)
    return [*(row.code for row in sweep.rows), *failed]


def _train_one(
    composed: DictConfig, overrides: Sequence[str], recorded: Mapping[str, Any], brief: bool
) -> tuple[int, dict[str, Any], bool]:
    """Train a run, and report what ends it early; see ``TrainOne``.

    Hydra would print a traceback of an error. No other run may begin after a signal, nor where only some ranks failed:
    the ranks would train different runs.
    """
    try:
        from trainer.config.build import build
        from trainer.run.start import train

        with explained():
            config = build(composed, overrides, recorded)
        clear_line()
        return 0, train(config, brief=brief).summary, False
    except (Exception, KeyboardInterrupt) as error:
        some_ranks = launched_processes() > 1 and not getattr(error, "shared", False)
        return (
            _report(error, composed.run_name if brief else ""),
            {},
            isinstance(error, KeyboardInterrupt) or some_ranks,
        )


def _report(error: Exception | KeyboardInterrupt, of_sweep: str = "") -> int:
    """Report the error, once if several ranks raise the same, and return the exit code; of a run in a sweep a line."""
    leave_unread()
    clear_line()
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
        error = Interrupted(OUTSIDE, signal.SIGINT)
    if why := refusal(error):
        error = UserError(why)
    if not isinstance(error, RunError | Interrupted):
        return _report_bug(error)
    prefix = "" if isinstance(error, Interrupted) else "error: "
    speaks = True
    if launched_processes() > 1:
        rank = os.environ["RANK"]
        if not _in_a_group():  # a mistake in the command line: every process finds it
            speaks = os.environ["LOCAL_RANK"] == "0" or "TORCHELASTIC_RUN_ID" not in os.environ
        elif error.shared:
            speaks = rank == "0"
        else:
            prefix = f"rank {rank}: {prefix}"
    tell_torchrun(redacted(str(error)))
    text = f"{of_sweep}: {first_line(error)}" if of_sweep and isinstance(error, RunError) else str(error)
    if speaks:
        say(redacted(f"{prefix}{text}"))
    return error.exit_code


def _report_bug(error: Exception) -> int:
    """Print the traceback, with the rank where there are several, and return the exit code."""
    rank = f"rank {os.environ['RANK']}: " if launched_processes() > 1 else ""
    whole = "".join(traceback.format_exception(error))
    tell_torchrun(whole)
    say(redacted(f"{whole}{rank}error: {type(error).__name__}: {error}"))
    return 1
