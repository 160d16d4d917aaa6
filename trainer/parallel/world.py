"""The processes that train together: their ranks, and what they exchange on the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import Interrupted, RunError, UserError

T = TypeVar("T")


def launched_processes() -> int:
    """Return how many processes torchrun started, including this one; 0 if it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0


def launched_local_rank() -> tuple[int, int]:
    """Return the number of this process among those that torchrun started on this machine, and how many they are."""
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def restarted() -> bool:
    """Return whether torchrun started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def launch_id() -> str:
    """Return an identifier of this torchrun that survives restarts: its run id, or else host name and process id."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"


class World:
    """The processes of one job, counted by rank. This base class is a single process.

    What is exchanged here is small and stays on the host, so it never waits for a GPU. Gradients are exchanged by DDP
    or FSDP. Every rank must make the same calls in the same order.
    """

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the process that prints, logs and prepares data."""
        return self.rank == 0

    def sums(self, *values: int) -> list[int]:
        """Return the sum of each value over all ranks."""
        return list(values)

    def largest_of(self, values: list[int]) -> list[int]:
        """Return, for each of the values, the largest of the ranks'."""
        return values

    def largest(self, value: int) -> int:
        """Return the largest of the ranks' values."""
        return self.largest_of([value])[0]

    def add(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum of the ranks' tensors, on the host."""
        return tensor

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors, on any device, with those of rank 0."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Only for the thread that saves, which has its own process group."""
        return [value]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0; every rank returns its result (which must be picklable), or raises its error."""
        return work()

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 first, then on the others, which find on the disk what rank 0 prepared."""
        return work()


class ProcessWorld(World):
    """Several processes, joined by torch.distributed."""

    def __init__(self, device_type: str, timeout_s: float) -> None:
        """Join the job that torchrun describes in the environment.

        Args:
            device_type: ``cpu`` (gloo) or ``cuda`` (NCCL for tensors on the GPU, gloo for those on the host).
            timeout_s: seconds to wait for another rank before the job fails.
        """
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
            device = torch.device("cuda", launched_local_rank()[0]) if device_type == "cuda" else None
            timeout = timedelta(seconds=timeout_s)
            # A restarted job can use the same store, which still holds the addresses of the earlier processes.
            meeting, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", meeting)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout, device_id=device
            )
        self._writers: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def sums(self, *values: int) -> list[int]:
        total: list[int] = self.add(torch.tensor(values, dtype=torch.int64)).tolist()
        return total

    def largest_of(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def add(self, tensor: Tensor) -> Tensor:
        total = tensor.cpu()
        dist.all_reduce(total)
        return total

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._writers)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]
        bug: Exception | None = None
        if self.first:
            try:
                outcome[0] = work()
            except (RunError, Interrupted) as error:
                outcome[1] = error
            except Exception as error:  # the others must not wait for a result that never comes
                bug, outcome[1] = error, RunError(f"rank 0 failed: {error}")
        dist.broadcast_object_list(outcome, 0)
        if bug is not None:
            raise bug
        if outcome[1] is not None:
            outcome[1].shared = True
            raise outcome[1]
        result: T = outcome[0]
        return result

    def first_then_others(self, work: Callable[[], T]) -> T:
        results: list[T] = []

        def prepare() -> None:  # its result stays on rank 0, and need not be picklable
            results.append(work())

        self.on_first(prepare)
        return results[0] if self.first else work()


def join(device_type: str, timeout_s: float) -> World:
    """Return the world of the processes that torchrun started.

    Raises:
        UserError: torchrun did not start it.
    """
    if not launched_processes():
        raise UserError(
            "this parallel mode needs several processes: start them with "
            "torchrun --nproc-per-node=2 scripts/train.py …, or use parallel=single"
        )
    return ProcessWorld(device_type, timeout_s)
