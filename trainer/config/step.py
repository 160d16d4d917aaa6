"""What changes the weights: the config of the trainer, and what does not fit together in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.data.contract import Datasets
from trainer.data.loader import Loader
from trainer.debug import Debug
from trainer.errors import UserError, check_number, check_range, check_seed
from trainer.hardware import Hardware, set_determinism
from trainer.metrics import check_named
from trainer.optim.ema import Ema
from trainer.optim.optimizer import Optimizer
from trainer.optim.schedule import Schedule
from trainer.optim.update import Clip
from trainer.parallel.activation import ActivationCheckpointing
from trainer.parallel.compile import Compile
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
    """All options of a ``Trainer``. It does not change: what it becomes is a ``Plan``, and then ``Settled``."""

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
    init_from: str | None = None
    """Weights to start from: the best of a run (its folder, its ``best/``, or ``mlflow:RUN_ID``), a hub id, a
    save_pretrained folder, published weights of image classifiers by name (DEFAULT), or a file of another program."""
    typed: frozenset[str] = field(default=frozenset(), metadata=NO_OPTION)
    """The keys that the user has set, or that the config was composed on; others have a default."""
    decided: tuple[Decision, ...] = field(default=(), metadata=NO_OPTION)
    """What was chosen when it was built: the precision that ``auto`` is here."""
    overrides: tuple[str, ...] = field(default=(), metadata=NO_OPTION)
    """The command line, as typed, without what is Hydra's own."""

    def __post_init__(self) -> None:
        if self.eval_every in (0, "off", "none", "never") or self.eval_samples == 0:
            alone = "for no other, of one sample"
            problem = f"a run ends with an evaluation, which chooses the best weights; {alone}"
            raise UserError(problem, "eval_every=1000000 eval_samples=1")
        for key in _AUTO_FIELDS:
            if key != "eval_every" or self.eval_every != EPOCH:
                check_number(key, getattr(self, key))
        if self.epochs is not None and self.steps != "auto":
            one, other = f"epochs={self.epochs:g}", f"steps={self.steps}"
            raise UserError(f"{one} and {other} both set the length", other, one, mistake=f"{one} {other}")
        if self.epochs is not None:
            check_range("epochs", self.epochs, "(0, inf)")
        if self.threads is not None and self.threads < 1:
            typed = f"threads={self.threads}"
            raise UserError(f"{typed} must be at least 1; without it there is one per core", "", mistake=typed)
        check_seed(self.seed)
        self.recipe.check_complete()
        check_named(self.metrics or [])
        self.precision.check_phases(self._check_precision)
        self.optimizer.check(self.parallel.kind, self.precision.format)
        self.augment.check(self.recipe, self.data)

    def _check_precision(self, precision: Precision) -> None:
        """Check what depends on the mode."""
        self.scaler.check(precision.format)
        precision.check_operators()
        self.parallel.check(precision)
        self.compile.check(precision.format)

    def set_up(self) -> None:
        """Set torch up in this process: number formats, attention, determinism. ``use_kernels`` follows."""
        self.precision.apply()
        allow_cudnn_attention(not self.recipe.masks_attention)
        set_determinism(self.deterministic)

    def use_kernels(self, hardware: Hardware, convolves: bool) -> None:
        """Choose how this process multiplies 16-bit operands of a model, see ``kernels.choose``.

        Those of a later mode, too: while kernels are replaced no other thread may compute, and one loads batches.
        """
        for phase in self.precision.phases:
            if phase.half is not None:
                kernels.use(phase.half, kernels.choose(phase.half, phase.kernels, hardware, convolves))

    def open_datasets(self) -> Datasets:
        """Return the recipe's training and validation samples.

        Raises:
            UserError: the data cannot be had, or does not suit the recipe.
        """
        datasets: Datasets = self.recipe.returned("datasets", self.recipe.datasets(self.data, self.seed), Datasets)
        return datasets
