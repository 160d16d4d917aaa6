"""``Trainer(..., callbacks=[mantissa.callbacks.transformers.Precision()])``, for transformers 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mantissa.watch.watch import Watch


class Precision(TrainerCallback):
    """Watches a training, whose arguments (``bf16``, ``fp16``, ``tf32``) say what is requested.

    Args:
        every: optimizer steps from one that is metered to the next.
        options: of ``mantissa.Watch``; pages of a failure are written into ``mantissa`` in the output folder.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        self._options = {"every": every} | options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        precision = next((name for name in ("bf16", "fp16", "tf32") if getattr(args, name)), "fp32")
        options: dict[str, Any] = {"precision": precision, "folder": Path(args.output_dir) / "mantissa"}
        self.watch = Watch(kwargs["model"], kwargs["optimizer"], **options | self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.close()
