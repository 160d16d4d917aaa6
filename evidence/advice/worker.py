"""One candidate in a fresh process, which trains blocks of steps when it is asked to."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from evidence.advice.candidates import Candidate
from evidence.memory.trial import peak_of
from evidence.runs import merged
from evidence.turns import steps_of, stopwatch
from trainer.config.compose import compose
from trainer.errors import RunError, first_line, is_out_of_memory
from trainer.trainer import Trainer

WARM_UP_S = 0.3
"""Seconds that the steps of the warm-up after the first take together, or they are two."""
END_S = 10.0
"""Seconds for the end of a process; then it is killed."""
COMPILED = "compiled"
"""Folder below the advice's for what torch.compile keeps."""


class Failed(Exception):
    """A candidate that ended with an error, whose process died, or that did not answer in time."""

    def __init__(self, reason: str, label: str, out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.label, self.out_of_memory = label, out_of_memory


class Worker:
    """The parent's side: each call waits for the answer, at most so long, and raises ``Failed``."""

    def __init__(self, candidate: Candidate, common: Sequence[str], folder: Path) -> None:
        """Start the process: a new Python, with its own places in memory, as each run of train.py is.

        Args:
            candidate: what it trains.
            common: overrides of all candidates.
            folder: for what it prints, and for what torch.compile keeps.
        """
        self._began, self._candidate = time.monotonic(), candidate
        # Each candidate compiles anew, as on a machine that sees it for the first time; a second start of it is quick.
        compiled = folder / COMPILED / hashlib.sha256(candidate.label.encode()).hexdigest()[:16]
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, merged(common, candidate.overrides), str(folder), str(compiled))
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def start(self, limit_s: float) -> tuple[float, list[float], int]:
        """Build the trainer and warm it up.

        Returns:
            Seconds from nothing to the end of the warm-up, those of each of its steps (the first ones compile), and the
            bytes of the device's memory that the process holds.
        """
        warm_up_s, held_bytes = self._ask("start", limit_s)
        return time.monotonic() - self._began, warm_up_s, held_bytes

    def block(self, steps: int, limit_s: float) -> float:
        """Return the seconds of so many optimizer steps, the device's work included."""
        return float(self._ask("block", limit_s, steps))

    def memory(self, limit_s: float) -> int:
        """Return the peak bytes allocated in a step."""
        return int(self._ask("memory", limit_s))

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()  # one that waits for a command ends by itself
        self._process.join(END_S)
        self._process.kill()
        self._process.join()
        self._process.close()

    def _ask(self, command: str, limit_s: float, *arguments: int) -> Any:
        label = self._candidate.label
        try:
            self._connection.send((command, *arguments))
            if not self._connection.poll(limit_s):
                what = "compiling" if command == "start" and self._candidate.compiles else f"its {command}"
                raise Failed(f"{what} did not end within {limit_s:.0f} s", label)
            answer, failure = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise Failed(f"its process ended with {how}", label) from None
        if failure:
            reason, out_of_memory = failure
            raise Failed(reason, label, out_of_memory)
        return answer


def serve(connection: Connection, overrides: Sequence[str], folder: str, compiled: str) -> None:
    """Answer the parent's commands with (result, failure) until it closes the pipe; a failure is (reason, memory)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    log = os.open(os.path.join(folder, "workers.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
    subject: Subject | None = None
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        try:
            subject = subject or Subject(overrides)
            connection.send((getattr(subject, command)(*arguments), None))
        except Exception as error:  # of any kind: the parent reports it, and measures the other candidates
            scarce = is_out_of_memory(error)
            kind = "out of memory" if scarce else "" if isinstance(error, RunError) else type(error).__name__
            connection.send((None, (": ".join(filter(None, (kind, first_line(error)))), scarce)))


class Subject:
    """The trainer of one candidate; it takes the steps of train.py's loop, without tracking and checkpoints."""

    def __init__(self, overrides: Sequence[str]) -> None:
        config = compose(overrides)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        # No run is that long: the data and the schedule must not end while blocks are taken.
        self.trainer = Trainer.from_config(replace(config, steps=10**7, epochs=None))
        self.block = stopwatch(steps_of(self.trainer), self.trainer.device)

    def start(self) -> tuple[list[float], int]:
        """Return the seconds of the first steps, at least two, and the bytes that the process then holds."""
        seconds = [self.block(1), self.block(1)]
        while sum(seconds[1:]) < WARM_UP_S and len(seconds) < 10:
            seconds.append(self.block(1))
        return seconds, self._held()

    def _held(self) -> int:
        device = self.trainer.device
        if self.trainer.hardware.is_gpu:
            free, total = torch.accelerator.get_memory_info(device)
            return min(total - free, torch.accelerator.memory_reserved(device) + 2**30)  # the context and its kernels
        return int(psutil.Process().memory_info().rss)

    def memory(self) -> int:
        """Return the peak bytes of one step, on a CPU not compiled."""
        return peak_of(self.trainer, lambda: self.block(1))
