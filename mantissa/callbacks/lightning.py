"""``Trainer(callbacks=[mantissa.callbacks.lightning.Precision()])``, for Lightning 2.5 by either name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from mantissa.formats import FORMATS
from mantissa.names import format_name
from mantissa.watch.passes import loss_in
from mantissa.watch.watch import Watch

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FOUND = [name for name in _PACKAGES if find_spec(name.partition(".")[0])] or _PACKAGES


class Precision(*(import_module(f"{name}.callbacks").Callback for name in _FOUND)):  # type: ignore[misc]
    """Watches the first optimizer of a training, whose ``precision`` is what is requested.

    A step is replayed by ``training_step`` of a copy of the module, which logs nothing.

    Args:
        every: optimizer steps from one that is metered to the next.
        options: of ``mantissa.Watch``; pages of a failure are written into ``mantissa`` in the root folder.
    """

    def __init__(self, every: int = 50, **options: Any) -> None:
        self._options = {"every": every} | options

    # The watch is created when the optimizer exists and the precision is known.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        folder = Path(trainer.default_root_dir) / "mantissa"
        precision = format_name(trainer.precision)
        asked = precision if precision in FORMATS else None  # such as 64-true
        options: dict[str, Any] = {"precision": asked, "folder": folder, "loss": _loss}
        self.watch = Watch(pl_module, trainer.optimizers[0], scaler, **options | self._options)
        self._steps = trainer.global_step

    # A step: batches are kept before it, gradients are seen in it, its end is said after its last batch.

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.watch.keep((batch, batch_idx))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if optimizer is self.watch.optimizer:
            self.watch.before_update()  # Lightning takes the passes inside of the optimizer's step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            loss = loss_in(outputs)
            # Lightning has divided it.
            self.watch.step(None if loss is None else loss * trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.close()


def _loss(module: Any, batch: Any) -> Tensor:
    arguments = batch[: module.training_step.__code__.co_argcount - 1]  # it may take no index
    output = module.training_step(*arguments)
    return output["loss"] if isinstance(output, dict) else output
