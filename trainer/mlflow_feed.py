"""MLflow, fed from the metric log by a background thread that training never waits for."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import write_json
from trainer.mlflow_store import (
    connect,
    create_run,
    cut,
    find_run,
    import_mlflow,
    valid_key,
    without_password,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

RECORD_FILE = "mlflow.json"
MAX_BACKOFF_S = 60.0
LAST_ATTEMPTS = 3
"""How often the end of a run is tried on an MLflow that answers with errors."""
UPLOAD_BYTES_PER_S = 1e6
"""The slowest upload of an artifact that still counts as progress."""
SYSTEM_METRICS_EVERY_S = 5.0
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class RunInfo:
    """What MLflow is told about a run when it begins."""

    experiment: str
    name: str
    params: dict[str, object]
    tags: dict[str, str]
    run_id: str | None
    """Of the MLflow run to go on with; None: a new one."""


def read_run_record(folder: Path) -> dict[str, str]:
    """Return ``run_id``, ``experiment_id`` and ``tracking_uri`` from a run's ``mlflow.json``, if any."""
    path = folder / RECORD_FILE
    record: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


class Feed(threading.Thread):
    """Sends a run to MLflow: the metric log as it grows, and at the end the artifacts and the status.

    The log file is the only queue. So a slow store costs no memory, and a resumed run sends what the store
    lacks by reading the log from its beginning.
    """

    def __init__(self, uri: str, run: RunInfo, metrics_file: Path, flush_every_s: float, system_metrics: bool) -> None:
        super().__init__(name="mlflow-feed", daemon=True)
        self.run_id: str | None = None
        self._uri = uri
        self._run = run
        self._path = metrics_file
        self._started_s = time.time()
        self._flush_every_s = flush_every_s
        self._client: MlflowClient | None = None
        self._monitor: Any = None
        self._system_metrics = system_metrics
        self._offset = 0
        self._pending: list[Any] = []
        self._delivered: dict[str, int] = {}
        self._ending = threading.Event()
        self._abandoned = False
        self._deadline = 0.0
        self._patience_s = 0.0
        self._status = ""
        self._artifacts: list[tuple[Path, str | None]] = []
        self._problem: Exception | None = None

    def conclude(self, status: str, artifacts: Sequence[Path | tuple[Path, str]], patience_s: float) -> str | None:
        """Deliver the rest of the run; wait while there is progress, at most ``patience_s`` without.

        Returns:
            What MLflow did not take, for the user; None: nothing.

        """
        self._status = status
        self._artifacts = [(item, None) if isinstance(item, Path) else item for item in artifacts]
        self._patience_s = patience_s
        self._deadline = time.monotonic() + patience_s
        self._ending.set()
        while self.is_alive() and time.monotonic() < self._deadline:
            self.join(0.1)
        if not self.is_alive() and self._problem is None:
            return None
        self._abandoned = True
        reason = _first_line(self._problem) if self._problem else f"no answer within {patience_s:g} s"
        return f"MLflow at {without_password(self._uri)} did not take {self._missing()} ({reason})"

    def run(self) -> None:
        """Try, and try again, until everything is delivered or nobody waits any more."""
        failures = last_failures = 0
        while not self._abandoned:
            ending = self._ending.is_set()
            try:
                self._advance(ending)
                if failures >= 2:
                    log.info("MLflow at %s answers again.", without_password(self._uri))
                failures, self._problem = 0, None
                if ending:
                    return
            except Exception as error:  # whatever goes wrong with MLflow, training goes on
                self._problem = error
                failures += 1
                last_failures += ending
                if failures == 2 and not ending:
                    log.warning(
                        "MLflow at %s does not take this run yet: %s. Training goes on; %s has the metrics.",
                        without_password(self._uri),
                        _first_line(error),
                        self._path,
                    )
                if last_failures >= LAST_ATTEMPTS:
                    return
            if self._ending.is_set():
                time.sleep(min(last_failures, 2))
            else:
                self._ending.wait(min(self._flush_every_s * 2**failures, MAX_BACKOFF_S))

    def _advance(self, ending: bool) -> None:
        if self._client is None:
            self._client = self._open()
        client, run_id = self._client, self.run_id
        assert run_id
        self._deliver(client, run_id)
        if self._system_metrics and not ending:
            if self._problem:
                self._stop_monitor()  # an outage has ended it
            self._monitor = self._monitor or self._start_monitor(run_id)
        if not ending:
            return
        self._stop_monitor()
        try:
            self._upload(client, run_id)
        finally:  # an artifact that cannot be kept is no reason to call the run unfinished
            client.set_terminated(run_id, self._status)

    def _upload(self, client: MlflowClient, run_id: str) -> None:
        while self._artifacts:
            path, subfolder = self._artifacts[0]
            self._progress(_bytes(path) / UPLOAD_BYTES_PER_S)
            if path.is_dir():
                client.log_artifacts(run_id, str(path), subfolder or path.name)
            else:
                client.log_artifact(run_id, str(path), subfolder)
            del self._artifacts[0]
            self._progress()

    def _open(self) -> MlflowClient:
        import_mlflow(self._uri)
        self._progress()
        client = connect(self._uri)
        self._progress()
        run_id = self.run_id or self._run.run_id
        run = find_run(client, run_id) if run_id else None
        if run:
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            if run_id:
                log.warning("MLflow has no run %s any more; this run goes on as a new one there.", run_id)
            run = create_run(client, self._uri, self._run.experiment, self._run.name, self._started_s)
        self.run_id = run.info.run_id
        self._write_record(run.info.experiment_id)
        # The store is the authority on what it has. Points arrive in the order of their steps, key by key.
        self._delivered = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._describe(client, run)
        self._progress()
        return client

    def _write_record(self, experiment_id: str) -> None:
        record = {
            "run_id": self.run_id,
            "experiment_id": experiment_id,
            "tracking_uri": without_password(self._uri),
        }
        write_json(self._path.with_name(RECORD_FILE), record)

    def _describe(self, client: MlflowClient, run: Any) -> None:
        """Log params and tags. A param cannot be changed, so what a resumed run changed goes into a tag."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import (
            MAX_PARAM_VAL_LENGTH,
            MAX_PARAMS_TAGS_PER_BATCH,
            MAX_TAG_VAL_LENGTH,
        )

        params = {
            valid_key(key): cut(
                value if isinstance(value, str) else json.dumps(value, default=str), MAX_PARAM_VAL_LENGTH
            )
            for key, value in self._run.params.items()
        }
        tags = dict(self._run.tags)
        known = run.data.params
        changed = [f"{key}={value}" for key, value in params.items() if known.get(key, value) != value]
        if changed:
            tags["changed_on_resume"] = " ".join(changed)
        new = [Param(key, value) for key, value in params.items() if key not in known]
        tag_list = [RunTag(valid_key(key), cut(str(value), MAX_TAG_VAL_LENGTH)) for key, value in tags.items()]
        for batch in _batches(new, MAX_PARAMS_TAGS_PER_BATCH):
            client.log_batch(run.info.run_id, params=batch, synchronous=True)
        for batch in _batches(tag_list, MAX_PARAMS_TAGS_PER_BATCH):
            client.log_batch(run.info.run_id, tags=batch, synchronous=True)

    def _deliver(self, client: MlflowClient, run_id: str) -> None:
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        while self._pending or self._read():
            client.log_batch(run_id, metrics=self._pending[:MAX_METRICS_PER_BATCH], synchronous=True)
            del self._pending[:MAX_METRICS_PER_BATCH]
            self._progress()

    def _read(self) -> bool:
        """Take new whole lines of the log that hold points the store lacks; False: there are none."""
        from mlflow.entities import Metric

        with self._path.open("rb") as file:
            file.seek(self._offset)
            while not self._pending and (lines := file.readlines(READ_BYTES)):
                for line in lines:
                    if not line.endswith(b"\n"):  # still being written
                        return bool(self._pending)
                    self._offset += len(line)
                    point = json.loads(line)
                    step, stamp = point.pop("step"), int(point.pop("time") * 1000)
                    self._pending += [
                        Metric(key, float(value), stamp, step)
                        for name, value in point.items()
                        if value is not None and step > self._delivered.get(key := valid_key(name), -1)
                    ]
        return bool(self._pending)

    def _start_monitor(self, run_id: str) -> Any:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(
            run_id, sampling_interval=SYSTEM_METRICS_EVERY_S, resume_logging=True, tracking_uri=self._uri
        )
        monitor.start()
        return monitor

    def _stop_monitor(self) -> None:
        if self._monitor:
            self._monitor.finish()
            self._monitor = None

    def _progress(self, allowance_s: float = 0.0) -> None:
        self._deadline = max(self._deadline, time.monotonic() + self._patience_s + allowance_s)

    def _missing(self) -> str:
        if self.run_id is None:
            return "this run"
        points = self._pending or self._offset < self._path.stat().st_size
        names = ", ".join(path.name for path, _ in self._artifacts)
        parts = ["the last metrics" if points else "", f"the artifacts {names}" if names else ""]
        return " and ".join(part for part in parts if part) or "the run's final status"


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
