"""The processes that train together: their ranks, and what they exchange on the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # a command line is checked before torch is imported
    from torch import Tensor

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
    """The processes of one job, counted by rank. This base class is a single process; several are a ``ProcessWorld``.

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

    def gather_on_first(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on rank 0; nothing on the others. It must be picklable."""
        return [value]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0; every rank returns its result (which must be picklable), or raises its error."""
        return work()

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 first, then on the others, which find on the disk what rank 0 prepared."""
        return work()
