"""The root config: what a run is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.checkpoint.store import Checkpoint
from trainer.config.init_from import InitFrom
from trainer.config.step import StepConfig
from trainer.errors import UserError, check_folder_name, check_number, check_range, no_effect
from trainer.files import default_name
from trainer.profiling.diagnostics import Diagnostics
from trainer.profiling.profiler import Profiler
from trainer.recipe import NO_OPTION
from trainer.tracking.options import Tracking
from trainer.tracking.store import configured_uri


@dataclass
class EarlyStopping:
    """The options ``early_stopping.…``. The schedule stays that of the whole run."""

    patience: int | None = None
    """Stop after this many evaluations (epochs, if ``epochs`` is set) without improvement; null: never."""
    min_delta: float = 0.0
    """A change must exceed this, in the metric's unit, to count as an improvement."""
    metric: str | None = None
    """Metric to watch, such as ``valid/loss``; null: the one that selects the best checkpoint."""

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            key = "early_stopping.patience"
            problem = f"{key}={self.patience} must be at least 1; null turns it off"
            raise UserError(problem, f"{key}=1", f"{key}=null")
        check_range("early_stopping.min_delta", self.min_delta, "[0, inf)")
        if self.patience is None and (self.metric is not None or self.min_delta):
            name = "min_delta" if self.metric is None else "metric"
            given = f"early_stopping.{name}={getattr(self, name)}"
            raise no_effect(given, "early_stopping.patience is not set", "early_stopping.patience=5")


@dataclass
class Config(StepConfig):
    """All options of a run, in one level as on the command line: those of the steps, and of what is around them."""

    profiler: Profiler = field(default_factory=Profiler)
    """Profile of a few steps: time or memory."""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    """Rounding diagnostics during training."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When checkpoints are saved, and which are kept."""
    tracking: Tracking = field(default_factory=Tracking)
    """Where metrics and models go."""
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    """When a run ends before its last step."""
    quiet: bool = False
    """Show nothing but warnings, errors and the table of a sweep."""
    why: bool = False
    """Show the reason of every value that was chosen automatically; ``--why`` is short for it."""
    log_every: int = 10
    """Optimizer steps between two lines of logged metrics (metrics.jsonl)."""
    recipe_path: str | None = None
    """Folder with your own recipes; null: only ``recipes/``."""
    resume: str | None = None
    """Run to continue: its folder or ``mlflow:RUN_ID``; auto: the newest run of this name, or a new one; same: the run
    with this name and these options, as in sweeps; null: start a new run."""
    output_dir: str = "outputs"
    """Parent folder of all run folders."""
    run_name: str | None = None
    """Name of the run, in MLflow and as its folder; null: recipe-precision-sSEED."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags for MLflow, such as ``tags.team=vision``; one that the run sets itself is replaced."""
    note: str | None = None
    """A sentence about the run; it opens the description in MLflow."""
    source: InitFrom | None = field(default=None, metadata=NO_OPTION)
    """The weights that ``init_from`` names, with their options; None: the first weights are the recipe's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("log_every", self.log_every)
        self.diagnostics.check(self.optimizer)
        check_folder_name("run_name", self.name)
        if self.tracking.mlflow:
            configured_uri(self.tracking.uri)  # or the environment's: not in the group, whose default may not be used
        if not self.output_dir or "://" in self.output_dir:
            raise UserError(f"output_dir={self.output_dir} is no folder on this machine", "output_dir=outputs")

    @property
    def name(self) -> str:
        """The name of the run: of its folder and in MLflow."""
        return self.run_name or default_name(self.recipe.name, self.precision.mode, self.seed)
