"""Data order (a pure function of the seed), batching, loading, and copies to the device."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, repeat
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from mantissa.display import counted, size
from trainer.data.contract import Batch, Dataset, SampleId
from trainer.errors import RunError, UserError, check_number, first_line
from trainer.hardware import Hardware, select

if TYPE_CHECKING:  # a loading process imports this module, and needs no recipe
    from trainer.recipe import Context, Decision

T = TypeVar("T")
_SHARED_MEMORY = "/dev/shm"
_REPEATED = 78
"""The exit code of a loading process in which the program began to train again."""
STEPS_AHEAD = 2
"""Steps whose batches are prepared while one is taken, where a thread does that."""


class DataOrder:
    """The endless stream of samples: epoch after epoch, each a permutation that depends on (seed, epoch) only.

    Position ``p`` of the stream lies in epoch ``p // length``. The position is the whole state: the
    order of samples and their randomness do not depend on the batch size, the workers or the devices.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        # An epoch and its permutation, replaced together: the thread of ``prefetched`` asks, too.
        self._kept = -1, np.empty(0, dtype=np.int64)

    def samples(self, first: int, count: int) -> list[SampleId]:
        """Return the ``count`` samples from position ``first`` on."""
        samples: list[SampleId] = []
        while count:
            epoch, index = divmod(first, self.length)
            of, permutation = self._kept
            if of != epoch:
                permutation = np.random.default_rng((self.seed, epoch)).permutation(self.length)
                self._kept = epoch, permutation
            chosen = permutation[index : index + count]
            seeds = _mixed(_mixed(_mixed(np.zeros(1, np.uint64), self.seed), epoch), chosen.astype(np.uint64)) >> 1
            samples += map(SampleId, chosen.tolist(), seeds.tolist())
            first += len(chosen)
            count -= len(chosen)
        return samples

    def batches(self, first: int, size: int, count: int) -> Iterator[list[SampleId]]:
        """Yield ``count`` lists of ``size`` consecutive samples, from position ``first`` on."""
        ahead = max(1, 1024 // size)  # batches computed at once: calls of numpy take longer than their arithmetic
        for batch in range(0, count, ahead):
            samples = self.samples(first + batch * size, min(ahead, count - batch) * size)
            for start in range(0, len(samples), size):
                yield samples[start : start + size]


def _mixed(state: np.ndarray, value: np.ndarray | int) -> np.ndarray:
    """Add ``value`` to a hash of 64 bits, with the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = state + np.asarray(value, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> 27)) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> 31)


@dataclass(frozen=True)
class Batching:
    """How the global batch of one optimizer step is divided into microbatches and distributed over the ranks."""

    batch_size: int
    micro_batch_size: int
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        at_once = self.micro_batch_size * self.ranks
        if self.batch_size % at_once == 0:
            return
        sizes = [size for size in range(1, self.batch_size + 1) if self.batch_size % (size * self.ranks) == 0]
        near = sorted(sizes, key=lambda size: abs(size - self.micro_batch_size))[:2]
        below = self.batch_size // at_once * at_once
        batches = [size for size in (below, below + at_once) if size]
        processes = f" × {self.ranks} processes" if self.ranks > 1 else ""
        raise UserError(
            f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size}{processes}",
            *(f"micro_batch_size={size}" for size in sorted(near)),
            *(f"batch_size={size}" for size in batches),
        )

    @property
    def accumulation(self) -> int:
        """Microbatches per optimizer step on each rank."""
        return self.batch_size // (self.micro_batch_size * self.ranks)

    def microbatches(self, order: DataOrder, first_step: int, count: int) -> Iterator[list[SampleId]]:
        """Yield this rank's microbatches of ``count`` optimizer steps from ``first_step`` on.

        A step uses the same samples with any number of ranks: microbatch i goes to rank i modulo the number of ranks.
        """
        on_all_ranks = count * self.accumulation * self.ranks
        microbatches = order.batches(first_step * self.batch_size, self.micro_batch_size, on_all_ranks)
        return islice(microbatches, self.rank, None, self.ranks)


class _Fetch(torch.utils.data.Dataset[Batch]):
    """Lets DataLoader fetch a whole microbatch at once, in shared memory, and returns a known error as it is.

    Args:
        dataset: of the samples.
        workers: processes that load.
        waiting: batches of each that may be in shared memory together.
    """

    def __init__(self, dataset: Dataset, workers: int, waiting: int) -> None:
        self.dataset, self.workers = dataset, workers
        self.waiting = waiting * int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def __getitems__(self, samples: list[SampleId]) -> Batch | RunError:
        try:
            return self._shared(self.dataset.batch(samples))
        except RunError as error:  # DataLoader would wrap it in the worker's traceback
            return error

    def _shared(self, batch: Batch) -> Batch:
        """Move a batch to shared memory. In the thread that sends it an error would be lost, and the run would wait."""
        of_batch, room = sum(tensor.nbytes for tensor in batch.values()), _shared_memory_bytes()
        try:
            if self.workers * self.waiting * of_batch <= room:
                return {name: tensor.share_memory_() for name, tensor in batch.items()}
        except RuntimeError as error:
            if "No space left" not in str(error):
                raise
        raise UserError(
            f"{_SHARED_MEMORY} holds {size(room)}, too little for {counted(self.waiting, 'batch')} of "
            f"{size(of_batch)} from each of {counted(self.workers, 'loading process')} and for "
            "those in use; give it more (docker run --ipc=host, or --shm-size=)",
            f"loader.workers={min(self.workers - 1, room // max(1, self.waiting * of_batch))}",
        )


def _shared_memory_bytes() -> int:
    """Return what shared memory can hold in all; without a limit where the system has no folder for it."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return sys.maxsize
    return found.f_blocks * found.f_frsize or sys.maxsize  # 0: it has no limit


def _as_fetched(batch: Batch) -> Batch:
    return batch


@dataclass
class Batches:
    """Batches that are built in this process, whenever they are iterated over."""

    dataset: Dataset
    samples: Iterable[list[SampleId]]
    device: torch.device
    pins: bool
    """Whether they are in page-locked memory, from which the device copies by itself."""
    ahead: int
    """How many of them a thread prepares before they are asked for; 0: there is none."""

    def __iter__(self) -> Iterator[Batch]:
        # Not torch's DataLoader, which takes as long as building a small batch.
        batches: Iterator[Batch] = map(self.dataset.batch, self.samples)
        if self.pins:
            batches = ({name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches)
        return prefetched(batches, self.ahead, self._prepare) if self.ahead else batches

    def _prepare(self) -> None:
        select(self.device)  # of this thread: pinning would open a context on GPU 0
        torch.set_num_threads(1)  # copies would spread over all cores and hold up the thread that launches kernels


class _FromWorkers(DataLoader[Batch]):
    """Batches of loading processes, which may be kept for the next time."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        iterator: Any = super().__iter__()
        try:
            for batch in iterator:
                if isinstance(batch, RunError):  # a dataset reported it
                    try:
                        raise batch
                    finally:
                        del batch  # its traceback holds this frame: a cycle, which would delay the end of the workers
                yield batch
        except (RuntimeError, OSError, EOFError) as error:
            # A process that is killed may also leave half a message behind, which is noticed first.
            if not wait([worker.sentinel for worker in iterator._workers], timeout=1):
                raise  # a dataset's
            codes = {worker.exitcode for worker in iterator._workers} - {None}
            raise _ended(codes, self.num_workers, error) from None


def _ended(codes: set[int], workers: int, error: Exception) -> RunError:
    """Return why loading goes on no more: ``workers`` processes, of which some ended with these exit codes."""
    if _REPEATED in codes:
        return UserError(
            "each loading process imports this program, which trains there, too, where it does not do so below "
            'if __name__ == "__main__"',
            "loader.workers=0",
        )
    if -signal.SIGKILL in codes:
        killed = "a loading process was killed, as the system does where memory is short"
        return RunError(f"{killed}; set loader.workers={workers // 2}")
    named = sorted(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}" for code in codes)
    return RunError(f"a loading process ended with {', '.join(named) or 'no exit code'} ({first_line(error)})")


def end_if_repeated() -> None:
    """End a loading process that imports the program which started it, where that begins to train again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # what multiprocessing itself asks
        os._exit(_REPEATED)


@dataclass
class Loader:
    """The ``loader`` config group; this base is ``loader=plain``: pageable memory, no persistent workers."""

    kind: ClassVar[str] = "plain"
    pinned: ClassVar[bool] = False
    """Whether batches are in page-locked memory, where the device copies from it, and workers are kept."""
    workers: int | str = "auto"
    """Data-loading processes; auto: 0 for data in memory; if samples are decoded, one per core of this rank (at most
    32, or 16 where the CPU computes). With more than four cores, two stay free for launching kernels and pinning
    memory."""

    def __post_init__(self) -> None:
        check_number("loader.workers", self.workers, 0)

    def resolve(self, context: Context) -> tuple[Self, list[Decision]]:
        """Return the loader with as many workers as the open data needs; nothing about it is worth showing."""
        if self.workers != "auto" or context.datasets is None:
            return self, []
        cores = context.hardware.cpu_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        most = min(32 if context.hardware.is_gpu else 16, cores - 2 if cores > 4 else cores)
        enough = max(1, most) if context.datasets.decodes else 0
        return replace(self, workers=context.recorded.get("loader.workers", enough)), []

    def batches(
        self, dataset: Dataset, samples: Iterable[list[SampleId]], hardware: Hardware, in_a_step: int = 1
    ) -> Iterable[Batch]:
        """Return one microbatch per list of samples; ``workers`` is a number by now.

        ``in_a_step``: how many are needed at once; with a GPU, a thread keeps ``STEPS_AHEAD`` times as many ready,
        unless the dataset uses torch's global generator.
        """
        pins = self.pinned and hardware.kind.pinned
        if not self.workers:
            if hasattr(dataset, "pins"):
                dataset.pins = pins
            # A GPU computes meanwhile; on a CPU a thread would take the cores that compute: there, use workers.
            # The training thread uses torch's global generator, whose state a checkpoint holds.
            alone = not pins or getattr(dataset, "uses_global_generator", False)
            return Batches(dataset, samples, hardware.device, pins, 0 if alone else STEPS_AHEAD * in_a_step)
        prefetch = 4 if self.pinned and int(self.workers) <= 16 else 2  # of many, a few each: they are page-locked
        return _FromWorkers(
            # From shared memory a thread copies what is pinned at once; elsewhere all that is prefetched waits there.
            _Fetch(dataset, int(self.workers), 1 if pins else prefetch),
            batch_sampler=samples,
            collate_fn=_as_fetched,  # type: ignore[arg-type]
            generator=torch.Generator(),  # a seed is drawn, which must not be from the generator of training
            num_workers=int(self.workers),
            multiprocessing_context=_forkserver_context(),
            worker_init_fn=_end_with_the_run,
            pin_memory=pins,
            persistent_workers=self.pinned,
            prefetch_factor=prefetch,
        )

    def steps(
        self, dataset: Dataset, order: DataOrder, batching: Batching, first_step: int, count: int, hardware: Hardware
    ) -> Generator[list[Batch], None, None]:
        """Yield the microbatches of each of ``count`` optimizer steps, from step ``first_step`` on.

        Closing the generator ends its thread.
        """
        samples, in_a_step = batching.microbatches(order, first_step, count), batching.accumulation
        microbatches = iter(self.batches(dataset, samples, hardware, in_a_step))
        while step := list(islice(microbatches, in_a_step)):
            yield step


@dataclass
class PinnedLoader(Loader):
    """``loader=pinned``: page-locked host memory (with a GPU), persistent workers, prefetching (see ``batches``)."""

    kind: ClassVar[str] = "pinned"
    pinned: ClassVar[bool] = True


@dataclass
class OnDeviceLoader(Loader):
    """``loader=synthetic-on-device``: the first step's microbatches, kept on the device and repeated.

    The loss is meaningless (the model memorises one batch); the throughput is that of the step alone.
    """

    kind: ClassVar[str] = "synthetic-on-device"

    def steps(
        self, dataset: Dataset, order: DataOrder, batching: Batching, first_step: int, count: int, hardware: Hardware
    ) -> Generator[list[Batch], None, None]:
        """Yield the same microbatches ``count`` times."""
        first = next(super().steps(dataset, order, batching, 0, 1, hardware))
        yield from repeat([_Copied(batch, hardware.device) for batch in first], count)


class _Copied(dict[str, torch.Tensor]):
    """A microbatch on the host, where counting targets needs no wait, with a copy on the device."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        super().__init__(batch)
        self.on_device = to_device(batch, device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, or return its copy there; from pinned memory the host does not wait."""
    if isinstance(batch, _Copied):
        return batch.on_device
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _forkserver_context() -> BaseContext:
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


def _end_with_the_run(worker: int) -> None:
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
