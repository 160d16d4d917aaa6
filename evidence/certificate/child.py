"""A run that writes down what it trains on, and kills itself where it was told to: certify.py starts it.

python -m evidence.certificate.child <kill> <override> …        a kill is kind:step:count, or none
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer import cli
from trainer.checkpoint import store as checkpoint
from trainer.data.contract import Batch, SampleId
from trainer.data.loader import DataOrder
from trainer.files import flush
from trainer.recipe import LossOutput
from trainer.run.run import Run
from trainer.run.shortage import out_of_memory
from trainer.trainer import StepRecord

TRACE_FILE = "trace.jsonl"
PATIENCE_STEPS = 8
"""How many steps a kill waits for its moment (a skipped step, a save); then it comes at once."""


class TracedOrder(DataOrder):
    """The data order, which also keeps what it has handed out."""

    def __init__(self, order: DataOrder) -> None:
        super().__init__(order.length, order.seed)
        self.handed_out: list[list[SampleId]] = []

    def batches(self, first: int, size: int, count: int) -> Iterator[list[SampleId]]:
        """Yield as before; the loader asks for one list at a time, in the order of training."""
        for samples in super().batches(first, size, count):
            self.handed_out.append(samples)
            yield samples


class TracedRun(Run):
    """Appends a line to ``trace.jsonl`` for every optimizer step: what went in, and what came out, to the last bit."""

    kill: ClassVar[tuple[str, int, int] | None] = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        trainer = self.trainer
        self._trace = (self.folder.path / TRACE_FILE).open("a", encoding="utf-8")
        self._line: dict[str, Any] = {}
        self._backwards = self._evaluated = 0
        trainer.order = self._order = TracedOrder(trainer.order)
        self._backward, self._loss = trainer.update.backward, trainer.recipe.loss
        trainer.update.backward = self._traced_backward  # type: ignore[method-assign]
        trainer.recipe.loss = self._traced_loss  # type: ignore[method-assign]
        if self.kill is not None and self.kill[0] == "save":
            checkpoint.flush = self._traced_flush
        self._flushes = 0
        if self.trainer.step:
            self._note({"resumed_after": self.trainer.step})
        if self.kill is not None and self.kill[0] == "restore" and self.trainer.step:
            self._die()

    def step(self, microbatches: list[Batch]) -> StepRecord:
        """Note what goes into the step, and take it."""
        batching = self.plan.batching
        in_a_step = batching.accumulation * batching.ranks
        own = self._order.handed_out[:in_a_step][batching.rank :: batching.ranks]
        del self._order.handed_out[:in_a_step]
        digest = hashlib.sha256()
        for batch in microbatches:
            for name, tensor in sorted(batch.items()):
                digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self._line = {"samples": own, "data": digest.hexdigest()}
        self._backwards = 0
        return super().step(microbatches)

    def _traced_backward(self, loss: Tensor, exchanged: bool = False) -> None:
        self._backward(loss, exchanged)
        self._backwards += 1
        if self._due("accumulation") and self._backwards == self.kill[2]:  # type: ignore[index]
            self._die()

    def _traced_loss(self, model: torch.nn.Module, batch: Batch) -> LossOutput:
        self._evaluated = 0 if model.training else self._evaluated + 1
        if self._evaluated == 2 and self._due("evaluation"):
            self._die()
        return self._loss(model, batch)

    def _traced_flush(self, path: Path) -> None:
        flush(path)
        self._flushes += 1
        if self._flushes >= self.kill[2] and self._due("save"):  # type: ignore[index]
            self._die()

    def log(self, record: StepRecord) -> None:
        """Write the step's line; die here, before it is evaluated or saved, if told to."""
        numbers = {name: float(getattr(record, name)).hex() for name in ("loss", "grad_norm", "loss_scale", "lr")}
        line = {"step": record.step, **self._line, **numbers, "skipped": bool(record.skipped)}
        self._note(line)
        super().log(record)
        if self.kill is None:
            return
        overdue = record.step >= min(self.kill[1] + PATIENCE_STEPS, self.plan.steps - 1)
        if overdue and self.kill[0] == "outside":
            signal.pause()  # so that the job does not end before it is killed
        if self._due("step") or overdue or (self._due("skip") and line["skipped"]):
            self._die("step" if overdue else self.kill[0])

    def _note(self, line: dict[str, Any]) -> None:
        self._trace.write(json.dumps(line) + "\n")
        self._trace.flush()

    def _due(self, kind: str) -> bool:
        return self.kill is not None and self.kill[0] == kind and self.trainer.step >= self.kill[1]

    def _die(self, kind: str | None = None) -> None:
        assert self.kill is not None
        if threading.current_thread() is threading.main_thread() and not checkpoint.steps(self.folder.checkpoints):
            self.saver.finish()  # a job so fast that its first checkpoint is not written yet would only start again
        count = self.kill[2]
        self._note({"killed": kind or self.kill[0], "after_step": self.trainer.step, "count": count})
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run the command line that follows the kill."""
    kill = sys.argv.pop(1)
    if kill != "none":
        kind, step, count = kill.split(":")
        TracedRun.kill = (kind, int(step), int(count))
    return cli.main(out_of_memory, TracedRun)


if __name__ == "__main__":
    sys.exit(main())
