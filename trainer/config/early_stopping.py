"""Early stopping: end training when a validation metric no longer improves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import UserError


@dataclass
class EarlyStopping:
    """The options ``early_stopping.…``. The schedule stays that of the whole run."""

    patience: int | None = None
    """Evaluations without an improvement after which training ends; None: it never ends early."""
    min_delta: float = 0.0
    """What counts as an improvement: a change by more than this, in the metric's unit."""
    metric: str | None = None
    """Such as ``valid/loss``; None: the metric that marks the best checkpoint."""

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise UserError(f"early_stopping.patience={self.patience} must be at least 1; null turns it off")
        if not (self.min_delta >= 0 and math.isfinite(self.min_delta)):
            raise UserError(f"early_stopping.min_delta={self.min_delta} must be a number of at least 0")
        if self.patience is None and (self.metric is not None or self.min_delta):
            key = "min_delta" if self.metric is None else "metric"
            raise UserError(f"early_stopping.{key} has no effect alone; also set early_stopping.patience=5")
