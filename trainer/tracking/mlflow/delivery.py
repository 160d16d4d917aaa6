"""The upload of one run to MLflow: what MLflow needs, what it has, and sending the difference."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.files import (
    BEST,
    IMAGES_FILE,
    METRICS_FILE,
    PRECISION_FILE,
    RECORD_FILE,
    SOURCE_FILE,
    SUMMARY_FILE,
    TOKENIZER,
    read_json_lines,
    read_object,
    write_json,
)
from trainer.tracking.mlflow.addresses import database_file, lasting_uri
from trainer.tracking.mlflow.checkpoints import CheckpointSender
from trainer.tracking.mlflow.datasets import log_datasets
from trainer.tracking.mlflow.description import NOTE_TAG, description, may_replace
from trainer.tracking.mlflow.models import log_best
from trainer.tracking.mlflow.record import RunInfo, log_size, read_record
from trainer.tracking.mlflow.store import connect, create_run, cut, find_run, valid_key
from trainer.tracking.mlflow.summary_metrics import Point, points, summary_metrics

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

ARTIFACTS = (
    *("config.yaml", "config.json", SOURCE_FILE, IMAGES_FILE, PRECISION_FILE, SUMMARY_FILE, "failure.json"),
    *(TOKENIZER, "plots", "profile", BEST),
)
"""What of a run folder goes to MLflow, beside the metrics: files, and folders under their own names."""
SESSION_TAG = "mantissa.session"
"""The tag that holds the name of the process that has trained a run last."""
UPLOAD_BYTES_PER_S = 1e6
"""The slowest upload of an artifact that still counts as progress."""
SET_UP_S = 60.0
"""How long the set-up of a new SQLite file may take; it reports no progress."""
READ_BYTES = 1 << 20


Progress = Callable[[float], None]
"""Called between two calls of MLflow, with the seconds that the next one may take; it may raise to stop."""


class Delivery:
    """Sends one run to one store, from the files in its folder alone.

    The metric log is the only queue. So a slow store needs no memory here, and what a store lacks is found by
    asking it and reading the log. Any method may fail; then ``ask_again`` must be called before the next attempt.
    """

    def __init__(
        self, folder: Path, uri: str, info: RunInfo, *, training: bool, progress: Progress = lambda allowance_s: None
    ) -> None:
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
        record = read_record(folder)
        self._record = record if record.get("tracking_uri") == lasting_uri(uri) else {}  # else the id of another store
        self._certain = False
        self._described: str | None = None
        self._offset = 0
        """Bytes of the metric log that the store has."""
        self._stored: dict[str, int] = {}
        """The last step of each metric that the store had when it was asked."""
        self._uploaded: set[str] = set()
        self._model_id: str | None = None
        self._checkpoints = CheckpointSender(folder, info.checkpoints)

    def begin(self) -> None:
        """Connect, and find or create the run; once that has succeeded, do nothing until something fails."""
        if self._client is None:
            database = database_file(self._uri)
            self._progress(SET_UP_S if database and not database.exists() else 0)
            self._client = connect(self._uri)
            self._progress(0)
        if self._certain:
            return
        known = self.run_id or self._record.get("run_id")
        run = find_run(self._client, known) if known else None
        if run is None:
            if known:
                log.warning("MLflow no longer has run %s; this run continues as a new one there.", known)
            info = self._info
            run = create_run(self._client, self._uri, info.experiment, info.name, info.key, info.started_s)
            self._offset = 0
            self._uploaded.clear()
            self._checkpoints.forget()
        self.run_id = str(run.info.run_id)
        # The store is the authority on what it has. Points arrive in the order of their steps, key by key.
        self._stored = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        sessions = self._record.get("sessions", [])
        if self.elsewhere is None and (known or not self._training):
            self._look_elsewhere(run, sessions)
        if self._training and self.elsewhere is None and self._session not in sessions:
            sessions = [*sessions, self._session]
        self._record = {
            "run_id": self.run_id,
            "experiment_id": run.info.experiment_id,
            "tracking_uri": lasting_uri(self._uri),
            "sessions": sessions,
        }
        self._write_record()  # before MLflow has the session, which is then never mistaken for another folder's
        self._progress(0)
        if self._described != self.run_id and self.elsewhere is None:
            self._describe(self._client, run)
            self._described = self.run_id
        self._certain = True

    def send_metrics(self) -> None:
        """Send the points of the log that the store lacks."""
        with (self._folder / METRICS_FILE).open("rb") as file:
            while True:
                file.seek(self._offset)
                # The last line may still be being written.
                lines = [line for line in file.readlines(READ_BYTES) if line.endswith(b"\n")]
                if not lines:
                    return
                self._send_points([point for line in lines for point in points(json.loads(line))])
                self._offset += sum(map(len, lines))

    def _send_points(self, known: list[Point]) -> None:
        """Send those of which the store has no step as late; names become ones that MLflow takes."""
        from mlflow.entities import Metric
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        assert self._client is not None
        new = [
            Metric(key, float(point.value), int(point.time_s * 1000), point.step)
            for point in known
            if point.step > self._stored.get(key := valid_key(point.name), -1)
        ]
        for start in range(0, len(new), MAX_METRICS_PER_BATCH):
            batch = new[start : start + MAX_METRICS_PER_BATCH]
            self._client.log_batch(self.run_id, metrics=batch, synchronous=True)
            self._progress(0)

    def send_checkpoints(self, pause: Callable[[], object] = lambda: None) -> None:
        """Send the checkpoints that MLflow lacks, and new metrics meanwhile; ``pause`` is called after each file."""
        assert self._client is not None

        def between(size: int) -> None:
            if not size:
                pause()
                self.send_metrics()
            self._progress(size / UPLOAD_BYTES_PER_S)

        self._checkpoints.send(self._client, self._client.get_run(self.run_id), between)

    def has_new_checkpoints(self) -> bool:
        """Return whether there are checkpoints to send while the run is training."""
        return self._info.checkpoints == "all" and bool(self._checkpoints.unsent())

    def complete(self, status: str) -> None:
        """Send all of a run that has ended, and record that in ``mlflow.json``.

        If the run was continued elsewhere (``elsewhere``), nothing is sent: MLflow shows that continuation.
        """
        delivered: dict[str, Any] = {"metrics_bytes": log_size(self._folder), "status": status}
        self.begin()
        if self.elsewhere is not None:
            delivered["continued_elsewhere"] = self.elsewhere
        else:
            self._send_all(status)
        self._record["delivered"] = delivered
        self._write_record()

    def ask_again(self) -> None:
        """After a failed call, ask the store again: it may have stored what was sent although the answer was lost."""
        self._certain = False

    def missing(self) -> str:
        """Return what the store may lack, for the user."""
        if self.run_id is None:
            return "this run"
        names = ", ".join(path.name for path in self._artifacts())
        unsent = ", ".join(self._checkpoints.unsent())
        parts = ["the last metrics" if self._offset < log_size(self._folder) else ""]
        parts += [f"the artifacts {names}" if names else "", f"the checkpoints {unsent}" if unsent else ""]
        return " and ".join(filter(None, parts)) or "the run's final status"

    def _look_elsewhere(self, run: Any, sessions: list[str]) -> None:
        """Find out whether a run has reached a later step in another folder.

        A later step in the store is not enough: a run that is resumed from an earlier checkpoint removes the later
        lines of its log, and a power failure may too. So each process that trains a run writes its session into a tag.
        """
        if run.data.tags.get(SESSION_TAG) in sessions:
            return
        # MLflow's monitor of the machine counts its own samples.
        newest = max((step for key, step in self._stored.items() if not key.startswith("system/")), default=-1)
        here = max((int(line["step"]) for line in read_json_lines(self._folder / METRICS_FILE)), default=0)
        if newest > here:
            self.elsewhere = newest
            if self._training:
                log.warning(
                    "MLflow has step %d of this run, which was continued elsewhere. The metrics of this continuation "
                    "are not sent; they are in %s. To continue the other one, use resume=mlflow:%s and another "
                    "output_dir.",
                    newest,
                    self._folder,
                    self.run_id,
                )

    def _describe(self, client: MlflowClient, run: Any) -> None:
        """Log what is known of a run when it begins.

        MLflow's params cannot be changed, so what a resumed run changed goes into a tag.
        """
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_TAG_VAL_LENGTH

        run_id, known = run.info.run_id, run.data.params
        texts = {
            valid_key(key): value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in self._info.params.items()
        }
        params = {key: cut(text, MAX_PARAM_VAL_LENGTH) for key, text in texts.items()}
        tags = dict(self._info.tags)
        if self._training:
            tags[SESSION_TAG] = self._session
            if run.info.status != "RUNNING":
                client.update_run(run_id, status="RUNNING")
        if changed := [f"{key}={value}" for key, value in params.items() if known.get(key, value) != value]:
            tags["changed_on_resume"] = " ".join(changed)
        new = [Param(key, value) for key, value in params.items() if key not in known]
        marks = [RunTag(valid_key(key), cut(str(value), MAX_TAG_VAL_LENGTH)) for key, value in tags.items()]
        client.log_batch(run_id, params=new, synchronous=True)  # the client divides what is too long
        client.log_batch(run_id, tags=marks, synchronous=True)
        log_datasets(client, run_id, self._info.datasets)

    def _send_all(self, status: str) -> None:
        """Send the rest; what is refused, such as a model, keeps nothing else back, and the run ends all the same."""
        assert self._client is not None
        problem = None
        self.send_metrics()
        summary = read_object(self._folder / SUMMARY_FILE)
        self._send_points(summary_metrics(self._folder / METRICS_FILE, summary))
        try:
            for send in (self._upload, self._sum_up, self.send_checkpoints):
                self._progress(0)  # outside of the try: it raises if nobody waits any more
                try:
                    send()
                except Exception as error:
                    problem = problem or error
            if problem:
                raise problem
        finally:
            files = [self._folder / name for name in (METRICS_FILE, SUMMARY_FILE)]
            ended_s = max((file.stat().st_mtime for file in files if file.exists()), default=time.time())
            self._client.set_terminated(self.run_id, status, int(ended_s * 1000))

    def _upload(self) -> None:
        client, run_id = self._client, self.run_id
        assert client is not None
        for path in self._artifacts():
            self._progress(_bytes(path) / UPLOAD_BYTES_PER_S)
            if path.name == BEST:
                self._model_id = log_best(client, client.get_run(run_id), self._folder, self._info)
            if path.is_dir() and not (path.name == BEST and self._model_id):
                client.log_artifacts(run_id, str(path), path.name)
            elif path.is_file():
                client.log_artifact(run_id, str(path))
            if path.name == PRECISION_FILE:
                self._log_modules(client, path)
            self._uploaded.add(path.name)
            self._progress(0)

    def _artifacts(self) -> list[Path]:
        paths = [self._folder / name for name in ARTIFACTS if name not in self._uploaded]
        return [path for path in paths if path.exists()]

    def _log_modules(self, client: MlflowClient, precision: Path) -> None:
        """Log each module's dtypes as ``MlflowClient.log_table`` does, which would append to them when repeated."""
        if rows := read_object(precision).get("modules"):
            name, table = "precision_modules.json", {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
            client.log_dict(self.run_id, table, name)
            # MLflow's page shows these files as tables.
            client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps([{"path": name, "type": "table"}]))

    def _sum_up(self) -> None:
        assert self._client is not None
        assert self.run_id
        resumable = self._info.checkpoints != "none"
        note = description(self._folder, self.run_id, self._model_id, resumable=resumable)
        if note and may_replace(self._client.get_run(self.run_id).data.tags.get(NOTE_TAG)):
            self._client.set_tag(self.run_id, NOTE_TAG, note)

    def _write_record(self) -> None:
        with suppress(OSError):  # a full disk must not stop the delivery; the run's key finds it again
            write_json(self._folder / RECORD_FILE, self._record)


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
