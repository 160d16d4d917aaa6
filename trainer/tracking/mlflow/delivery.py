"""The upload of one run to MLflow: what MLflow needs, what it has, and sending the difference."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.files import write_json
from trainer.tracking.mlflow.checkpoints import CheckpointSender
from trainer.tracking.mlflow.datasets import validation_data
from trainer.tracking.mlflow.delivery_record import (
    ARTIFACTS,
    METRICS_FILE,
    PRECISION_FILE,
    RECORD_FILE,
    SUMMARY_FILE,
    log_size,
    read_record,
    step_elsewhere,
)
from trainer.tracking.mlflow.description import closing_description, write_description
from trainer.tracking.mlflow.models import BEST, Progress, is_servable, log_best
from trainer.tracking.mlflow.params import log_params_and_tags
from trainer.tracking.mlflow.store import (
    SESSION_TAG,
    connect,
    create_run,
    database_file,
    find_run,
    import_mlflow,
    lasting_uri,
    valid_key,
)
from trainer.tracking.mlflow.summary_metrics import unsent_summary_metrics
from trainer.tracking.mlflow.tables import log_modules

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

TRACKING_FILE = "tracking.json"
UPLOAD_BYTES_PER_S = 1e6
"""The slowest upload of an artifact that still counts as progress."""
SET_UP_S = 60.0
"""How long the set-up of a new SQLite file may take; it reports no progress."""
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class RunInfo:
    """What MLflow gets when a run begins; kept as ``tracking.json`` in the run folder."""

    experiment: str
    name: str
    params: dict[str, object]
    tags: dict[str, str]
    uri: str | None
    """Of the store, without password; None for ``tracking=local``."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Finds the run in MLflow if the answer to its creation, with MLflow's own id, was lost."""
    started_s: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """See ``trainer.tracking.mlflow.datasets``."""
    checkpoints: str = "none"
    """See ``trainer.tracking.mlflow.checkpoints``; none in the files of earlier versions."""
    register: str | None = None
    """The registered model that the best weights become a version of."""

    @classmethod
    def read(cls, folder: Path) -> RunInfo:
        """Read a run folder's ``tracking.json``.

        Raises:
            UserError: there is none, or it is damaged.
        """
        path = folder / TRACKING_FILE
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UserError(f"{folder} is not a run folder (it has no {TRACKING_FILE})") from None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error}); the run cannot be sent without it") from None

    def write(self, folder: Path) -> None:
        """Write ``tracking.json``."""
        write_json(folder / TRACKING_FILE, asdict(self))


class Delivery:
    """Sends one run to one store, from the files in its folder alone.

    The metric log is the only queue. So a slow store needs no memory here, and what a store lacks is found by
    asking it and reading the log. Any method may fail; then ``forget_answers`` must be called before the next attempt.
    """

    def __init__(self, folder: Path, uri: str, info: RunInfo, *, training: bool, progress: Progress) -> None:
        """Prepare; nothing is opened yet.

        Args:
            folder: the run's.
            uri: of the store, password included.
            info: what MLflow gets when the run begins there.
            training: whether the run is being trained, which MLflow then shows.
            progress: see ``Progress``.
        """
        self.run_id: str | None = None
        self.elsewhere: int | None = None
        """The step that MLflow has of this run if it was continued elsewhere; then nothing more is sent."""
        self._session = uuid.uuid4().hex
        self._folder = folder
        self._uri = uri
        self._info = info
        self._training = training
        self._progress = progress
        self._client: MlflowClient | None = None
        self._record = read_record(folder)
        if self._record.get("tracking_uri") != lasting_uri(uri):  # an id of another store
            self._record = {}
        self._certain = False
        self._described: str | None = None
        self._offset = 0
        self._confirmed = 0
        self._pending: list[Any] = []
        self._stored: dict[str, int] = {}
        self._uploaded: set[str] = set()
        self._model_id: str | None = None
        self._checkpoints = CheckpointSender(folder, info.checkpoints)

    def begin(self) -> None:
        """Connect, and find or create the run; once that has succeeded, do nothing until something fails."""
        if self._client is None:
            import_mlflow(self._uri)
            database = database_file(self._uri)
            self._progress(SET_UP_S if database and not database.exists() else 0)
            self._client = connect(self._uri)
            self._progress(0)
        if self._certain:
            return
        client, known = self._client, self.run_id or self._record.get("run_id")
        run = find_run(client, known) if known else None
        if run is None:
            if known:
                log.warning("MLflow no longer has run %s; this run continues as a new one there.", known)
            info = self._info
            run = create_run(client, self._uri, info.experiment, info.name, info.key, info.started_s)
            self._confirmed = 0
            self._uploaded.clear()
            self._checkpoints.forget()
        self.run_id = run.info.run_id
        self._record = {
            "run_id": run.info.run_id,
            "experiment_id": run.info.experiment_id,
            "tracking_uri": lasting_uri(self._uri),
            "sessions": self._record.get("sessions", []),
        }
        # The store is the authority on what it has. Points arrive in the order of their steps, key by key.
        self._stored = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._offset = self._confirmed
        if self.elsewhere is None and not (self._training and not known):
            self.elsewhere = step_elsewhere(self._folder, run, self._record["sessions"], self._training)
        if self._training and self.elsewhere is None and self._session not in self._record["sessions"]:
            self._record["sessions"] = [*self._record["sessions"], self._session]
        self._write_record()  # before MLflow has the session, which is then never mistaken for another folder's
        self._progress(0)
        if self._described != self.run_id and self.elsewhere is None:
            self._describe(client, run)
            self._described = self.run_id
            self._progress(0)
        self._certain = True

    def _describe(self, client: MlflowClient, run: Any) -> None:
        if self._training:
            client.set_tag(run.info.run_id, SESSION_TAG, self._session)
            if run.info.status != "RUNNING":
                client.update_run(run.info.run_id, status="RUNNING")
        log_params_and_tags(client, run, self._info.params, self._info.tags, self._info.datasets)

    def send_metrics(self) -> None:
        """Send the metrics that the store lacks."""
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        assert self._client is not None
        if self.elsewhere is not None:
            return
        while self._pending or self._read():
            self._client.log_batch(self.run_id, metrics=self._pending[:MAX_METRICS_PER_BATCH], synchronous=True)
            del self._pending[:MAX_METRICS_PER_BATCH]
            if not self._pending:
                self._confirmed = self._offset
            self._progress(0)
        self._confirmed = self._offset

    def send_checkpoints(self, pause: Callable[[], None]) -> None:
        """Send the checkpoints that MLflow lacks, and new metrics meanwhile; ``pause`` is called between two calls."""
        assert self._client is not None

        def between(size: int) -> None:
            pause()
            if not size:
                self.send_metrics()
            self._progress(size / UPLOAD_BYTES_PER_S)

        self._checkpoints.send(self._client, self._client.get_run(self.run_id), between)

    def has_new_checkpoints(self) -> bool:
        """Return whether there are checkpoints to send while the run is training."""
        return self._info.checkpoints == "all" and self.elsewhere is None and bool(self._checkpoints.unsent())

    def _send_summary_metrics(self) -> None:
        """Send ``best/…`` and ``final/…``, each where the store has none of that step or a later one."""
        assert self._client is not None
        points = unsent_summary_metrics(self._folder / METRICS_FILE, self._folder / SUMMARY_FILE, self._stored)
        if points:
            self._client.log_batch(self.run_id, metrics=points, synchronous=True)
            self._stored |= {point.key: point.step for point in points}
            self._progress(0)

    def complete(self, status: str) -> None:
        """Send all of a run that has ended, and record that in ``mlflow.json``.

        If the run was continued elsewhere (``elsewhere``), nothing is sent: MLflow shows that continuation.
        """
        size = log_size(self._folder)
        self.begin()
        delivered: dict[str, Any] = {"metrics_bytes": size, "status": status}
        if self.elsewhere is not None:
            delivered["continued_elsewhere"] = self.elsewhere
        else:
            self._send_all(status)
        self._record["delivered"] = delivered
        self._write_record()

    def _send_all(self, status: str) -> None:
        self.send_metrics()
        self._send_summary_metrics()
        assert self._client is not None
        client, problem = self._client, None
        parts = (self._upload, self._sum_up, lambda _: self.send_checkpoints(lambda: None))
        try:
            for send in parts:
                self._progress(0)  # outside of the try: it raises if nobody waits any more
                try:
                    send(client)
                except Exception as error:  # a model that is refused must not keep the checkpoints back
                    problem = problem or error
            if problem:
                raise problem
        finally:  # a run whose artifacts are refused has ended too
            client.set_terminated(self.run_id, status, int(self._ended_s() * 1000))

    def forget_answers(self) -> None:
        """After a failed call, ask the store again: it may have stored what was sent although the answer was lost."""
        self._certain = False
        self._pending.clear()

    def missing(self) -> str:
        """Return what the store may lack, for the user."""
        if self.run_id is None:
            return "this run"
        names = ", ".join(path.name for path in self._artifacts())
        points = self._confirmed < log_size(self._folder)
        unsent = ", ".join(self._checkpoints.unsent())
        parts = ["the last metrics" if points else "", f"the artifacts {names}" if names else ""]
        parts.append(f"the checkpoints {unsent}" if unsent else "")
        return " and ".join(part for part in parts if part) or "the run's final status"

    def _artifacts(self) -> list[Path]:
        paths = [self._folder / name for name in ARTIFACTS if name not in self._uploaded]
        return [path for path in paths if path.exists()]

    def _upload(self, client: MlflowClient) -> None:
        for path in self._artifacts():
            self._progress(_bytes(path) / UPLOAD_BYTES_PER_S)
            if path.name == BEST and is_servable(self._folder):
                self._model_id = self._log_model(client)
            if path.name == BEST and self._model_id:
                pass
            elif path.is_dir():
                client.log_artifacts(self.run_id, str(path), path.name)
            else:
                client.log_artifact(self.run_id, str(path))
            if path.name == PRECISION_FILE:
                log_modules(client, str(self.run_id), path)
            self._uploaded.add(path.name)
            self._progress(0)

    def _log_model(self, client: MlflowClient) -> str | None:
        return log_best(
            client,
            client.get_run(self.run_id),
            self._folder,
            params=self._info.params,
            dataset=validation_data(self._info.datasets),
            register=self._info.register,
            progress=self._progress,
            upload_s=_bytes(self._folder / BEST) / UPLOAD_BYTES_PER_S,
        )

    def _sum_up(self, client: MlflowClient) -> None:
        assert self.run_id
        note = closing_description(
            self._folder, self.run_id, self._model_id, resumable=self._info.checkpoints != "none"
        )
        if note:
            write_description(client, client.get_run(self.run_id), note)

    def _ended_s(self) -> float:
        paths = [self._folder / name for name in (METRICS_FILE, SUMMARY_FILE)]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=time.time())

    def _write_record(self) -> None:
        with suppress(OSError):  # a full disk must not stop the delivery; the run's key finds it again
            write_json(self._folder / RECORD_FILE, self._record)

    def _read(self) -> bool:
        """Read new complete lines of the log with points that the store lacks; False: there are none."""
        from mlflow.entities import Metric

        with (self._folder / METRICS_FILE).open("rb") as file:
            file.seek(self._offset)
            while not self._pending and (lines := file.readlines(READ_BYTES)):
                for line in lines:
                    if not line.endswith(b"\n"):  # still being written
                        return bool(self._pending)
                    point = json.loads(line)
                    self._offset += len(line)
                    step, stamp = point.pop("step"), int(point.pop("time") * 1000)
                    self._pending += [
                        Metric(key, float(value), stamp, step)
                        for name, value in point.items()
                        if value is not None and step > self._stored.get(key := valid_key(name), -1)
                    ]
        return bool(self._pending)


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
