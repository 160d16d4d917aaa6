"""The processes that train together: who is who, and what they tell each other on the host."""

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
    """Return how many processes torchrun started, this one included; 0 where it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0


def launched_local_rank() -> tuple[int, int]:
    """Return the number of this process among those that torchrun started on this machine, and how many they are."""
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def restarted() -> bool:
    """Tell whether torchrun started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def launch_id() -> str:
    """Return what names this torchrun, the same after a restart: its run id, or its process where it has none."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()}-{os.getppid()}"


class World:
    """The processes of one job, counted by rank. This class as it stands is a single process.

    What is exchanged here is small and lives on the host, so that it never waits for a GPU; gradients are
    exchanged by what ``parallel`` wraps around the model. Every rank has to make the same calls in the same order.
    """

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """Whether this is the one process that prints, logs and prepares data."""
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
        """Overwrite the tensors, wherever they live, by rank 0's."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Only for the thread that saves: it has a connection of its own."""
        return [value]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0; every rank gets its result (which can be pickled), or raises its error."""
        return work()

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and then, with what rank 0 prepared on the disk, on the others."""
        return work()


class ProcessWorld(World):
    """Several processes, joined by torch.distributed."""

    def __init__(self, device_type: str, timeout_s: float) -> None:
        """Join the job that torchrun described in the environment.

        Args:
            device_type: ``cpu`` (gloo) or ``cuda`` (NCCL for tensors on the GPU, gloo for those on the host).
            timeout_s: how long to wait for another rank before giving up.

        """
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
            device = torch.device("cuda", launched_local_rank()[0]) if device_type == "cuda" else None
            timeout = timedelta(seconds=timeout_s)
            # A restarted job can meet in the same store, where the addresses of those before still stand.
            meeting, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", meeting)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout, device_id=device
            )
        self._savers: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

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
        dist.all_gather_object(values, value, group=self._savers)
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
        result: list[T] = []
        self.on_first(lambda: result.append(work()))
        return result[0] if self.first else work()


def join(device_type: str, timeout_s: float) -> World:
    """Return the world that torchrun started this process in.

    Raises:
        UserError: torchrun did not start it.

    """
    if not launched_processes():
        raise UserError(
            "this parallel mode needs several processes: start them with "
            "torchrun --nproc-per-node=2 scripts/train.py …, or use parallel=single"
        )
    return ProcessWorld(device_type, timeout_s)
