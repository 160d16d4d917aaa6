"""A run that writes down what it trains on, and kills itself as planned: certify.py starts it.

python -m evidence.certificate.child <kill> <override> …        a kill is kind:step:count, or none
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
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
from trainer.run import command
from trainer.run.run import Run
from trainer.trainer import StepRecord

TRACE_FILE = "trace.jsonl"
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
    """Of ``accumulation``, ``save`` and ``evaluation``: at which forward pass, or file written, it dies; from 1.

    Of ``outside``: after so many milliseconds."""

    def text(self) -> str:
        """Return it as an argument of the command line."""
        return f"{self.kind}:{self.step}:{self.count}"


class CountingWriter(CheckpointWriter):
    """Calls ``after_flush`` after every file that it has flushed to the disk."""

    after_flush: Callable[[], None]

    def flush(self, path: Path) -> None:
        super().flush(path)
        self.after_flush()


class TracedRun(Run):
    """Appends a line to ``trace.jsonl`` for every optimizer step: what went in, and what came out, to the last bit."""

    writer_class = CountingWriter
    writer: CountingWriter
    kill: ClassVar[Kill | None] = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._trace = (self.folder.path / TRACE_FILE).open("a", encoding="utf-8")
        self._trace.write("\n")  # a kill may have cut the last line
        self._data = ""
        self._counts: Counter[str] = Counter()
        self._killer: subprocess.Popen[bytes] | None = None
        self.writer.after_flush = partial(self._count, "save")
        self.trainer.model.register_forward_pre_hook(self._before_forward)
        if self.trainer.step:
            self._note({"resumed_after": self.trainer.step})
            if self.kill is not None and self.kill.kind == "restore":
                self._die()

    def step(self, microbatches: list[Batch]) -> StepRecord:
        """Note what goes into the step, and take it."""
        digest = hashlib.sha256()
        for batch in microbatches:
            for name, tensor in sorted(batch.items()):
                digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self._data = digest.hexdigest()
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
        """Write the step's line; die here, before it is evaluated or saved, if that is planned."""
        numbers = {name: float(getattr(record, name)).hex() for name in ("loss", "grad_norm", "loss_scale", "lr")}
        skipped = bool(record.skipped)
        self._note({"step": record.step, "data": self._data, **numbers, "skipped": skipped})
        super().log(record)
        if self.kill is None:
            return
        overdue = record.step >= min(self.kill.step + PATIENCE_STEPS, self.plan.steps - 1)
        if self._due("outside", self.kill.count):
            if not self._killer:
                self._note({"killed": "outside", "after_step": record.step, "count": self.kill.count})
                command = f"sleep {self.kill.count / 1000}; kill -KILL {os.getpid()}"
                self._killer = subprocess.Popen(["sh", "-c", command])
            if overdue:
                signal.pause()  # so that the job does not end before it is killed
        elif self._due("step") or overdue or (self._due("skip") and skipped):
            self._die("step" if overdue else self.kill.kind)

    def _note(self, line: dict[str, Any]) -> None:
        self._trace.write(json.dumps(line) + "\n")
        self._trace.flush()

    def _due(self, kind: str, count: int = 0) -> bool:
        """Whether a kill of this kind, at its ``count``-th event or later, is due."""
        kill = self.kill
        return kill is not None and kill.kind == kind and self.trainer.step >= kill.step and count >= kill.count

    def _die(self, kind: str | None = None) -> None:
        assert self.kill is not None
        if threading.current_thread() is threading.main_thread() and not checkpoint.steps(self.folder.checkpoints):
            self.writer.finish()  # a job so fast that its first checkpoint is not written yet would only start again
        self._note({"killed": kind or self.kill.kind, "after_step": self.trainer.step, "count": self.kill.count})
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run the command line that follows the kill."""
    if (text := sys.argv.pop(1)) != "none":
        kind, step, count = text.split(":")
        TracedRun.kill = Kill(kind, int(step), int(count))
    return command.main(TracedRun)


if __name__ == "__main__":
    sys.exit(main())
