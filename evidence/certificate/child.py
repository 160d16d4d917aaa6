"""A run that writes down what it trains on, and kills itself as planned: certify.py starts it.

python -m evidence.certificate.child <kill> <override> …        a kill is kind:step:count, or none
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainer.checkpoint import store as checkpoint
from trainer.checkpoint.writer import CheckpointWriter
from trainer.data.contract import Batch
from trainer.files import METRICS_FILE, read_json_lines, write_json
from trainer.run import command
from trainer.run.run import Run
from trainer.trainer import StepRecord

METRICS_LEFT = "metrics.json"
"""What a run that ends leaves of its metric log: all but times and memory."""
_CLOCKS = ("time", "step_time_s", "mfu", "memory_bytes", "checkpoint_stall_s")
PATIENCE_STEPS = 8
"""How many steps a kill waits for its moment (a skipped step, a save); then it comes at once."""


@dataclass(frozen=True)
class Kill:
    """When a run kills itself."""

    kind: str
    """A key of ``certify.KINDS_OF_KILL``."""
    step: int
    """From which step on."""
    count: int
    """Of ``accumulation``, ``save`` and ``evaluation``: at which forward pass, or file written, it dies; from 1."""

    def text(self) -> str:
        """Return it as an argument of the command line."""
        return f"{self.kind}:{self.step}:{self.count}"


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metric log without times and memory, which differ between equal runs."""
    return [
        {key: value for key, value in line.items() if key not in _CLOCKS and not key.endswith("_per_s")}
        for line in read_json_lines(run / METRICS_FILE)
    ]


class CountingWriter(CheckpointWriter):
    """Calls ``after_flush`` after every file that it has flushed to the disk."""

    after_flush: Callable[[], None]

    def flush(self, path: Path) -> None:
        super().flush(path)
        self.after_flush()


class TracedRun(Run):
    """Prints two lines for every optimizer step: what went in, and what came out, to the last bit."""

    writer_class = CountingWriter
    writer: CountingWriter
    kill: ClassVar[Kill | None] = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counts: Counter[str] = Counter()
        self.writer.after_flush = partial(self._count, "save")
        self.trainer.model.register_forward_pre_hook(self._before_forward)
        if self.trainer.step and self.kill is not None and self.kill.kind == "restore":
            self._die()

    def step(self, microbatches: list[Batch]) -> StepRecord:
        """Print what goes into the step, and take it."""
        digest = hashlib.sha256()
        for batch in microbatches:
            for name, tensor in sorted(batch.items()):
                digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        print(f"traced step {self.trainer.step + 1} data {digest.hexdigest()}", flush=True)
        self._counts["accumulation"] = self._counts["evaluation"] = 0
        return super().step(microbatches)

    def _before_forward(self, model: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._count("accumulation" if model.training else "evaluation")

    def _count(self, kind: str) -> None:
        """Count an event at which a kill of this kind may be due."""
        self._counts[kind] += 1
        if self._due(kind, self._counts[kind]):
            self._die()

    def log(self, record: StepRecord) -> None:
        """Print the step's line; die here, before it is evaluated or saved, if that is planned."""
        numbers = {name: float(getattr(record, name)).hex() for name in ("loss", "grad_norm", "loss_scale", "lr")}
        skipped = bool(record.skipped)
        print(f"traced step {record.step}: {json.dumps(numbers | {'skipped': skipped})}", flush=True)
        super().log(record)
        if self.kill is None:
            return
        overdue = record.step >= min(self.kill.step + PATIENCE_STEPS, self.plan.steps - 1)
        if self._due("step") or overdue or (self._due("skip") and skipped):
            self._die("step" if overdue else self.kill.kind)

    def train(self) -> dict[str, Any]:
        """Train, and leave the metric log without what differs between equal runs."""
        summary = super().train()
        write_json(self.folder.path / METRICS_LEFT, metrics(self.folder.path))
        return summary

    def _due(self, kind: str, count: int = 0) -> bool:
        """Whether a kill of this kind, at its ``count``-th event or later, is due."""
        kill = self.kill
        return kill is not None and kill.kind == kind and self.trainer.step >= kill.step and count >= kill.count

    def _die(self, kind: str | None = None) -> None:
        assert self.kill is not None
        if threading.current_thread() is threading.main_thread() and not checkpoint.steps(self.folder.checkpoints):
            self.writer.finish()  # a job so fast that its first checkpoint is not written yet would only start again
        print(f"killed: {kind or self.kill.kind}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run the command line that follows the kill."""
    if (text := sys.argv.pop(1)) != "none":
        kind, step, count = text.split(":")
        TracedRun.kill = Kill(kind, int(step), int(count))
    return command.main(TracedRun)


if __name__ == "__main__":
    sys.exit(main())
