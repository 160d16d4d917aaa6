"""The tracker of a run: the local metric log, which is authoritative, and MLflow, which is fed from it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.errors import RunError, UserError, redacted
from trainer.files import METRICS_FILE, SUMMARY_FILE, final_status, write_json
from trainer.tracking.metric_log import MetricLog
from trainer.tracking.mlflow.addresses import explicit_uri, lasting_uri, tracking_uri, whole_uri
from trainer.tracking.mlflow.feed import Feed, how_to_send
from trainer.tracking.mlflow.record import TRACKING_FILE, RunInfo, is_delivered, read_record, reopen
from trainer.tracking.options import Tracking

log = logging.getLogger("mantissa")


class Tracker:
    """Logs the metrics of one run. Only rank 0 has one."""

    def __init__(self, config: Tracking, folder: Path, info: RunInfo, saved: int | None = None) -> None:
        """Open the log and start feeding MLflow in the background.

        Args:
            config: the ``tracking`` group.
            folder: the run's own; of a new run it has no log yet.
            info: what MLflow gets when the run begins; its ``uri`` is set here.
            saved: ``written`` when the checkpoint of a resumed run was saved; metrics logged after it are removed.
        """
        self.folder = folder
        self._config = config
        path, before = folder / METRICS_FILE, None
        if saved is not None:
            if (folder / TRACKING_FILE).exists():
                before = RunInfo.read(folder)
                info = replace(info, key=before.key, started_s=before.started_s)
            else:  # lost to a full disk
                info = replace(info, key=read_record(folder).get("key", info.key))
        uri = _store_of(config, before) if config.mlflow else None
        info = replace(info, uri=uri and lasting_uri(uri))
        if saved is not None:
            _tolerate(lambda: reopen(folder), folder)
        self._log = MetricLog(path, saved)
        _tolerate(lambda: info.write(folder), folder / TRACKING_FILE)
        self._feed: Feed | None = None
        if uri:
            self._feed = Feed(folder, uri, info, config.flush_every_s, config.system_metrics)
            self._feed.start()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of this run, as soon as MLflow has created it; it is also in ``mlflow.json``."""
        return read_record(self.folder).get("run_id") if self._feed else None

    @property
    def addresses(self) -> list[str]:
        """What MLflow has so far: ``runs:/RUN_ID``, and ``models:/MODEL_ID`` once the best weights are a model."""
        record = read_record(self.folder) if self._feed else {}
        run = [f"runs:/{record['run_id']}"] if "run_id" in record else []
        return [*run, *([record["model"]] if "model" in record else [])]

    @property
    def written(self) -> int:
        """Length of the metric log in bytes."""
        return self._log.written

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, with the time, to ``metrics.jsonl``, from which the feed uploads it.

        Args:
            step: the optimizer step of the values.
            metrics: Python numbers by name. A value that is not finite is logged as null, with ``<name>_nonfinite`` 1.

        Raises:
            RunError: the log was removed or moved away.
        """
        if not self._log.is_there():
            path = self.folder / METRICS_FILE
            raise RunError(
                f"{path} was removed or moved away while the run trained; put it back and resume, or start anew"
            )
        if "step" in metrics or "time" in metrics:
            raise ValueError("a metric cannot be called step or time: every line of metrics.jsonl has these keys")
        line = {"step": step, "time": time.time(), **countable(metrics)}
        self._log.append(json.dumps(line, allow_nan=False))

    def close(self, status: str, summary: Mapping[str, object]) -> bool:
        """Write the summary with its status (FINISHED, FAILED or KILLED) and the plots, and complete the upload.

        Neither a full disk nor MLflow makes it raise. It returns whether the summary was written.
        """
        from trainer.tracking.plots import plot_run

        there = self._log.is_there()
        self._log.close()
        content = countable({"status": status, **summary})
        path = self.folder / SUMMARY_FILE
        try:
            try:
                if there:
                    _tolerate(lambda: plot_run(self.folder), self.folder / "plots")
            finally:  # last: a run whose summary has the status FINISHED is not trained further when it is resumed
                written = there and _tolerate(lambda: write_json(path, content), path)
        finally:
            if self._feed and (missing := self._feed.conclude(status, self._config.patience_s)):
                log.warning("%s", how_to_send(self.folder, missing))
        return written

    def abandon(self) -> None:
        """Stop at once. What MLflow lacks stays in the folder, and a warning has the command that sends it."""
        self._log.close()
        if self._feed and (missing := self._feed.abandon()):
            log.warning("%s", how_to_send(self.folder, missing))


def finish_delivery(folder: Path, config: Tracking) -> None:
    """Send to MLflow what it lacks of a run that has ended, while that makes progress; warn about the rest.

    Args:
        folder: the run's; the caller holds its lock.
        config: the ``tracking`` group that the run is resumed with.
    """
    (folder / f".{SUMMARY_FILE}.partial").unlink(missing_ok=True)  # of a process that was killed at the very end
    if not config.mlflow:
        return
    try:
        info = RunInfo.read(folder)
        uri = _store_of(config, info)
    except UserError as error:
        log.warning("%s", error)
        return
    if is_delivered(folder, uri):
        return
    log.info("Sending the rest of this run to MLflow at %s.", redacted(uri))
    missing = Feed(folder, uri, info).conclude(final_status(folder) or "KILLED", config.patience_s)
    if missing:
        log.warning("%s", how_to_send(folder, missing))
    else:
        log.info("MLflow now has the complete run.")


def _store_of(config: Tracking, before: RunInfo | None) -> str:
    """Return the store of a run: the one in the config or the environment, else the one that it was sent to before."""
    named = explicit_uri(config.uri) or (before and before.uri)
    return whole_uri(named) if named else tracking_uri()


def _tolerate(write: Callable[[], object], path: Path) -> bool:
    """Write a file that the run does not depend on; if that fails, warn and return False."""
    try:
        write()
    except OSError as error:
        log.warning("%s cannot be written (%s).", path, error.strerror or error)
        return False
    return True


def countable(value: Any) -> Any:
    """Return plain values for strict JSON, which has no NaN and no infinity.

    Such a value becomes null; in a mapping, its presence becomes a count of 1, ``<key>_nonfinite``.
    """
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, item in value.items():
            result[key] = countable(item)
            if isinstance(item, float) and not math.isfinite(item):
                result[f"{key}_nonfinite"] = 1
        return result
    if isinstance(value, (list, tuple)):
        return [countable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
