"""Saving while training goes on: a copy in host memory, and a thread that writes it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.store import Checkpoint, Contents, NotWritten
from trainer.errors import NonFiniteError
from trainer.parallel.world import World
from trainer.parallel.wrap import own_part

log = logging.getLogger("mantissa")


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of a new model's buffers that hold infinities as built, such as a mask of -inf for attention."""
    buffers = ((name, own_part(buffer)) for name, buffer in model.named_buffers())
    return frozenset(name for name, held in buffers if held.is_floating_point() and bool(held.isinf().any()))


class Saver:
    """Writes a run's checkpoints, one at a time. A disk that refuses one costs that checkpoint, not the run."""

    def __init__(self, options: Checkpoint, folder: Path, world: World, masks: Collection[str] = ()) -> None:
        """Take what saving needs.

        Args:
            options: of the config.
            folder: of all checkpoints of the run.
            world: its first rank writes what all share.
            masks: names of buffers that may hold infinities; see ``infinite_buffers``.

        """
        self.options = options
        self.folder = folder
        self.world = world
        self.saved = 0
        self.failed = 0
        self.stall_s = 0.0
        """How long training has waited for its checkpoints, in all."""
        self.write_s = 0.0
        self._masks = frozenset(masks)
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, training: dict[str, Any], progress: dict[str, Any], score: float | None) -> float:
        """Save the state of the training and return how long it had to wait, in seconds.

        Args:
            training: see ``checkpoint.state.training_state``.
            progress: JSON types; what else the run needs to continue.
            score: what the weights were judged by at this step, if they were; the lowest is kept as the best.

        Raises:
            NonFiniteError: a weight is not finite; nothing is written.

        """
        began = time.perf_counter()
        self.finish()
        self._refuse_nonfinite(training["step"], training["model"])
        contents = Contents.of(training, progress, self.world)
        if self.options.background:
            contents = self._copy(contents)
            # Not to be waited for when the process is told to leave at once.
            self._thread = threading.Thread(target=self._write, args=(contents, score), name="saver", daemon=True)
            self._thread.start()
        else:
            self._write(contents, score)
            self.finish()
        stall_s = time.perf_counter() - began
        self.stall_s += stall_s
        return stall_s

    def finish(self) -> None:
        """Wait until what is being written is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def facts(self) -> dict[str, Any]:
        """Return what summary.json says about the checkpoints."""
        return {"saved": self.saved, "failed": self.failed, "stall_s": self.stall_s, "write_s": self.write_s}

    def _refuse_nonfinite(self, step: int, weights: dict[str, Tensor]) -> None:
        state = {name: own_part(tensor) for name, tensor in weights.items() if tensor.is_floating_point()}
        tensors = {
            name: tensor.detach() for name, tensor in state.items() if tensor.numel() and name not in self._masks
        }
        largest = torch._foreach_norm(list(tensors.values()), ord=float("inf"))
        finite = [True] if not largest else torch.isfinite(torch.stack([norm.float() for norm in largest])).tolist()
        if not self.world.largest(not all(finite)):
            return
        bad = next((name for name, good in zip(tensors, finite, strict=False) if not good), "a weight of another rank")
        raise NonFiniteError(f"{bad} is not finite after step {step}; no checkpoint was written")

    def _copy(self, contents: Contents) -> Contents:
        """Copy the tensors to host memory, into the same place every time: fresh memory takes longer to fill."""
        files: dict[str, dict[str, Tensor]] = {}
        waits = False
        for file, tensors in contents.files.items():
            files[file] = {}
            for name, tensor in tensors.items():
                on_gpu = tensor.device.type == "cuda"
                host = self._host.get(f"{file}/{name}")
                if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
                    self._host[f"{file}/{name}"] = host
                host.copy_(tensor, non_blocking=on_gpu)
                waits |= on_gpu
                files[file][name] = host
        if waits:
            torch.cuda.synchronize()
        return Contents(contents.step, files, contents.state)

    def _write(self, contents: Contents, score: float | None) -> None:
        began = time.perf_counter()
        if threading.current_thread() is self._thread:
            with contextlib.suppress(OSError, AttributeError):  # training comes first; only Linux has this
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            checkpoint.write(self.folder, contents, score, self.world)
            self.saved += 1
            self._prune()
        except NotWritten as error:
            self.failed += 1
            log.warning("the checkpoint of step %d was not saved (%s); training goes on", contents.step, error)
        except BaseException as error:  # of a thread: raised where the run waits for it
            self._error = error
        self.write_s += time.perf_counter() - began

    def _prune(self) -> None:
        try:
            if self.world.first:
                checkpoint.prune(self.folder, self.options.keep)
        except OSError as error:
            log.warning("an old checkpoint could not be removed (%s)", error)
