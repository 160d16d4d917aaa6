"""Saving while training continues: a copy in host memory, and a thread that writes it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.tensors import local
from trainer import files
from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.schema import InvalidCheckpoint, read_manifest, write_manifest
from trainer.checkpoint.store import Checkpoint, CheckpointNotWritten, Snapshot
from trainer.errors import NonFiniteError
from trainer.hardware import kind_of
from trainer.parallel.world import World

log = logging.getLogger("mantissa")

_BLOCK, _ALIGNED = 2**28, 64
"""Bytes of page-locked memory that are allocated at once, more for a larger tensor; and what its parts begin at."""


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of a new model's buffers that hold infinities as built, such as a mask of -inf for attention."""
    buffers = ((name, local(buffer)) for name, buffer in model.named_buffers())
    return frozenset(name for name, held in buffers if held.is_floating_point() and bool(held.isinf().any()))


@dataclass
class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. If the disk refuses one, the run continues without it."""

    options: Checkpoint
    folder: Path
    """Folder of all checkpoints of the run."""
    world: World
    """The processes that save together; the first one writes what all share."""
    masks: frozenset[str] = frozenset()
    """Names of buffers that may hold infinities; see ``infinite_buffers``."""

    def __post_init__(self) -> None:
        self.saved = 0
        self.failed = 0
        self._host: dict[str, Tensor] = {}
        self._block = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        training: dict[str, Any],
        progress: dict[str, Any],
        score: float | None,
        run: dict[str, Any] | None = None,
    ) -> float:
        """Save the state of the training and return how long it had to wait, in seconds.

        Args:
            training: see ``optim.state.training_state``.
            progress: JSON types; what else the run needs to continue.
            score: of the weights at this step (the lowest is kept as the best); None if they were not evaluated.
            run: see ``Snapshot.of``.

        Raises:
            NonFiniteError: a weight is not finite; nothing is written.
        """
        began = time.perf_counter()
        # One checkpoint at a time, and none from which no run could go on.
        self.finish()
        self._refuse_nonfinite(training["step"], training["model"])
        snapshot = Snapshot.of(training, progress, self.world, run)
        if self.options.background:
            # The next step changes the tensors in place, while a thread writes their copies.
            snapshot = self._copy(snapshot)
            # A daemon: a process that has to stop at once does not wait for it.
            self._thread = threading.Thread(
                target=self._write, args=(snapshot, score), name="checkpoint writer", daemon=True
            )
            self._thread.start()
        else:
            self._write(snapshot, score)
            self.finish()
        return time.perf_counter() - began

    def rate(self, step: int, score: float | None, run: dict[str, Any] | None) -> None:
        """Add the score to the checkpoint of ``step``, which was evaluated after it was saved; see ``save``."""
        try:
            if run is not None:
                self._flush_log(run)
                folder = checkpoint.path_of(self.folder, step)
                write_manifest(folder, read_manifest(folder) | {"score": score} | run)
        except (OSError, InvalidCheckpoint) as error:
            log.warning("the score of step %d was not saved (%s); training continues", step, error)
        self.prune()
        self.world.all_reduce_max(0)  # the others wait: they will look for the best checkpoint

    def finish(self) -> None:
        """Wait until what is being written is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def facts(self) -> dict[str, Any]:
        """Return the entries of summary.json about checkpoints."""
        return {"saved": self.saved, "failed": self.failed}

    def _refuse_nonfinite(self, step: int, weights: dict[str, Tensor]) -> None:
        state = {name: local(tensor) for name, tensor in weights.items() if tensor.is_floating_point()}
        tensors = {name: tensor.detach() for name, tensor in state.items() if tensor.numel() and name not in self.masks}
        largest = torch._foreach_norm(list(tensors.values()), ord=float("inf"))
        finite = [True] if not largest else torch.isfinite(torch.stack([norm.float() for norm in largest])).tolist()
        if not self.world.all_reduce_max(not all(finite)):
            return
        bad = next((name for name, good in zip(tensors, finite, strict=False) if not good), "a weight of another rank")
        raise NonFiniteError(f"{bad} is not finite after step {step}; no checkpoint was written")

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy the tensors to host memory, always the same: memory that is newly allocated takes longer to fill."""
        files: dict[str, dict[str, Tensor]] = {}
        waits, left = False, sum(each.nbytes for tensors in snapshot.files.values() for each in tensors.values())
        for file, tensors in snapshot.files.items():
            files[file] = {}
            for name, tensor in tensors.items():
                pinned = kind_of(tensor.device).pinned
                host = self._host.get(f"{file}/{name}")
                if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                    host = self._pinned(tensor, left) if pinned else torch.empty(tensor.shape, dtype=tensor.dtype)
                    self._host[f"{file}/{name}"] = host
                host.copy_(tensor, non_blocking=pinned)
                waits, left = waits or pinned, left - tensor.nbytes
                files[file][name] = host
        if waits:
            torch.accelerator.synchronize()
        return replace(snapshot, files=files)

    def _pinned(self, like: Tensor, left: int) -> Tensor:
        """Return page-locked memory for a tensor, one of those that take ``left`` bytes in all.

        It is a part of a block, because torch rounds each allocation up to a power of two.
        """
        size = -(-like.nbytes // _ALIGNED) * _ALIGNED
        if size > len(self._block):
            block = 1 << (max(size, min(_BLOCK, left)) - 1).bit_length()
            self._block = torch.empty(block, dtype=torch.uint8, pin_memory=True)
        part, self._block = self._block[: like.nbytes], self._block[size:]
        return part.view(like.dtype).view(like.shape)

    def _flush_log(self, run: dict[str, Any]) -> None:
        if run:  # else a power cut could take what was logged before this checkpoint
            with contextlib.suppress(OSError):
                files.flush(self.folder.parent / files.METRICS_FILE)

    def _write(self, snapshot: Snapshot, score: float | None) -> None:
        if threading.current_thread() is self._thread:
            with contextlib.suppress(OSError, AttributeError):  # a lower priority than training; only on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._flush_log(snapshot.run)
            checkpoint.write(self.folder, snapshot, score, self.world)
            self.saved += 1
            self.prune()
        except CheckpointNotWritten as error:
            self.failed += 1
            log.warning("the checkpoint of step %d was not saved (%s); training continues", snapshot.step, error)
        except BaseException as error:  # of a thread: raised where the run waits for it
            self._error = error

    def prune(self) -> None:
        """Remove what is no longer kept; a resumed run does what a killed process did not come to."""
        try:
            if self.world.is_main:
                checkpoint.prune(self.folder, self.options.keep)
        except OSError as error:
            log.warning("an old checkpoint could not be removed (%s)", error)
