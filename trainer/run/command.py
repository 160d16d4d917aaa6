"""The command line of scripts/train.py: Hydra's, with errors in one sentence and an exit code for each kind."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import shutil
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer.config import registration as config
from trainer.config.compose import CONF, checked_arguments
from trainer.config.explain import explain
from trainer.errors import Interrupted, MemoryRanOut, OutOfMemory, RunError, UserError, is_out_of_memory
from trainer.parallel.world import launched_processes
from trainer.run.earlier import without_source
from trainer.run.resume import complete
from trainer.run.run import Run
from trainer.run.signals import OUTSIDE
from trainer.run.start import train
from trainer.run.sweep import Sweep, jobs_folder, swept_keys

_USAGE = """\
python scripts/train.py [key=value ...]     --cfg job shows every key, --help this page
python scripts/train.py -m key=a,b ...      runs every combination
"""


OnShortage = Callable[[BaseException, Sequence[str]], OutOfMemory]
"""From what the allocator raised and the overrides of the run to the error that the user reads."""


def main(on_shortage: OnShortage, run_class: type[Run] = Run) -> int:
    """Run ``sys.argv`` and return the exit code: 0, 2 a user error, 3 not finite, 4 out of memory, 128 + signal.

    Args:
        on_shortage: called after memory ran out and the run's memory is freed.
        run_class: the class that trains.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(_USAGE + _choices())
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, where it would print and exit with 1
    config.register()
    codes: list[int] = []
    try:
        sys.argv[1:] = without_source(complete(checked_arguments(sys.argv[1:])))
        sweep = Sweep(swept_keys(sys.argv[1:]), jobs_folder(sys.argv[1:]))
        if os.environ.get("RANK", "0") == "0" and (outlook := sweep.outlook(sys.argv[1:])):
            print(outlook, flush=True)
        with sweep.scratch() as scratch:
            os.environ["MANTISSA_SCRATCH"] = scratch  # for what Hydra writes about a sweep; see conf/config.yaml
            task = _task(codes, on_shortage, run_class, sweep)
            task() if sweep.jobs is None else codes.extend(_elsewhere(task, sweep))
    except UserError as error:
        return _report(error)
    except (HydraException, OmegaConfBaseException) as error:
        return _report(UserError(explain(error)))
    if (table := sweep.table()) and os.environ.get("RANK", "0") == "0":
        print(f"\n{table}", flush=True)
        if sweep.stopped:
            print("\nrun the same command again to continue the sweep", flush=True)
        if sweep.jobs is not None:
            print(f"\nwhat the jobs printed: {sweep.jobs}", flush=True)
    if dist.is_initialized() and not any(codes):  # after a failure the other ranks may have exited
        dist.destroy_process_group()
    return max(codes, default=0)


def _elsewhere(task: Callable[[], None], sweep: Sweep) -> list[int]:
    """Run a sweep whose launcher starts jobs on other machines; return the exit codes of its runs."""
    failed = []
    try:
        task()
    except (UserError, HydraException, OmegaConfBaseException):
        raise
    except Exception as error:  # of the launcher; the other jobs may have ended well
        last = str(error).strip().rpartition("\n")[2]
        failed.append(_report(RunError(f"the launcher failed: {type(error).__name__}: {last}")))
    return [*sweep.collect(sys.argv[1:]), *failed]


def _task(codes: list[int], on_shortage: OnShortage, run_class: type[Run], sweep: Sweep) -> Callable[[], None]:
    """Return the function that Hydra calls once for every run; it adds the run's exit code to ``codes``."""
    interrupted = False

    # Errors are handled here, because Hydra would print a traceback. After a failed run, a sweep continues with the
    # next one. It ends after a signal. It also ends if only some ranks failed: the ranks would train different runs.
    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def task(composed: DictConfig) -> None:
        nonlocal interrupted
        if interrupted:
            return
        overrides: list[str] = []
        shortage: BaseException | None = None
        try:
            # As given: Hydra would resolve ${…} in them against its own keys.
            overrides = cast("list[str]", OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))
            built = config.build(composed, overrides)
            built = sweep.begin(built, overrides)
            sweep.end(train(built, overrides, run_class))
            codes.append(0)
        except (RunError, Interrupted) as error:
            codes.append(_report(error))
            if isinstance(error, Interrupted):
                sweep.stop()
            interrupted = isinstance(error, Interrupted) or (launched_processes() > 1 and not error.shared)
        except OmegaConfBaseException as error:
            codes.append(_report(UserError(explain(error))))
        except KeyboardInterrupt:
            codes.append(_report(Interrupted(OUTSIDE, signal.SIGINT)))
            interrupted = True
        except Exception as error:
            if is_out_of_memory(error):
                shortage = error.with_traceback(None)  # which holds the run
                shortage.__context__ = shortage.__cause__ = None
            elif launched_processes() < 2:
                raise
            else:
                codes.append(_report_of_rank(error))
            interrupted = launched_processes() > 1
        finally:
            release_memory()
        if shortage is not None:
            typed = any(override.startswith("micro_batch_size=") for override in overrides)
            if isinstance(shortage, MemoryRanOut) and not typed:  # as it was chosen, not as it would be chosen now
                overrides.append(f"micro_batch_size={shortage.micro_batch_size}")
            codes.append(_report(on_shortage(shortage, overrides)))
        if sweep.jobs is not None:
            sweep.leave(HydraConfig.get().job.num, codes[-1])

    run: Callable[[], None] = task
    return run


def release_memory() -> None:
    """Give the memory of a run back to the system, or the next one of a sweep would count it as its own peak."""
    gc.collect()  # models may hold themselves: every module whose forward method was replaced does
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # glibc keeps freed memory; elsewhere there is no such call
        ctypes.CDLL(None).malloc_trim(0)


_PATIENCE = 60.0
"""Seconds that a rank waits before it exits, where another rank reports the error that they share."""


def _report(error: RunError | Interrupted) -> int:
    """Report the error, once if several ranks raise the same, and return the exit code."""
    prefix = "" if isinstance(error, Interrupted) else "error: "
    speaks = True
    if launched_processes() > 1:
        rank = os.environ["RANK"]
        if not dist.is_initialized():  # a mistake in the command line: every process finds it
            speaks = os.environ["LOCAL_RANK"] == "0"
        elif error.shared:
            speaks = rank == "0"
        else:
            prefix = f"rank {rank}: {prefix}"
    if speaks:
        print(f"{prefix}{error}", file=sys.stderr, flush=True)
    elif not isinstance(error, Interrupted):
        # torchrun ends all ranks as soon as one exits with an error: the one that reports it must exit first.
        atexit.register(time.sleep, _PATIENCE)
    return error.exit_code


_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")


def _report_of_rank(error: Exception) -> int:
    """Name the rank that failed. A rank that lost its connection to it prints no traceback: it would hide the cause."""
    rank = os.environ["RANK"]
    if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _GONE):
        print(f"rank {rank}: lost connection to another rank; see its error", file=sys.stderr, flush=True)
        return 1
    traceback.print_exception(error)
    print(f"rank {rank}: error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    handler = get_error_handler()  # torchrun shows what it writes as the root cause
    handler.initialize()
    handler.record_exception(error)
    return 1


def _choices() -> str:
    """Return the choices of every config group, each with the first sentence of its YAML's comment."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    lines = []
    for group in sorted(path for path in CONF.iterdir() if path.is_dir()):
        lines.append(f"\n{group.name}")
        for path in sorted(group.glob("*.yaml")):
            about = _first_sentence(path).removeprefix(f"{group.name}={path.stem}: ")
            name = f"  {path.stem:<21} "
            lines += textwrap.wrap(about, width, initial_indent=name, subsequent_indent=" " * len(name))
    return "\n".join(lines)


def _first_sentence(path: Path) -> str:
    """Return the comment at the head of a YAML, up to the line that ends a sentence; commands are no part of it."""
    found: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#  "):
            break
        found.append(line[2:].strip())
        if found[-1].endswith("."):
            break
    return " ".join(found)
