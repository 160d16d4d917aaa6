"""The metric log of a run, ``metrics.jsonl``, which is authoritative, and MLflow, which follows it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from trainer.errors import RunError, first_line
from trainer.files import METRICS_FILE, SUMMARY_FILE, TRACKING_FILE, read_json_lines, write_json, write_text
from trainer.tracking.follower import Follower
from trainer.tracking.options import Tracking
from trainer.tracking.store import configured_uri, store_uri
from trainer.tracking.tracked_run import TrackedRun

log = logging.getLogger("mantissa")


class MetricLog:
    """Appends the metrics of one run to ``metrics.jsonl``: a line for each step, with ``step`` and ``time``.

    If the disk is full, lines are kept in memory and tried again with the next one. Only rank 0 has a log.

    Args:
        config: the ``tracking`` group.
        folder: of the run; that of a new run has no log yet.
        run: what MLflow gets when the run begins.
    """

    _file: FileIO

    def __init__(self, config: Tracking, folder: Path, run: TrackedRun) -> None:
        self.config = config
        self.folder = folder
        self.run = run
        self._unwritten = bytearray()
        self._warned = False
        self._follower: Follower | None = None

    def begin(self, resumed_at: int | None = None) -> None:
        """Open the log, and prepare the thread that sends it to MLflow.

        Args:
            resumed_at: the step of the checkpoint that a run continues from; what was logged after it is removed. None:
                a new run.
        """
        config, folder = self.config, self.folder
        path = folder / METRICS_FILE

        # Of a resumed run, what follows its checkpoint comes again.
        if resumed_at is not None:
            earlier = None
            if (folder / TRACKING_FILE).exists():  # else it was lost to a full disk
                earlier = TrackedRun.read(folder)
                if config.mlflow and earlier.is_copied_to(folder):
                    log.info("%s is a copy of %s: in MLflow it is a run of its own", folder, earlier.folder)
                    earlier = None
            if (last := _cut(path, resumed_at)) and config.mlflow and earlier:
                steps = f"{resumed_at + 1} to {last}"
                log.info("MLflow cannot replace points: of steps %s it keeps what it has from before the resume", steps)
                self.run.tags["kept_on_resume"] = f"points of steps {steps} from before the resume"
            if earlier:
                self.run = earlier.resumed_as(self.run)
            _tolerate(lambda: (folder / SUMMARY_FILE).unlink(missing_ok=True), folder / SUMMARY_FILE)

        # The file is the truth. What MLflow gets of it, and where, is known before the first line is.
        self._file = path.open("ab", buffering=0)
        if config.mlflow:
            uri = store_uri(configured_uri(config.uri), self.run.uri)
            self.run.send_to(uri)
            self._follower = Follower(folder, uri, self.run, config.flush_every_s, config.system_metrics)
        _tolerate(lambda: self.run.write(folder), folder / TRACKING_FILE)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Args:
            step: the optimizer step of the values.
            metrics: Python numbers by name. A value that is not finite is logged as null, with ``<name>_nonfinite`` 1.

        Raises:
            RunError: the log was removed or moved away.
        """
        if not (path := self.folder / METRICS_FILE).exists():
            raise RunError(
                f"{path} was removed or moved away while the run trained; put it back and resume, or start anew"
            )
        # A line of the file; from the first one on, a thread reads them and sends them to MLflow.
        line = {"step": step, "time": time.time(), **strict_json(metrics)}
        self._unwritten += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._write()
        self._start_follower()

    def close(self, status: str, summary: Mapping[str, object]) -> bool:
        """Write the summary with its status (FINISHED, FAILED or KILLED) and the plots, and complete the upload.

        Neither a full disk nor MLflow makes it raise.

        Returns:
            Whether the summary was written.
        """
        from trainer.tracking.plots import plot_run

        self._close_file()
        path = self.folder / SUMMARY_FILE
        try:
            try:
                _tolerate(lambda: plot_run(self.folder), self.folder / "plots")
            finally:  # last: a run whose summary has the status FINISHED is not trained further when it is resumed
                written = _tolerate(lambda: write_json(path, strict_json({"status": status, **summary})), path)
        finally:
            if self._follower:
                self._start_follower()
                self._follower.conclude(status, self.config.upload_timeout_s)
        return written

    def abandon(self) -> None:
        """Stop at once. What MLflow lacks stays in the folder, and a warning has the command that sends it."""
        self._close_file()
        if self._follower:
            self._follower.abandon()

    def _start_follower(self) -> None:
        """Let MLflow get the log from its first line on: the import of MLflow would more than double the first step."""
        if self._follower and self._follower.ident is None:
            self._follower.start()

    def _write(self) -> None:
        try:
            while self._unwritten:
                count = self._file.write(self._unwritten)  # on a nearly full disk, only a part
                del self._unwritten[:count]
        except OSError as error:
            if not self._warned:
                kept = "Training continues; the metrics are kept in memory."
                log.warning("%s cannot be written (%s). %s", self._file.name, error.strerror, kept)
            self._warned = True

    def _close_file(self) -> None:
        if self._file.closed:
            return
        self._write()
        with suppress(OSError):
            self._file.close()
        if lines := self._unwritten.count(b"\n"):
            log.warning("%s could not be written completely: its last %d lines are lost.", self._file.name, lines)


def _cut(path: Path, step: int) -> int:
    """Remove the lines of later steps from a metric log, and return the last of these steps; 0: there are none."""
    lines = list(read_json_lines(path))
    kept = [line for line in lines if line["step"] <= step]
    if path.exists():  # what a killed process wrote in part goes, too
        write_text(path, "".join(f"{json.dumps(line)}\n" for line in kept))
    return max((line["step"] for line in lines if line["step"] > step), default=0)


def _tolerate(write: Callable[[], object], path: Path) -> bool:
    """Write a file that the run does not depend on; if that fails, warn and return False."""
    try:
        write()
    except (OSError, ValueError) as error:  # the latter of a plot that cannot be drawn
        log.warning("%s cannot be written (%s).", path, getattr(error, "strerror", None) or first_line(error))
        return False
    return True


def strict_json(value: Any) -> Any:
    """Return plain values for strict JSON, which has no NaN and no infinity.

    Such a value becomes null; in a mapping, its presence becomes a count of 1, ``<key>_nonfinite``.
    """
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, item in value.items():
            result[key] = strict_json(item)
            if isinstance(item, float) and not math.isfinite(item):
                result[f"{key}_nonfinite"] = 1
        return result
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
