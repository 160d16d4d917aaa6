"""Check before the start that a run fits into memory: choose ``micro_batch_size=auto``, or refuse the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.config.schema import Config
from trainer.config.step import Resolved
from trainer.data.contract import Datasets, SampleId
from trainer.data.loader import Batching
from trainer.errors import OutOfMemory
from trainer.hardware import Hardware, available_bytes
from trainer.parallel.world import World, launched_local_rank
from trainer.parallel.wrap import FSDP, Parallel
from trainer.profiling.ledger import MIB, STEADY
from trainer.recipe import Recipe
from trainer.run.memory.forecast import forecast, required_bytes, size_within
from trainer.run.memory.shortage import USABLE, advice

KEY = "micro_batch_size"

log = logging.getLogger("mantissa")


def fit_plan(
    config: Config, resolved: Resolved, hardware: Hardware, world: World, datasets: Datasets, overrides: Sequence[str]
) -> Resolved:
    """Return the resolved config with a microbatch that is forecast to fit into the free memory.

    A forecast takes seconds, so it is made only where ``rough_bytes`` is half of the free memory or more. A
    ``micro_batch_size`` that the user set is not changed; there is a warning.

    Args:
        config: as composed.
        resolved: what it became.
        hardware: of this process.
        world: the processes that train together; all get the same plan.
        datasets: to train on.
        overrides: of the command line, for what would fit instead.

    Raises:
        OutOfMemory: of ``micro_batch_size=auto`` not even 1 is forecast to fit.
    """
    free = available_bytes(hardware.device)
    if world.size > 1 and not hardware.is_gpu:
        free //= launched_local_rank()[1]  # the processes of a machine share its memory
    free = -world.largest(-free)

    def look() -> tuple[int, str]:
        size = resolved.plan.batching.micro_batch_size
        rough = rough_bytes(resolved.config.recipe, datasets, size)
        if rough is None or rough < free / 2:
            return size, ""
        log.info("this may need most of the free memory (%d MiB): forecasting the memory of a step", free / MIB)
        return _Search(config, resolved.plan.batching, int(USABLE * free)).choose(overrides)

    size, why = world.on_first(look)
    return resolved.with_micro_batch_size(size, why) if why else resolved


def rough_bytes(recipe: Recipe, datasets: Datasets, micro_batch_size: int) -> int | None:
    """Return a step's memory to a factor of a few, in milliseconds; None where the model cannot be built so quickly.

    A parameter counts 64 bytes, four times what it takes in fp32 with Adam; a token of the input six rows of fp32
    logits; any other number of the input (of an image, a vector) 200 fp32 activations, about as many as ResNet-50 has.
    """
    try:
        with torch.device("meta"):
            shapes = [parameter.shape for parameter in recipe.build_model(datasets).parameters()]
        sample = datasets.train.batch([SampleId(0, None)]).values()
    except Exception:  # it computes while it is built, or it is broken, and then the trainer reports the error
        return None
    rows = max((shape[0] for shape in shapes if len(shape) == 2), default=0)
    a_sample = sum(tensor.numel() * (24 * rows if tensor.dtype == torch.int64 else 800) for tensor in sample)
    return 64 * sum(shape.numel() for shape in shapes) + micro_batch_size * a_sample


@dataclass
class _Search:
    """The search for a microbatch that fits, by a few forecasts."""

    config: Config
    """As composed."""
    batching: Batching
    usable: int
    """Bytes."""

    def choose(self, overrides: Sequence[str]) -> tuple[int, str]:
        """Return the microbatch, and why, if it is not the plan's.

        Raises:
            OutOfMemory: see ``fit_plan``.
        """
        size, typed = self.batching.micro_batch_size, self.config.micro_batch_size != "auto"
        try:
            need = self.need(size)
            fitting = size if need <= self.usable else self.largest(size, need)
        except Exception as error:  # the model cannot be forecast, or not in such a batch; training does not need it
            log.info("the memory of a step could not be forecast (%s)", str(error).partition("\n")[0])
            return size, ""
        needs = f"{size} is forecast to need {need / MIB:,.0f} MiB, {self.usable / MIB:,.0f} can be used"
        if fitting == size:
            return size, ""
        if typed:
            remedy = f"{KEY}={fitting} is forecast to fit" if fitting else "no smaller one is forecast to fit"
            log.warning("%s=%s; %s", KEY, needs, remedy)
            return size, ""
        if fitting:
            return fitting, f"forecast to fit; {needs}"
        raise OutOfMemory(
            f"{KEY}={needs}, and no smaller one is forecast to fit; nothing was started.\n"
            f"{advice(overrides, self.usable)}\nTo start it anyway, set {KEY}=1."
        )

    def need(self, size: int) -> int:
        """Return the bytes that one rank needs with microbatches of ``size``."""
        ranks = self.batching.ranks
        per_rank = self.batching.batch_size // ranks
        # A rank's forward and backward passes are those of a single process.
        config = replace(self.config, parallel=Parallel(), batch_size=per_rank, micro_batch_size=size)
        ledger = forecast(config)
        if isinstance(self.config.parallel, FSDP):
            steady = sum(ledger.at_peak[name] for name in STEADY)
            ledger.peak_bytes -= steady - steady // ranks
        return required_bytes(config, ledger)

    def largest(self, size: int, need: int) -> int:
        """Return the largest microbatch below ``size`` that fits, 0 if none does, by the line through two forecasts."""
        per_rank = self.batching.batch_size // self.batching.ranks
        least = self.config.augment.micro_batch_multiple
        sizes = [smaller for smaller in range(least, size, least) if per_rank % smaller == 0]
        if not sizes:
            return 0
        needs = {sizes[-1]: self.need(sizes[-1])}
        most = size_within(self.usable, (sizes[-1], needs[sizes[-1]]), (size, need))
        likely = [smaller for smaller in sizes if smaller <= most]
        for smaller in reversed(likely[-2:]):  # the line may be a little off
            if (needs.get(smaller) or self.need(smaller)) <= self.usable:
                return smaller
        return 0
