"""Whether a run fits into memory, by forecast: ``micro_batch_size=auto`` before it starts, and what fits instead."""

from __future__ import annotations

import bisect
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mantissa.formats import BASIC
from mantissa.ledger import MIB, STEADY
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.config.step import Resolved
from trainer.data.contract import Datasets, SampleId
from trainer.data.loader import Batching
from trainer.errors import MemoryRanOut, OutOfMemory, UserError
from trainer.hardware import Hardware, available_bytes, detect
from trainer.parallel.single import Parallel
from trainer.parallel.world import World, launched_local_rank
from trainer.parallel.wrap import FSDP
from trainer.progress import work
from trainer.recipe import Decision, Recipe
from trainer.run.memory.forecast import Forecast, copies_on_device, forecast, required_bytes, table

USABLE = 0.9
"""Of what is free, since allocators waste some. A failed run needs too much, so what fits must need clearly less."""
KEY = "micro_batch_size"

log = logging.getLogger("mantissa")


def fit_plan(
    config: Config, resolved: Resolved, hardware: Hardware, world: World, datasets: Datasets, overrides: Sequence[str]
) -> Resolved:
    """Return the resolved config with a microbatch that is forecast to fit into the free memory.

    A forecast takes seconds, so it is made only where ``rough_bytes`` is half of the free memory or more. A
    ``micro_batch_size`` that the user set is not changed; there is a warning. On a GPU ``Recipe.saving_memory`` comes
    first.

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

    def look() -> tuple[int, str, list[Decision]]:
        batching, usable = resolved.plan.batching, int(USABLE * free)
        rough = rough_bytes(resolved.config.recipe, datasets, batching.micro_batch_size)
        if rough is None or rough < free / 2:
            return batching.micro_batch_size, "", []
        log.info("this may need most of the free memory (%d MiB): forecasting the memory of a step", free / MIB)
        with work("forecasting the memory of a step"):
            saving = config.recipe.saving_memory() if hardware.is_gpu else []
            if saving and _fits(config, batching, usable):
                saving = []
            frugal = replace(config, recipe=config.recipe.chosen(saving))
            return *choose(frugal, batching, usable, overrides), saving

    size, why, saving = world.on_first(look)
    chosen = replace(resolved.config, recipe=resolved.config.recipe.chosen(saving))
    found = resolved._replace(config=chosen, decisions=[*resolved.decisions, *saving])
    return found.with_micro_batch_size(size, why) if why else found


def _fits(config: Config, batching: Batching, usable: int) -> bool:
    """Return whether the microbatch of ``batching`` is forecast to fit; True where that cannot be forecast."""
    try:
        return needed_bytes(config, batching, batching.micro_batch_size) <= usable
    except Exception:  # ``choose`` says why
        return True


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


def choose(config: Config, batching: Batching, usable: int, overrides: Sequence[str]) -> tuple[int, str]:
    """Return the microbatch that is forecast to fit into ``usable`` bytes, and why, if it is not that of ``batching``.

    Raises:
        OutOfMemory: see ``fit_plan``.
    """
    size = batching.micro_batch_size
    try:
        need = needed_bytes(config, batching, size)
        fitting = size if need <= usable else _largest(config, batching, usable)
    except Exception as error:  # the model cannot be forecast, or not in such a batch; training does not need it
        log.info("the memory of a step could not be forecast (%s)", str(error).partition("\n")[0])
        return size, ""
    needs = f"{size} is forecast to need {need / MIB:,.0f} MiB, {usable / MIB:,.0f} MiB can be used"
    if fitting == size:
        return size, ""
    if config.micro_batch_size != "auto":
        remedy = f"{KEY}={fitting} is forecast to fit" if fitting else "no smaller one is forecast to fit"
        log.warning("%s=%s; %s", KEY, needs, remedy)
        return size, ""
    if fitting:
        return fitting, f"forecast to fit; {needs}"
    raise OutOfMemory(
        f"{KEY}={needs}, and no smaller one is forecast to fit; nothing was started.\n"
        f"{what_fits(overrides, usable)}\nTo start it anyway, set {KEY}=1."
    )


def needed_bytes(config: Config, batching: Batching, size: int) -> int:
    """Return the forecast of what one rank needs with microbatches of ``size``: its passes are a single process's."""
    ranks = batching.ranks
    alone = replace(config, parallel=Parallel(), batch_size=batching.batch_size // ranks, micro_batch_size=size)
    ledger = forecast(alone)
    if isinstance(config.parallel, FSDP):
        steady = sum(ledger.at_peak[name] for name in STEADY)
        ledger.peak_bytes -= steady - steady // ranks
    return required_bytes(alone, ledger)


def _largest(config: Config, batching: Batching, usable: float) -> int:
    """Return the largest microbatch below that of ``batching`` which divides the batch and fits; 0 if none does."""
    per_rank, least = batching.batch_size // batching.ranks, config.augment.micro_batch_multiple
    sizes = [size for size in range(least, batching.micro_batch_size, least) if per_rank % size == 0]
    fitting = bisect.bisect_right(sizes, usable, key=lambda size: needed_bytes(config, batching, size))
    return sizes[fitting - 1] if fitting else 0


def out_of_memory(error: BaseException, overrides: Sequence[str]) -> OutOfMemory:
    """Return the error to report in the place of ``error``, which the allocator raised: the forecast, and what fits.

    Call it when the run is gone: what is free then is what a new one would find.
    """
    if isinstance(error, MemoryRanOut) and not any(each.startswith(f"{KEY}=") for each in overrides):
        overrides = [*overrides, f"{KEY}={error.micro_batch_size}"]  # as it was chosen, not as it would be chosen now
    text = str(error)
    found = re.search(r"tried to allocate (\d+) bytes", text)  # the CPU's, between file names and error codes
    words = f"tried to allocate {int(found[1]) / MIB:.1f} MiB" if found else (text or type(error).__name__)
    return OutOfMemory(f"out of memory ({words.splitlines()[0]})\n{what_fits(overrides)}")


def what_fits(overrides: Sequence[str], usable: float | None = None) -> str:
    """Return the forecast of a step that needs too much, beside smaller ones, and which overrides are forecast to fit.

    Where no single change is enough: the first that is of those that leave the model as it is, all together.

    Args:
        overrides: of the command line.
        usable: bytes, where no microbatch fits: single changes are then not tried, but smaller models of the recipe;
            None: of what is free.
    """
    try:
        config = compose(overrides)
        hardware = detect(config.device)
        resolved = config.resolve(hardware)
        typed = forecast(config)
        batching, least = resolved.plan.batching, config.augment.micro_batch_multiple
        blocks = ["activation_checkpointing=blocks"] if config.activation_checkpointing.mode == "none" else []
        alone, smaller_models = [], []
        if usable is None:
            usable = USABLE * min(available_bytes(hardware.device), required_bytes(config, typed))
            if batching.micro_batch_size > least:
                alone.append(f"{KEY}={_largest(config, batching, usable) or least}")
            if hardware.is_gpu:
                alone += [f"{each.key}={str(each.value).lower()}" for each in config.recipe.saving_memory()]
            alone += [*blocks, *(["precision=bf16"] if config.precision.format.half is None else [])]
        else:
            smaller_models = [f"{smaller} {KEY}={least}" for smaller in resolved.config.recipe.smaller()]
        tried = list(_options(alone, overrides))
        fitting = [option.label for option in tried if option.bytes <= usable]
        if not fitting:
            background = ["checkpoint.background=false"] if copies_on_device(config) else []
            precisions = ["bf16_master", "bf16_sr"] if config.precision.mode in BASIC else []
            together = [f"{KEY}={least}", *background, *blocks]
            same_model = [" ".join([*together, f"precision={mode}"]) for mode in precisions]
            for labels in (same_model, smaller_models):
                fits = (option.label for option in _options(labels, overrides) if option.bytes <= usable)
                fitting += itertools.islice(fits, 1)
    except Exception:  # no forecast for this model, several processes, or not enough memory for a forecast
        return (
            "To save memory, try half the micro_batch_size, activation_checkpointing=blocks, precision=bf16 or bf16_sr."
        )
    columns = table([Forecast("this run", typed), *tried])
    free = f"the usable {usable / MIB:.0f} MiB"
    found = [f"Forecast to fit into {free}:", *(f"  {label}" for label in fitting)]
    if not fitting:
        found = [f"Nothing that was tried is forecast to fit into {free}; train a smaller model."]
    return "\n".join(["forecast peak memory of this step and of smaller alternatives:\n", columns, "", *found])


@dataclass
class _Option(Forecast):
    """A run with further overrides."""

    bytes: int = 0
    """See ``required_bytes``."""


def _options(labels: Iterable[str], overrides: Sequence[str]) -> Iterator[_Option]:
    """Forecast the run with each of these further overrides; leave out what its recipe or this hardware has not got."""
    for label in labels:
        more = label.split()
        changed = {override.partition("=")[0] for override in more}
        kept = [override for override in overrides if override.partition("=")[0] not in changed]
        try:
            config = compose([*kept, *more])
            ledger = forecast(config)
        except UserError:
            continue
        yield _Option(label, ledger, bytes=required_bytes(config, ledger))
