"""Two optimizer steps in a fresh process with so much memory, and whether they fit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

import torch

from evidence.isolated import ProcessError, answer, measure_isolated
from mantissa.step.memory import held_bytes
from mantissa.tensors import tensors
from trainer.config.schema import Config
from trainer.config.settle import plan_of, settle
from trainer.errors import OutOfMemory, RunError
from trainer.hardware import Hardware, detect, peak_memory_bytes, reset_peak_memory
from trainer.run.forecast import copies_on_device, meta_model
from trainer.trainer import Trainer

_WARM_UP = 2**20
"""Elements: enough for torch to start its threads, whose stacks are not tensors."""


def fits(overrides: Sequence[str], limit_bytes: int) -> bool:
    """Train two full optimizer steps in a fresh process, and return whether they fit.

    Args:
        overrides: as for scripts/train.py.
        limit_bytes: of memory for everything from the model on, with the host's copy of a checkpoint where that is
            the same memory. A larger allocation fails, as on a smaller machine: on CUDA by the allocator's limit, on
            Linux by the kernel's limit of this process's data; elsewhere a ledger is compared with it.

    Raises:
        UserError: train.py would refuse these overrides too.
        RunError: the steps failed for another reason.
    """
    try:
        return bool(measure_isolated(__name__, overrides, {"limit_bytes": limit_bytes}))
    except ProcessError as error:
        # The kernel kills where it has promised more memory than there is; C++ aborts where it cannot raise.
        if error.code in (OutOfMemory.exit_code, -signal.SIGKILL, -signal.SIGABRT):
            return False
        raise RunError(f"a trial with {' '.join(overrides)} failed: {error}") from None


def measure(config: Config, limit_bytes: int) -> bool:
    """Take the two steps in this process, and return whether they fit; the arguments are those of ``fits``."""
    hardware = detect(config.device)
    # Libraries, data and threads come first: they do not depend on the batch.
    settled = settle(plan_of(config, hardware))
    meta_model(settled.config.recipe, settled.datasets)
    torch.ones(_WARM_UP).exp_().sum()
    enforced = _limit(hardware, limit_bytes)
    trainer = Trainer(settled)
    # No overflow: after a skipped step the optimizer would have no state.
    trainer.loss_scale.scale.fill_(1.0)
    batches = trainer.batches()
    trainer.train_step(next(batches))
    microbatches, saved = next(batches), []
    if copies_on_device(config):
        masters = [] if trainer.masters is None else list(trainer.masters.persistent_weights())
        saved = [tensor.clone() for tensor in tensors((trainer.model.state_dict(), trainer.optimizer.state, masters))]
    peak = 0
    if enforced:
        trainer.train_step(microbatches)
    else:
        peak = peak_of(trainer, lambda: trainer.train_step(microbatches))
    del saved
    if not trainer.optimizer.state:
        raise RunError("the gradients are not finite, so the optimizer took no step")
    return peak <= limit_bytes


def peak_of(trainer: Trainer, step: Callable[[], object]) -> int:
    """Return the peak bytes of a step: on a GPU by the allocator, elsewhere by the ledger."""
    if trainer.hardware.is_gpu:
        reset_peak_memory(trainer.device)
        step()
        return peak_memory_bytes(trainer.device)
    with trainer.ledger() as recording:
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
