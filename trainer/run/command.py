"""The command line of scripts/train.py: Hydra's, with errors in one sentence and an exit code for each kind.

It is composed and checked before torch is imported, which takes longer than a typing mistake should be waited for.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trainer.config import help
from trainer.config.compose import checked_arguments
from trainer.config.explain import explain
from trainer.errors import Interrupted, RunError, UserError, is_out_of_memory, redacted
from trainer.parallel.world import launched_processes, tell_torchrun
from trainer.run import completion, provenance
from trainer.run.signals import OUTSIDE, take_back
from trainer.run.sweep import Begin, Ended, Sweep
from trainer.run.terminal import leave_unread

if TYPE_CHECKING:
    from trainer.run.run import Run


def main(run_class: type[Run] | None = None) -> int:
    """Run ``sys.argv`` and return the exit code: 0, 2 a user error, 3 not finite, 4 out of memory, 128 + signal.

    Args:
        run_class: the class that trains; None: ``Run``.
    """
    if any(each.partition("=")[0] in ("-h", "--help") for each in sys.argv[1:]):
        return _help()
    if "--version" in sys.argv[1:]:
        print(provenance.environment())
        return 0
    if "install=bash" in sys.argv[1:]:
        print(completion.INSTALL)
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, where it would print and exit with 1
    attempt = partial(_attempt, run_class)
    try:
        arguments = sys.argv[1:] = checked_arguments(sys.argv[1:])
        with completion.offering(arguments):
            codes = _sweep(Sweep(arguments), attempt)
    except UserError as error:
        return _report(error)
    except (HydraException, OmegaConfBaseException) as error:
        return _report(UserError(explain(error)))
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


def _sweep(sweep: Sweep, attempt: Callable[[Begin, list[str]], Ended]) -> list[int]:
    """Train every run of a command line, print their table, and return their exit codes."""
    failed = []
    try:
        sweep.run(attempt)
    except (UserError, HydraException, OmegaConfBaseException):
        raise
    except Exception as error:
        if not sweep.elsewhere:
            raise
        last = str(error).strip().rpartition("\n")[2]  # of the launcher; the other jobs may have ended well
        failed.append(_report(RunError(f"the launcher failed: {type(error).__name__}: {last}")))
    if os.environ.get("RANK", "0") == "0" and (table := sweep.table()):
        print(f"\n{table}", flush=True)
        if any(row.stopped for row in sweep.rows):
            print("\nrun the same command again to continue the sweep", flush=True)
        if sweep.jobs is not None:
            print(f"\nwhat the jobs printed: {sweep.jobs}", flush=True)
    return [*(row.code for row in sweep.rows), *failed]


def _attempt(run_class: type[Run] | None, begin: Begin, overrides: Sequence[str]) -> Ended:
    """Train a run, report what ends it early, and free its memory.

    Hydra would print a traceback of an error. No other run may begin after a signal, nor where only some ranks failed:
    the ranks would train different runs.
    """
    config = None
    try:
        composed, kept = begin()
        from trainer.config.build import build
        from trainer.run.start import Run, train

        config = build(composed, overrides, kept)
        return Ended(0, train(config, overrides, run_class or Run))
    except (RunError, Interrupted) as error:
        some_ranks = launched_processes() > 1 and not error.shared
        return Ended(_report(error), {}, isinstance(error, Interrupted) or some_ranks)
    except OmegaConfBaseException as error:
        return Ended(_report(UserError(explain(error))), {})
    except KeyboardInterrupt:
        return Ended(_report(Interrupted(OUTSIDE, signal.SIGINT)), {}, ends_all=True)
    except Exception as error:
        if not is_out_of_memory(error):
            code = _report_bug(error, inspect.getfile(type(config.recipe)) if config else None)
            return Ended(code, {}, launched_processes() > 1)
        shortage = error.with_traceback(None)  # which holds the run
        shortage.__context__ = shortage.__cause__ = None
    finally:
        release_memory()
    from trainer.run.memory.fit import out_of_memory

    return Ended(_report(out_of_memory(shortage, overrides)), {}, launched_processes() > 1)


def release_memory() -> None:
    """Give the memory of a run back to the system, or the next one of a sweep would count it as its own peak."""
    gc.collect()  # models may hold themselves: every module whose forward method was replaced does
    if "torch" in sys.modules:
        from trainer.devices import empty_cache

        empty_cache()
    with suppress(OSError, AttributeError):  # glibc keeps freed memory; elsewhere there is no such call
        ctypes.CDLL(None).malloc_trim(0)


_PATIENCE = 60.0
"""Seconds that a rank waits before it exits, where another rank reports the error that they share."""


def _report(error: RunError | Interrupted) -> int:
    """Report the error, once if several ranks raise the same, and return the exit code."""
    leave_unread()
    take_back()
    prefix = "" if isinstance(error, Interrupted) else "error: "
    speaks = True
    if launched_processes() > 1:
        rank = os.environ["RANK"]
        if not _in_a_group():  # a mistake in the command line: every process finds it
            speaks = os.environ["LOCAL_RANK"] == "0"
        elif error.shared:
            speaks = rank == "0"
        else:
            prefix = f"rank {rank}: {prefix}"
    if speaks:
        print(redacted(f"{prefix}{error}"), file=sys.stderr, flush=True)
        tell_torchrun(redacted(str(error)))
    elif not isinstance(error, Interrupted):
        # torchrun ends all ranks as soon as one exits with an error: the one that reports it must exit first.
        atexit.register(time.sleep, _PATIENCE)
    return error.exit_code


_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")


def _report_bug(error: Exception, recipe_file: str | None) -> int:
    """Print the traceback, from the recipe's own file on where it goes through that, and what failed where.

    A rank that lost its connection to another prints none: it would hide the cause.
    """
    rank = f"rank {os.environ['RANK']}: " if launched_processes() > 1 else ""
    if rank:
        from torch.distributed import DistError

        if isinstance(error, DistError) or any(sign in str(error) for sign in _GONE):
            print(f"{rank}lost connection to another rank; see its error", file=sys.stderr, flush=True)
            return 1
    whole = traceback.TracebackException.from_exception(error)
    tell_torchrun("".join(whole.format()))
    own = [frame for frame in whole.stack if frame.filename == recipe_file]
    where = f"{own[-1].name} ({recipe_file}:{own[-1].lineno}): " if own else ""
    del whole.stack[: whole.stack.index(own[0]) if own else 0]
    print("".join(whole.format()), end="", file=sys.stderr)
    print(redacted(f"{rank}error: {where}{type(error).__name__}: {error}"), file=sys.stderr, flush=True)
    return 1
