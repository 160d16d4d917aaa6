"""The ``parallel`` config group, and its choice for one process on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from trainer.errors import UserError
from trainer.parallel.world import World, launched_processes
from trainer.precision.modes import Precision


@dataclass
class Parallel:
    """The ``parallel`` config group; this base is ``parallel=single``: one process, one device."""

    kind: ClassVar[str] = "single"

    def world(self, device: str) -> World:
        """Join the other processes of the job.

        Args:
            device: the option; ``auto`` and ``cuda`` become the GPU of this process's local rank.

        Raises:
            UserError: torchrun started a number of processes that this choice cannot use.
        """
        if (processes := launched_processes()) > 1:
            raise UserError(
                f"torchrun started {processes} processes, and parallel=single uses one; "
                "set parallel=ddp or parallel=fsdp, or start it with python"
            )
        return World()

    def check(self, precision: Precision) -> None:
        """Check that the options fit the precision.

        Raises:
            UserError: they do not.
        """

    def effective(self) -> dict[str, Any]:
        """Return the entries of precision.json about this choice."""
        return {}

    def compiled(self, model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
        """Return the modules that torch.compile compiles: the model as a whole."""
        return [model]

    def wrap(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        device: torch.device,
        accumulation: torch.dtype | None = None,
        rounded: torch.dtype | None = None,
    ) -> nn.Module:
        """Return the module that forward passes of training call; parameters of ``model`` keep their names.

        Args:
            model: on its device, with the same weights on every rank.
            blocks: the model's repeated blocks, the units of sharding.
            device: where the model is.
            accumulation: the dtype in which gradients of microbatches are accumulated; None: that of the weights.
            rounded: the dtype to which autocast rounds the operands of every matmul; None: it does not.
        """
        return model

    def microbatch(self, replica: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Return the context of one microbatch's forward and backward; gradients are summed only in the ``last``."""
        return nullcontext()
