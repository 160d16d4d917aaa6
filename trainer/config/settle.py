"""From a composed config to one without ``auto``, in two stages; nothing changes a config later.

1. ``plan_of``: what the hardware and an earlier run decide. It opens the data only where epochs are to be counted, so
   commands call it to find mistakes before they begin any work.
2. ``settle``: what the open data and the memory decide.

In each of them a group gives its own ``auto`` a value by its method ``resolve``. Three things are outside: the
precision, which names the run, is chosen as the config is built; the device before the processes know each other; and
the kernels of 16-bit operands once the model is built. What is recorded as ``auto`` is a rule rather than a value: the
warm-up is a twentieth of the steps, for example, and a longer run has a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mantissa.step.memory import available_bytes
from trainer.config.schema import Config
from trainer.config.step import EPOCH
from trainer.data.contract import Datasets
from trainer.data.loader import Batching
from trainer.errors import UserError, check_number, on_every_rank
from trainer.files import TOKENIZER
from trainer.hardware import Hardware
from trainer.parallel.compile import Compile
from trainer.parallel.world import World, launched_local_rank
from trainer.parallel.wrap import Parallel
from trainer.precision.modes import Precision
from trainer.profiling.profiler import TorchProfiler
from trainer.recipe import Context, Decision, Sizes

MICRO = "micro_batch_size"
KEPT = "as at the start of the run"
"""Why an ``auto`` is what it is in a run that is continued."""


@dataclass(frozen=True)
class Plan:
    """What a config becomes before its data is open, see ``plan_of``."""

    hardware: Hardware
    world: World
    """The processes that train together, each of which has such a plan."""
    config: Config
    """The config with values in the place of ``auto``; what open data decides is still ``auto``."""
    eval_every: Fraction
    """Optimizer steps between two evaluations; an epoch need not be a whole number of them."""
    save_every: int | None
    """Optimizer steps between two checkpoints where epochs may be long; None: one at every evaluation is enough."""
    decisions: tuple[Decision, ...]
    """What was chosen, to be shown."""
    recorded: Mapping[str, Any]
    """The options of the run that is continued, by dotted key; empty: a new run."""
    datasets: Datasets | None
    """The data, where it is open already: it had to be, to count the steps of an epoch."""

    @cached_property
    def batching(self) -> Batching:
        """How a step's batch is divided."""
        config, world = self.config, self.world
        return Batching(int(config.batch_size), int(config.micro_batch_size), world.size, world.rank)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self.config.steps)

    @property
    def eval_samples(self) -> int:
        """Validation samples of an evaluation, at most."""
        return int(self.config.eval_samples)

    def evaluates(self, step: int) -> bool:
        """Return whether the validation data is evaluated after this step: the last, or one that ends an interval."""
        steps, of = self.eval_every.as_integer_ratio()
        return step == self.steps or step * of // steps > (step - 1) * of // steps

    @property
    def evaluations(self) -> int:
        """How many steps of the run ``evaluates`` names; an interval below one step ends in each."""
        return min(self.steps, (self.steps - 1) // self.eval_every + 1)


@dataclass(frozen=True)
class Settled(Plan):
    """What a config becomes, as the run records it: no option is ``auto`` any more but for rules, see ``settle``."""

    datasets: Datasets
    """What it trains on and is evaluated on."""


def plan_of(
    config: Config,
    hardware: Hardware,
    world: World | None = None,
    recorded: Mapping[str, Any] = {},
    fitted: Decision | None = None,
    datasets: Datasets | None = None,
) -> Plan:
    """Return what the config becomes before its data is open, and check that all fits together.

    Args:
        config: as composed.
        hardware: where it runs.
        world: the processes that train together, each of which calls this; None: this one alone.
        recorded: the options of the run that is continued, by dotted key. They count as typed where the record alone
            knows what ``auto`` became: the memory, the data or a measurement decided it.
        fitted: the microbatch that the memory allows, in the place of ``auto``; it is shown where it has a reason.
        datasets: of the config, where they are open already.

    Raises:
        UserError: a precision this hardware lacks, a batch that does not divide, data the recipe cannot use.
    """
    world = world or World()
    # The precision of auto, which a run that is continued keeps, wherever that is.
    of_precision = config.decided
    if of_precision and (mode := recorded.get("precision.mode", config.precision.mode)) != config.precision.mode:
        config = replace(config, precision=replace(config.precision, mode=mode))
        of_precision = (Decision("precision", mode, KEPT),)
    # The weights that it starts from: their options, and a lower learning rate.
    config, of_weights = _from_weights(config, recorded)
    # The hardware: which model, and for how long the recipe trains it in which batches.
    context = Context(hardware, world, config.data, recorded)
    with on_every_rank():
        config.precision.check_phases(lambda phase: phase.check(hardware))
        recipe, of_recipe = config.recipe.resolve(context)
        augment, of_augment = config.augment.resolve(context)
    config = replace(config, recipe=recipe, augment=augment)
    sizes = world.run_on_main(partial(recipe.sizes, hardware))  # which may measure
    default = sizes.why or f"the recipe's own for a {'GPU' if hardware.is_gpu else 'CPU'}"
    # The data, where its passes are to be counted.
    by_epochs = config.epochs is not None or config.eval_every == EPOCH
    if by_epochs and datasets is None:
        datasets = world.main_first(config.open_datasets)
    samples, validation = (len(datasets.train), len(datasets.valid)) if by_epochs and datasets else (0, 0)
    # From here on every number follows from those before it: what is typed, else this value, and why.
    with on_every_rank():
        number = partial(_number, config)
        batch_size, of_batch = number("batch_size", sizes.batch_size, default)
        epoch = Fraction(samples, batch_size)
        if config.epochs is not None:
            total = math.ceil(Fraction(str(config.epochs)) * epoch)
            steps, of_steps = number("steps", total, f"epochs={config.epochs:g} of {samples:,} samples")
        else:
            steps, of_steps = number("steps", sizes.steps, default)
        precision, of_change = _change(config, steps, recorded)
        _, size, why = fitted or _microbatch(config, sizes, default, batch_size, world.size, recorded)
        micro_batch_size, of_microbatch = number(MICRO, size, why)
        _check(config, steps, micro_batch_size)
        Batching(batch_size, micro_batch_size, world.size)  # which refuses what does not divide
        # Evaluations: after each pass, else at most ten in a run.
        tenth = max(steps // 10, min(steps, 25))
        if config.epochs is not None:
            every, of_every = number("eval_every", EPOCH, "as epochs is set")
        else:
            every, of_every = number("eval_every", tenth, "at most ten evaluations per run")
        if every == EPOCH:
            eval_samples, of_samples = number("eval_samples", validation, "all")
        else:
            eval_samples, of_samples = number("eval_samples", 10 * batch_size, "at most ten training batches")
    numbers: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch_size,
        MICRO: micro_batch_size,
        "eval_every": every,
        "eval_samples": eval_samples,
    }
    return Plan(
        hardware=hardware,
        world=world,
        config=replace(config, epochs=None, precision=precision, **numbers),
        eval_every=epoch if every == EPOCH else Fraction(every),
        save_every=tenth if by_epochs else None,
        decisions=(
            *(*of_precision, *of_weights, *of_recipe, *of_augment),
            *(*of_steps, *of_change, *of_batch, *of_microbatch, *of_every, *of_samples),
        ),
        recorded=recorded,
        datasets=datasets,
    )


def settle(plan: Plan) -> Settled:
    """Open the data of a plan, and return what its config becomes; every rank calls it.

    Raises:
        UserError: the data cannot be had, or does not suit the options.
    """
    config = plan.config
    # The data, and on a GPU the memory that it leaves.
    datasets = plan.datasets or plan.world.main_first(config.open_datasets)
    free = free_bytes(plan) if plan.hardware.is_gpu else 0
    # What they decide: options of the model and of its loss, the augmentation, the loading processes.
    size = plan.batching.micro_batch_size
    context = Context(plan.hardware, plan.world, config.data, plan.recorded, datasets, size, free)
    with on_every_rank():
        recipe, of_recipe = config.recipe.resolve(context)
        augment, of_augment = config.augment.resolve(context)
        loader, of_loader = config.loader.resolve(context)
    return Settled(
        hardware=plan.hardware,
        world=plan.world,
        config=replace(config, recipe=recipe, augment=augment, loader=loader),
        eval_every=plan.eval_every,
        save_every=plan.save_every,
        decisions=(*plan.decisions, *of_recipe, *of_augment, *of_loader),
        recorded=plan.recorded,
        datasets=augment.applied(datasets),
    )


def alone(settled: Settled, micro_batch_size: int) -> Settled:
    """Return what one rank of a run computes, as a run of one process without torch.compile: for a forecast."""
    batch_size = settled.batching.batch_size // settled.batching.ranks
    numbers: dict[str, Any] = {"batch_size": batch_size, MICRO: micro_batch_size}
    config = replace(settled.config, compile=Compile(), parallel=Parallel(), **numbers)
    return replace(settled, world=World(), config=config)


def by_format(settled: Settled) -> list[Settled]:
    """Return a run as one of each of its formats, which it keeps to its end: for a forecast."""
    phases = settled.config.precision.phases
    return [replace(settled, config=replace(settled.config, precision=each)) for each in phases]


def free_bytes(plan: Plan) -> int:
    """Return the free memory of the rank that has least; every rank calls this."""
    free = available_bytes(plan.hardware.device)
    shared = plan.world.size > 1 and not plan.hardware.is_gpu  # by the processes of a machine
    return -plan.world.all_reduce_max(-(free // launched_local_rank()[1] if shared else free))


def _from_weights(config: Config, recorded: Mapping[str, Any]) -> tuple[Config, list[Decision]]:
    """Return the config with the options of the weights that ``init_from`` names, and a rate for them.

    A run that is continued has these options in its record, and the weights in its checkpoint.
    """
    decisions: list[Decision] = []
    # Their options, which a new run has since it was composed (``adopt``).
    if recorded and config.init_from is not None:
        config = _with_options_of(config, recorded)
    elif config.source is not None:
        about = f"as in {config.source.path}"
        decisions += [Decision(key, value, about) for key, value in config.source.taken.items()]
    if recorded:
        config = replace(config, source=None)
    # A lower rate for what is trained already, unless the user has set one.
    recipe: Any = config.recipe
    rank = recipe.lora.rank if hasattr(recipe, "lora") else 0
    if rank and config.init_from is None:
        why = "the weights below the adapters are random and stay so; set init_from"
        decisions.append(Decision("recipe.lora.rank", rank, why))
    factor = recipe.adapter_lr if rank else recipe.fine_tuning_lr if config.init_from is not None else None
    if factor is None or {"optimizer.lr", "experiment"} & config.typed:
        return config, decisions
    usual = config.optimizer.lr
    lr = float(f"{factor * usual:.6g}")
    why = f"for {'adapters' if rank else 'pretrained weights'}; {usual} for random weights"
    config = replace(config, optimizer=replace(config.optimizer, lr=lr))
    return config, [*decisions, Decision("optimizer.lr", lr, why)]


def _with_options_of(config: Config, recorded: Mapping[str, Any]) -> Config:
    """Return the config with what a run took over from ``init_from`` when it was started, but for what is typed.

    The tokenizer of that run, which is kept in this one's folder, may be typed as well.
    """
    tokenizer = Path(str(getattr(config.data, "tokenizer", None)))
    source = Path(str(config.init_from))
    kept = tokenizer.name == TOKENIZER and tokenizer.parent in (source, source.parent)
    typed = config.typed - ({"data.tokenizer"} if kept else set())
    kinds = {"recipe": config.recipe.name, "data": config.data.kind}
    names = {"recipe": (*config.recipe.architecture, *config.recipe.adjustable), "data": ("tokenizer",)}
    for group, kind in kinds.items():
        component: Any = getattr(config, group)
        own = {entry.name for entry in fields(component)}
        taken = {
            name: recorded[f"{group}.{name}"]
            for name in names[group]
            if name in own and f"{group}.{name}" in recorded.keys() - typed and recorded.get(group) == kind
        }
        if taken:
            changed: dict[str, Any] = {group: replace(component, **taken)}
            config = replace(config, **changed)
    return config


def _number(config: Config, key: str, auto: Any, why: str) -> tuple[Any, list[Decision]]:
    """Return what is typed, else what ``auto`` is, which is then to be shown if it has a reason."""
    typed = getattr(config, key)
    value: Any = auto if typed == "auto" else typed
    if value != EPOCH:
        check_number(key, value)
    return value, [Decision(key, value, why)] if typed == "auto" and why else []


def _change(config: Config, steps: int, recorded: Mapping[str, Any]) -> tuple[Precision, list[Decision]]:
    """Return the precision with the number of a step in the place of a share of all steps, which is then to be shown.

    Raises:
        UserError: no step is left before the change, or after it.
    """
    precision, key = config.precision, "precision.until"
    until, before = precision.until, recorded.get(key)
    share = isinstance(until, float)
    # A command that is repeated has the share of its own steps. On a record (resume=FOLDER) a share is typed anew.
    if share and before is not None and config.resume == "auto":
        return replace(precision, until=before), [Decision(key, before, KEPT)]
    if until is None or (before is not None and not share):
        return precision, []
    step = round(Fraction(str(until)) * steps) if share else until
    if not 0 < step < steps:
        left = f"precision={precision.mode}" if step < 1 else f"precision.then={precision.then}"
        problem = f"{key}={until} leaves no step to {left}, of steps={steps}"
        raise UserError(problem, f"{key}=0.5", "precision.then=null precision.until=null")
    why = f"as {until:g} of {steps} steps"
    return replace(precision, until=step), [Decision(key, step, why)] if step != until else []


def _microbatch(
    config: Config, sizes: Sizes, why: str, batch_size: int, ranks: int, recorded: Mapping[str, Any]
) -> Decision:
    """Return the microbatch that ``auto`` stands for: that of the record, else the largest that divides the batch."""
    least, most = config.augment.micro_batch_multiple, min(batch_size, sizes.micro_batch_size)
    fitting = max((size for size in range(least, most + 1, least) if batch_size % (size * ranks) == 0), default=1)
    before = recorded.get(MICRO)
    fits = isinstance(before, int) and before > 0 and before % least == 0 and batch_size % (before * ranks) == 0
    if fits and before != fitting:
        return Decision(MICRO, before, KEPT)
    why = why if fitting == most else f"{why}, lowered to divide the batch"
    return Decision(MICRO, fitting, why)


def _check(config: Config, steps: int, micro_batch_size: int) -> None:
    """Refuse numbers that do not fit other options."""
    if config.schedule.warmup(steps) >= max(2, steps):
        raise UserError(
            f"schedule.warmup_steps={config.schedule.warmup_steps} must be less than steps={steps}",
            "schedule.warmup_steps=auto",
        )
    if isinstance(config.profiler, TorchProfiler) and config.profiler.steps > steps:
        problem = "profiler=torch needs {} steps (wait, warmup and active together), and steps={}"
        raise UserError(problem.format(config.profiler.steps, steps), f"steps={config.profiler.steps}")
    if micro_batch_size % (least := config.augment.micro_batch_multiple):
        raise UserError(
            f"micro_batch_size={micro_batch_size} must be a multiple of {least} for {config.augment.effect()}, which "
            "mixes neighbours; use another one, or another batch_size"
        )
