"""The processes and the thread that load data beside training: how they begin and end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import TypeVar

T = TypeVar("T")


def forkserver_context() -> BaseContext:
    """Return the context that starts loading processes: a fork server, in which the run's signals are blocked.

    A terminal, torchrun and SLURM signal every process of a job. If a signal ended workers (or the server, or Python's
    tracker of shared memory), the unfinished step would fail. They inherit the blocked signals.
    """
    # A server, because a process that runs threads (MLflow's feed, OpenMP) must not be forked. Torch is imported
    # there once; otherwise every worker of every evaluation would spend seconds on it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "trainer.data.loader"])
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
    for ensure_running in (resource_tracker.ensure_running, forkserver.ensure_running):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[name] for name in names])
        try:
            ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return context


def end_with_the_run(worker: int) -> None:
    """End this loading process when the main process has ended. DataLoader checks only its parent, the fork server."""
    main_process = multiprocessing.parent_process()
    assert main_process is not None

    def wait() -> None:
        main_process.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with the run", daemon=True).start()


def prefetched(items: Iterator[T], count: int, prepare: Callable[[], None]) -> Generator[T, None, None]:
    """Yield the items of another iterator, in its order, which a thread takes from it before they are asked for.

    An error of the iterator is raised where its item would have been, with the traceback of the thread. The thread ends
    with this generator, when it has produced the item that it is working on.

    Args:
        items: what is iterated, from now on by the thread alone; None is no item.
        count: how many items it may be ahead of the last one that was yielded.
        prepare: called first, in the thread.
    """
    thread = ThreadPoolExecutor(1, "batches ahead")
    own = thread.submit(threading.get_ident).result()
    try:
        thread.submit(prepare).result()
        ready = deque(thread.submit(next, items, None) for _ in range(count))
        while (item := ready.popleft().result()) is not None:
            ready.append(thread.submit(next, items, None))
            yield item
    finally:
        # The garbage collector may close this in any thread, and none can wait for itself.
        thread.shutdown(wait=threading.get_ident() != own, cancel_futures=True)
