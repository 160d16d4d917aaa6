"""The processes that train together: their ranks, and what they exchange on the host."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.errors import UserError

if TYPE_CHECKING:  # a command line is checked before torch is imported
    from torch import Tensor

T = TypeVar("T")


_OF_A_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process, beside ``WORLD_SIZE``."""
UNSET = "for one process: unset RANK WORLD_SIZE"
"""The remedy where a job that has ended left them in the environment."""
_TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Where other launchers say how many processes they have started; within an interactive shell it is one."""


def launched_processes() -> int:
    """Return how many processes torchrun started, including this one; 0 if it did not start this one."""
    return int(os.environ.get("WORLD_SIZE") or 0) if all(os.environ.get(name) for name in _OF_A_RANK) else 0


def check_launch() -> None:
    """Refuse what cannot join others: a part of what torchrun sets, left over or set by hand.

    Raises:
        UserError: names what is missing.
    """
    if (size := os.environ.get("WORLD_SIZE") or "1") == "1":
        return
    if missing := [name for name in _OF_A_RANK if not os.environ.get(name)]:
        raise UserError(
            f"WORLD_SIZE={size} is set without {', '.join(missing)}, so this process cannot join the others; start it "
            f"with torchrun, which sets all of them, or, {UNSET}"
        )


def tasks_alone() -> str:
    """Return what started several processes that do not know each other: ``srun started 8 processes``."""
    counts = ((by, os.environ.get(name, "1")) for name, by in _TASKS.items())
    several = [f"{by} started {count} processes" for by, count in counts if count != "1"]
    return several[0] if several and not launched_processes() else ""


def launched_local_rank() -> tuple[int, int]:
    """Return the number of this process among those that torchrun started on this machine, and how many they are."""
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def restarted() -> bool:
    """Return whether torchrun started this process again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def tell_torchrun(message: str) -> None:
    """Let torchrun, whose own traceback follows what this process printed, end with this message."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")


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
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that prints, logs and prepares data."""
        return self.rank == 0

    def all_reduce_sums(self, *values: int) -> list[int]:
        """Return the sum of each value over all ranks."""
        return list(values)

    def all_reduce_max_each(self, values: list[int]) -> list[int]:
        """Return, for each of the values, the largest of the ranks'."""
        return values

    def all_reduce_max(self, value: int) -> int:
        """Return the largest of the ranks' values."""
        return self.all_reduce_max_each([value])[0]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum of the ranks' tensors, on the host."""
        return tensor

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors, on any device, with those of rank 0."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Only for the thread that saves, which has its own process group."""
        return [value]

    def gather_on_main(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on rank 0; nothing on the others. It must be picklable."""
        return [value]

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0; every rank returns its result (which must be picklable), or raises its error."""
        return work()

    def main_first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 first, then on the others, which find on the disk what rank 0 prepared."""
        return work()
