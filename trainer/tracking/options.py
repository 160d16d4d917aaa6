"""The ``tracking`` config group."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import UserError, check_choice, check_range, no_effect


@dataclass
class Tracking:
    """The ``tracking`` config group: whether MLflow gets the run, where it is, and how often metrics are sent."""

    mlflow: bool = True
    """Send metrics, models and checkpoints to MLflow."""
    uri: str | None = None
    """Tracking URI; null: the environment variable ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the current
    folder."""
    experiment: str | None = None
    """Experiment in MLflow; null: the environment variable ``MLFLOW_EXPERIMENT_NAME``, else the recipe's name."""
    system_metrics: bool = False
    """Let MLflow sample CPU, memory and GPU use every 5 s; its page of a run begins with them."""
    flush_every_s: float = 5.0
    """Seconds between uploads of new metrics."""
    upload_timeout_s: float = 30.0
    """Seconds that a finished run waits for an upload that makes no progress; 60 more for a new SQLite file."""
    checkpoints: str = "auto"
    """Checkpoints that MLflow gets: ``last`` (the newest and the best, at the end), ``all`` (each as it is saved) or
    ``none``; auto: ``last``, but none with ``checkpoint.keep=0``, or where a store on this machine could only get
    copies, on another file system."""
    register: str | None = None
    """Registered model that gets the best weights as a new version; null: none."""

    def __post_init__(self) -> None:
        check_range("tracking.flush_every_s", self.flush_every_s, "(0, inf)")
        check_range("tracking.upload_timeout_s", self.upload_timeout_s, "[0, inf)")
        check_choice("tracking.checkpoints", self.checkpoints, ("auto", "last", "all", "none"))
        if self.register is not None and (not self.register or set(self.register) & set("/:")):
            raise UserError(
                f"tracking.register={self.register} must be a name without slash and colon, such as my-model"
            )
        if self.register and not self.mlflow:
            raise no_effect(f"tracking.register={self.register}", "tracking=local sends nothing", "tracking=mlflow")
