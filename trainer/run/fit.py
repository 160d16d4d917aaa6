"""Whether a run fits into memory: the microbatch is halved until a step is forecast to fit, or fits."""

from __future__ import annotations

import gc
import logging
import re
from functools import partial

import torch

from mantissa.step.ledger import MIB, STEADY
from trainer.config.schema import Config
from trainer.config.settle import MICRO, Settled, alone, free_bytes
from trainer.data.contract import Datasets, SampleId, checked_batch
from trainer.data.loader import Batching
from trainer.errors import OutOfMemory, first_line
from trainer.hardware import CPU, keep_freed_memory, release_kept_memory
from trainer.parallel.wrap import FSDP
from trainer.recipe import Decision, Recipe
from trainer.run.forecast import ledger_of, required_bytes
from trainer.terminal import work

USABLE = 0.9
"""Share of the free memory that a run may need, since allocators waste some."""
REMEDY = "a smaller model, activation_checkpointing=blocks or precision=bf16 needs less"

log = logging.getLogger("mantissa")


def fit(settled: Settled, auto: bool) -> Decision | None:
    """Return the smaller microbatch that is forecast to fit into the free memory; None: the present one is kept.

    On a CPU alone, where the system kills what takes too much. A forecast takes seconds, so it is made only where
    ``rough_bytes`` is half of the free memory or more.

    Args:
        settled: the run; all its processes get the same answer.
        auto: whether the microbatch is ours to choose; one that the user set is not changed, there is a warning.

    Raises:
        OutOfMemory: not even a microbatch of 1 is forecast to fit.
    """
    if settled.hardware.is_gpu:
        return None
    free = free_bytes(settled)
    return settled.world.run_on_main(partial(_fitting, settled, free, auto))


def _fitting(settled: Settled, free: int, auto: bool) -> Decision | None:
    batching, usable = settled.batching, int(USABLE * free)
    size = batching.micro_batch_size
    rough = rough_bytes(settled.config.recipe, settled.datasets, size)
    if rough is None or rough < free / 2:
        return None
    log.info("this may need most of the free memory (%d MiB): forecasting the memory of a step", free / MIB)
    try:
        with work("forecasting the memory of a step"):
            need = needed_bytes(settled, size)
            if need <= usable:
                return None
            fitting = halved(settled.config, batching, size)
            while fitting and needed_bytes(settled, fitting) > usable:
                fitting = halved(settled.config, batching, fitting)
    except Exception as error:  # the model cannot be forecast, or not in such a batch; training does not need it
        log.info("the memory of a step could not be forecast (%s)", first_line(error))
        return None
    needs = f"{size} is forecast to need {need / MIB:,.0f} MiB, {usable / MIB:,.0f} MiB can be used"
    if not auto:
        remedy = f"{MICRO}={fitting} is forecast to fit" if fitting else "no smaller one is forecast to fit"
        log.warning("%s=%s; %s", MICRO, needs, remedy)
        return None
    if fitting:
        return Decision(MICRO, fitting, f"forecast to fit; {needs}")
    raise OutOfMemory(
        f"{MICRO}={needs}, and no smaller one is forecast to fit; nothing was started. {REMEDY.capitalize()}; "
        f"to start it anyway, set {MICRO}=1"
    )


def keep_memory(settled: Settled) -> None:
    """Keep the memory of freed tensors where a step on a CPU needs, roughly counted, less than half of what is free."""
    if settled.hardware.kind is not CPU:
        return
    rough = rough_bytes(settled.config.recipe, settled.datasets, settled.batching.micro_batch_size)
    free = free_bytes(settled)
    if rough is not None and rough < free / 2:
        keep_freed_memory(min(2 * rough, free // 2))


def rough_bytes(recipe: Recipe, datasets: Datasets, micro_batch_size: int) -> int | None:
    """Return a step's memory to a factor of a few, in milliseconds; None where the model cannot be built so quickly.

    A parameter counts 64 bytes, four times what it takes in fp32 with Adam; a token of the input six rows of fp32
    logits; any other number of the input (of an image, a vector) 200 fp32 activations, about as many as ResNet-50 has.
    """
    try:
        with torch.device("meta"):
            shapes = [parameter.shape for parameter in recipe.build_model(datasets).parameters()]
        sample = checked_batch(datasets.train, [SampleId(0, None)]).values()
    except Exception:  # it computes while it is built, or it is broken, and then the trainer reports the error
        return None
    rows = max((shape[0] for shape in shapes if len(shape) == 2), default=0)
    a_sample = sum(tensor.numel() * (24 * rows if tensor.dtype == torch.int64 else 800) for tensor in sample)
    return 64 * sum(shape.numel() for shape in shapes) + micro_batch_size * a_sample


def needed_bytes(settled: Settled, size: int) -> int:
    """Return the forecast of what one rank needs with microbatches of ``size``: its passes are a single process's."""
    one, ranks = alone(settled, size), settled.batching.ranks
    ledger = ledger_of(one)
    if isinstance(settled.config.parallel, FSDP):
        steady = sum(ledger.at_peak[name] for name in STEADY)
        ledger.peak_bytes -= steady - steady // ranks
    return required_bytes(one.config, ledger)


def halved(config: Config, batching: Batching, size: int) -> int:
    """Return the largest microbatch of at most half of ``size`` that divides a rank's batch; 0: there is none."""
    per_rank, least = batching.batch_size // batching.ranks, config.augment.micro_batch_multiple
    return max((half for half in range(least, size // 2 + 1, least) if per_rank % half == 0), default=0)


def ran_out(error: Exception, config: Config, batching: Batching, retry: bool) -> OutOfMemory:
    """Return what ends a run for which the allocator had no memory.

    Args:
        error: of the allocator.
        config: of the run.
        batching: of the run.
        retry: whether nothing was trained yet, so that the run can start again with half the microbatch.
    """
    size, smaller = batching.micro_batch_size, halved(config, batching, batching.micro_batch_size)
    found = re.search(r"tried to allocate (\d+) bytes", str(error))  # the CPU's, between other numbers
    words = f"tried to allocate {int(found[1]) / MIB:.1f} MiB" if found else first_line(error)
    less = f"set {MICRO}={smaller}, which takes the same steps in less memory; " if smaller else ""
    return OutOfMemory(f"out of memory with {MICRO}={size} ({words}); {less}{REMEDY}", smaller if retry else 0)


def release_memory() -> None:
    """Free the memory of a run, which the next one of a sweep would count as its own peak."""
    gc.collect()  # models may hold themselves: every module whose forward method was replaced does
    torch.accelerator.empty_cache()
    release_kept_memory()
