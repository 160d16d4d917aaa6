"""What changes the weights: the config of the trainer, and what does not fit together in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Generic, Self, TypeVar

from trainer.data.contract import Datasets
from trainer.data.loader import Batching, Loader
from trainer.debug import Debug
from trainer.errors import UserError, check_number, check_range
from trainer.hardware import Hardware, set_determinism
from trainer.metrics import check_named
from trainer.optim.ema import Ema
from trainer.optim.optimizer import Optimizer
from trainer.optim.schedule import Schedule
from trainer.optim.update import Clip
from trainer.parallel.activation import ActivationCheckpointing
from trainer.parallel.compile import Compile
from trainer.parallel.world import World
from trainer.parallel.wrap import Parallel
from trainer.precision import kernels
from trainer.precision.modes import Precision, allow_cudnn_attention
from trainer.precision.scaler import Scaler
from trainer.recipe import NO_OPTION, Augment, DataSource, Decision, Recipe

_AUTO_FIELDS = ("steps", "batch_size", "micro_batch_size", "eval_every", "eval_samples")
EPOCH = "epoch"
"""The value of ``eval_every`` with which the validation data is evaluated after each pass over the training data."""


@dataclass
class StepConfig:
    """All options of a ``Trainer``. It does not change: ``plan`` returns what it becomes."""

    recipe: Recipe
    """What is trained: model, loss and metrics."""
    data: DataSource
    """What it is trained on."""
    augment: Augment = field(default_factory=Augment)
    """Random augmentation of training images."""
    precision: Precision = field(default_factory=Precision)
    """The number formats of weights, arithmetic and optimizer state."""
    scaler: Scaler = field(default_factory=Scaler)
    """Loss scaling, which keeps fp16 gradients from underflowing."""
    clip: Clip = field(default_factory=Clip)
    """Gradient clipping."""
    loader: Loader = field(default_factory=Loader)
    """How batches are loaded and copied to the device."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer and its learning rate."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning-rate schedule."""
    ema: Ema = field(default_factory=Ema)
    """Moving average of the weights, which is evaluated and exported in their place."""
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    """What the backward pass recomputes to save memory."""
    compile: Compile = field(default_factory=Compile)
    """Whether torch.compile compiles the model's forward and backward."""
    parallel: Parallel = field(default_factory=Parallel)
    """One process, or several with DDP or FSDP2."""
    debug: Debug = field(default_factory=Debug)
    """Short runs for debugging."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or mps; auto: the GPU, else the CPU."""
    threads: int | None = None
    """CPU threads of torch's operators; null: torch's default, OMP_NUM_THREADS or one per core."""
    seed: int = 0
    """Random seed of initial weights, data order, augmentation and dropout."""
    steps: int | str = "auto"
    """Optimizer steps to train; auto: the recipe's default for the device."""
    epochs: float | None = None
    """Passes over the training data, such as 3 or 0.5, instead of ``steps``."""
    batch_size: int | str = "auto"
    """Global batch size: samples per optimizer step, over all processes; auto: the recipe's default for the device."""
    micro_batch_size: int | str = "auto"
    """Samples per forward pass and process; gradients accumulate up to ``batch_size``. auto: the recipe's default for
    the device, halved where that needs too much memory (on GPUs in one process only)."""
    eval_every: int | str = "auto"
    """Optimizer steps between evaluations, or ``epoch``; auto: ``epoch`` if ``epochs`` is set, else a tenth of the run,
    but at least 25."""
    eval_samples: int | str = "auto"
    """Maximum number of validation samples per evaluation; auto: all of them after an epoch, else ten training
    batches."""
    metrics: list[str] | None = None
    """Additional metrics for classifiers: ``[f1_macro,auroc,ece]``; docs/configure.md lists all names."""
    freeze: list[str] | None = None
    """Parameters or modules to freeze, by name or pattern: ``[layer1, "*.bn1", wte]``."""
    deterministic: bool = False
    """Bitwise reproducible results on the same hardware; some operations are slower."""
    source: Any = field(default=None, metadata=NO_OPTION)
    """The run that the first weights come from, see ``init_from``; None: they are the recipe's."""
    preset: tuple[Decision, ...] = field(default=(), metadata=NO_OPTION)
    """What was chosen while the config was composed."""

    def __post_init__(self) -> None:
        if self.eval_every in (0, "off", "none", "never") or self.eval_samples == 0:
            alone = "for no other, of one sample, set eval_every=1000000 eval_samples=1"
            raise UserError(f"a run ends with an evaluation, which chooses the best weights; {alone}")
        for key in _AUTO_FIELDS:
            if key != "eval_every" or self.eval_every != EPOCH:
                check_number(key, getattr(self, key))
        if self.epochs is not None and self.steps != "auto":
            raise UserError(f"epochs={self.epochs:g} and steps={self.steps} both set the length; set only one of them")
        if self.epochs is not None:
            check_range("epochs", self.epochs, "(0, inf)")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads={self.threads} must be at least 1; leave it out for one per core")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} must lie between 0 and 4294967295")
        self.recipe.check_complete()
        check_named(self.metrics or [])
        self.scaler.check(self.precision.format)
        self.precision.check_operators()
        self.parallel.check(self.precision)
        self.optimizer.check(self.parallel.kind, self.precision.format)
        self.data.augmented(self.augment)  # refuses what has no effect
        self.augment.check(self.recipe)

    def set_up(self, hardware: Hardware, convolves: bool = False) -> str:
        """Set torch up in this process, and return how 16-bit operands are multiplied, see ``kernels.choose``."""
        chosen = kernels.choose(self.precision.half, self.precision.kernels, hardware, convolves)
        self.precision.apply(chosen)
        allow_cudnn_attention(not self.recipe.masks_attention)
        set_determinism(self.deterministic)
        return chosen

    def open_datasets(self) -> Datasets:
        """Return the recipe's training and validation samples.

        Raises:
            UserError: the data cannot be had, or does not suit the recipe.
        """
        return self.recipe.datasets(self.data.augmented(self.augment), self.seed)

    def with_data(self, datasets: Datasets, hardware: Hardware) -> tuple[Self, list[Decision]]:
        """Return the config with the ``auto`` values that depend on the data resolved, and the decisions to report."""
        workers = self.loader.processes(datasets.decodes, hardware)
        augment, decisions = self.augment.data_decisions(datasets)
        config = replace(self, loader=replace(self.loader, workers=workers), augment=augment)
        return config, [*self.recipe.data_decisions(datasets), *decisions]

    def plan(self, hardware: Hardware, world: World | None = None) -> Plan[Self]:
        """Return what ``auto`` becomes on the hardware, and check that all fits together; without ``world``, alone.

        Raises:
            UserError: a precision this hardware lacks, a batch that does not divide, data the recipe cannot use.
        """
        self.precision.check(hardware)
        recipe, chosen = self.recipe.resolve(hardware, self.data)
        world = world or World()
        decisions = [*self.preset, *chosen]
        sizes = world.run_on_main(lambda: recipe.sizes(hardware))  # which may measure
        numbers: dict[str, Any] = {}

        def number(key: str, auto: int, why: str) -> int:
            typed = getattr(self, key)
            if typed == "auto":
                decisions.append(Decision(key, auto, why))
            value: int = auto if typed == "auto" else typed
            check_number(key, value)
            numbers[key] = value
            return value

        default = sizes.why or f"the recipe's own for a {'GPU' if hardware.is_gpu else 'CPU'}"
        opened, auto, why, epoch = None, sizes.steps, default, Fraction(0)
        if self.epochs is not None or self.eval_every == EPOCH:
            opened = world.main_first(replace(self, recipe=recipe).open_datasets)
            samples, typed = len(opened.train), self.batch_size
            epoch = Fraction(samples, typed if isinstance(typed, int) else sizes.batch_size)
        if self.epochs is not None:
            auto, why = math.ceil(Fraction(str(self.epochs)) * epoch), f"epochs={self.epochs:g} of {samples:,} samples"
        steps = number("steps", auto, why)
        if self.schedule.warmup(steps) >= max(2, steps):
            raise UserError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} must be less than steps={steps}; "
                "use schedule.warmup_steps=auto or a longer run"
            )
        batch_size = number("batch_size", sizes.batch_size, default)
        most = min(batch_size, sizes.micro_batch_size)
        least = self.augment.micro_batch_multiple
        fitting = max((s for s in range(least, most + 1, least) if batch_size % (s * world.size) == 0), default=1)
        micro_batch_size = number("micro_batch_size", fitting, default)
        if micro_batch_size % least:
            raise UserError(
                f"micro_batch_size={micro_batch_size} must be a multiple of {least} for {self.augment.effect()}, which "
                "mixes neighbours; use another one, or another batch_size"
            )
        tenth = max(steps // 10, min(steps, 25))
        if self.eval_every == EPOCH or (self.eval_every == "auto" and self.epochs is not None):
            eval_every, numbers["eval_every"] = epoch, EPOCH
            decisions += [Decision("eval_every", EPOCH, "as epochs is set")] if self.eval_every == "auto" else []
        else:
            eval_every = Fraction(number("eval_every", tenth, "at most ten evaluations per run"))
        few, every = (10 * batch_size, "at most ten training batches"), numbers["eval_every"]
        number("eval_samples", *((len(opened.valid), "all") if opened and every == EPOCH else few))
        return Plan(
            config=replace(self, recipe=recipe, epochs=None, **numbers),
            batching=Batching(batch_size, micro_batch_size, world.size, world.rank),
            eval_every=eval_every,
            save_every=tenth if epoch else None,
            decisions=tuple(decisions),
            opened=opened,
        )


Config = TypeVar("Config", bound=StepConfig)


@dataclass(frozen=True)
class Plan(Generic[Config]):
    """What a config becomes on some hardware."""

    config: Config
    """The same with values in the place of ``auto``, as it is recorded."""
    batching: Batching
    eval_every: Fraction
    """Optimizer steps between two evaluations; an epoch need not be a whole number of them."""
    save_every: int | None = None
    """Optimizer steps between two checkpoints where epochs may be long; None: one at every evaluation is enough."""
    decisions: tuple[Decision, ...] = ()
    """What was chosen, to be shown."""
    opened: Datasets | None = None
    """The data, where it had to be opened to count the steps of ``epochs``."""

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

    def with_micro_batch_size(self, size: int, why: str) -> Self:
        """Return it with another micro_batch_size."""
        key = "micro_batch_size"
        others = [each for each in self.decisions if each.key != key]
        return replace(
            self,
            config=replace(self.config, micro_batch_size=size),
            batching=replace(self.batching, micro_batch_size=size),
            decisions=(*others, Decision(key, size, why)),
        )
