"""The processes and the thread that load data beside training: how they begin and end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from queue import SimpleQueue
from typing import Generic, TypeVar

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


class Prefetched(Iterator[T], Generic[T]):
    """The items of another iterator, in its order, which a thread takes from it before they are asked for.

    An error of the iterator is raised where its item would have been returned, with the traceback of the thread. The
    thread ends with the last item, with an error, and when this is closed or no longer referred to; the iterator is
    then released in the thread, at the latest when it has produced the item that it is working on.

    Args:
        items: what is iterated, from now on by the thread alone.
        count: how many items it may be ahead of the last one that was returned.
        prepare: called first, in the thread.
    """

    def __init__(self, items: Iterator[T], count: int, prepare: Callable[[], None]) -> None:
        self._ready: SimpleQueue[T | BaseException | None] = SimpleQueue()
        self._room = threading.Semaphore(count)
        closed = threading.Event()
        # A daemon, so that the process can end while it waits; in the middle of an item it is waited for.
        thread = threading.Thread(
            target=_take, args=(items, self._ready, self._room, closed, prepare), name="batches ahead", daemon=True
        )
        self.close = weakref.finalize(self, _end, thread, self._room, closed)
        """Ends the thread. Also called when this is deleted, and when the process ends."""
        thread.start()

    def __next__(self) -> T:
        if not self.close.alive:
            raise StopIteration
        item = self._ready.get()  # without a limit of time: a signal's handler runs in between
        if item is not None and not isinstance(item, BaseException):
            self._room.release()
            return item
        self.close()
        try:
            raise item or StopIteration
        finally:
            del item  # its traceback holds this frame: a cycle


def _take(
    items: Iterator[T],
    ready: SimpleQueue[T | BaseException | None],
    room: threading.Semaphore,
    closed: threading.Event,
    prepare: Callable[[], None],
) -> None:
    """Put the items into ``ready``, where there is room: an error ends them, and so does None."""
    try:
        prepare()
        while room.acquire() and not closed.is_set():
            ready.put(next(items))
    except StopIteration:
        ready.put(None)
    except BaseException as error:
        ready.put(error)


def _end(thread: threading.Thread, room: threading.Semaphore, closed: threading.Event) -> None:
    closed.set()
    room.release()
    if thread is not threading.current_thread():  # the garbage collector may call this in any thread
        thread.join()
