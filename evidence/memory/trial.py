"""Two optimizer steps in a fresh process, and the memory they took: the check of forecasts and batch sizes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evidence.isolated import ProcessError, answer, measure_isolated
from mantissa.ledger import MemoryLedger, tensors
from trainer.config.schema import Config
from trainer.errors import RunError
from trainer.hardware import Hardware, detect, held_bytes, peak_memory_bytes, reset_peak_memory
from trainer.run.forecast import copies_on_device, meta_model
from trainer.trainer import Trainer

_WARM_UP = 2**20
"""Elements: enough for torch to start its threads, whose stacks are not tensors."""


@dataclass
class Trial:
    """The result of two steps."""

    fits: bool
    peak_bytes: int = 0
    """Allocated on a CUDA device, tracked by a ledger, or resident above what the process held before."""


def trial(overrides: Sequence[str], limit_bytes: int | None = None, ledger: bool = False) -> Trial:
    """Train two full optimizer steps in a fresh process.

    Args:
        overrides: as for scripts/train.py.
        limit_bytes: of memory for everything from the model on, with the host's copy of a checkpoint where that is
            the same memory. A larger allocation fails, as on a smaller machine: on CUDA by the allocator's limit, on
            Linux by the kernel's limit of this process's data; elsewhere a ledger is compared with it.
        ledger: track the second step with a MemoryLedger, where CUDA does not count.

    Raises:
        UserError: train.py would refuse these overrides too.
        RunError: the steps failed for another reason.
    """
    options = {"limit_bytes": limit_bytes, "ledger": ledger}
    try:
        return Trial(**measure_isolated(__name__, overrides, options))
    except ProcessError as error:
        # C++ aborts where it cannot raise.
        if error.out_of_memory or (limit_bytes and error.code == -signal.SIGABRT):
            return Trial(fits=False)
        raise RunError(f"a trial with {' '.join(overrides)} failed: {error}") from None


def measure(config: Config, limit_bytes: int | None, ledger: bool) -> Trial:
    """Take the two steps in this process; the arguments are ``trial``'s."""
    hardware = detect(config.device)
    config = config.plan(hardware).config
    # Libraries, data and threads come first: they do not depend on the batch.
    datasets = config.open_datasets()
    meta_model(config.recipe, datasets)
    torch.ones(_WARM_UP).exp_().sum()
    reset_peak_memory(hardware.device)
    before = 0 if hardware.is_gpu else peak_memory_bytes(hardware.device)
    enforced = limit_bytes is not None and _limit(hardware, limit_bytes)
    del datasets  # the trainer opens its own
    tracked = not hardware.is_gpu and (ledger or limit_bytes is not None) and not enforced
    tracked_bytes = _two_steps(config, hardware, tracked, copied=limit_bytes is not None)
    peak = peak_memory_bytes(hardware.device) - before if tracked_bytes is None else tracked_bytes
    return Trial(limit_bytes is None or enforced or peak <= limit_bytes, peak)


def _two_steps(config: Config, hardware: Hardware, tracked: bool, copied: bool) -> int | None:
    """Train two steps; return the peak bytes of the second if ``tracked``; ``copied``: with a checkpoint's copy."""
    trainer = Trainer.from_config(config, hardware)
    # No overflow: after a skipped step the optimizer would have no state.
    trainer.loss_scale.scale.fill_(1.0)
    batches = trainer.batches()
    trainer.train_step(next(batches))
    microbatches = next(batches)
    saved = []
    if copied and copies_on_device(config):
        masters = [] if trainer.masters is None else list(trainer.masters.persistent_weights())
        saved = [tensor.clone() for tensor in tensors((trainer.model.state_dict(), trainer.optimizer.state, masters))]
    tracked_bytes = peak_of(trainer, lambda: trainer.train_step(microbatches)) if tracked else None
    if not tracked:
        trainer.train_step(microbatches)
    del saved
    if not trainer.optimizer.state:
        raise RunError("the gradients are not finite, so the optimizer took no step")
    return tracked_bytes


def peak_of(trainer: Trainer, step: Callable[[], object]) -> int:
    """Return the peak bytes of a step: on a GPU by the allocator, elsewhere by the ledger."""
    if trainer.hardware.is_gpu:
        reset_peak_memory(trainer.device)
        step()
        return peak_memory_bytes(trainer.device)
    with MemoryLedger(trainer.model, trainer.optimizer, trainer.average.persistent_weights().values()) as recording:
        step()
    return recording.report().peak_bytes


def _limit(hardware: Hardware, limit_bytes: int) -> bool:
    """Make allocations beyond the limit fail; return False where the system cannot do that."""
    if hardware.is_gpu:
        fraction = min(1.0, limit_bytes / hardware.memory_bytes)
        torch.get_device_module(hardware.device).set_per_process_memory_fraction(fraction, hardware.device)
        return True
    if sys.platform != "linux" or hardware.device.type != "cpu":
        return False
    import resource

    # Private writable pages; of address space, torch reserves far more than it uses.
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes("VmData") + limit_bytes, resource.RLIM_INFINITY))
    return True


if __name__ == "__main__":
    sys.exit(answer(measure))
