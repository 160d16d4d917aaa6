"""The upload of one run to MLflow: what MLflow needs, what it has, and sending the difference."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainer.files import (
    BEST,
    METRICS_FILE,
    PRECISION_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    TOKENIZER,
    read_json_lines,
    read_object,
)
from trainer.tracking.mlflow.addresses import database_file, lasting_uri
from trainer.tracking.mlflow.checkpoints import CheckpointSender
from trainer.tracking.mlflow.datasets import log_datasets
from trainer.tracking.mlflow.models import log_best
from trainer.tracking.mlflow.record import RunInfo, read_record, write_record
from trainer.tracking.mlflow.results import NOTE_TAG, Point, description, points, summary_metrics
from trainer.tracking.mlflow.store import connect, create_run, cut, find_run, valid_key

log = logging.getLogger("mantissa")

ARTIFACTS = (
    *("config.yaml", "config.json", RUN_FILE, PRECISION_FILE, SUMMARY_FILE),
    *(TOKENIZER, "plots", "profile", BEST),
)
"""What of a run folder goes to MLflow, beside the metrics: files, and folders under their own names."""
SESSION_TAG = "mantissa.session"
"""The tag that holds the name of the process that has trained a run last."""
FOLDER_TAG = "mantissa.folder"
"""The tag that holds where the run's folder was when it was trained last."""
MODULES_FILE = "precision_modules.json"
SET_UP_S = 60.0
"""How long the set-up of a new SQLite file may take; it reports no progress."""
METRICS = "the last metrics"
READ_BYTES = 1 << 16
"""Of the metric log in one call of MLflow: some hundred lines."""

Progress = Callable[..., None]
"""Called between two calls of MLflow, with what is sent next, in words; it may raise to stop. By name also ``part``:
the file or folder; ``rest``: the bytes of all files from here on; ``allowance_s``: how long it may take, in seconds."""


class Delivery:
    """Sends one run to one store, from the files in its folder alone.

    The metric log is the only queue: what a store lacks is found by asking it and reading the log. A store may have
    what was sent although its answer was lost. So a delivery ends with its first error, and the next one asks again.
    """

    def __init__(
        self, folder: Path, uri: str, info: RunInfo, session: str | None, progress: Progress = lambda what: None
    ) -> None:
        """Connect, find or create the run, and log what is known of it when it begins.

        Args:
            folder: the run's.
            uri: of the store, password included.
            info: what MLflow gets when the run begins there.
            session: the name of the process that trains the run; None: it is not being trained.
            progress: see ``Progress``.
        """
        self._folder = folder
        self._info = info
        self._progress = progress
        self._offset = 0
        """Bytes of the metric log that the store has."""
        self._model_id: str | None = None
        database = database_file(uri)
        if database and not database.exists():
            progress("this run", allowance_s=SET_UP_S)
        self._client = connect(uri)
        progress("this run")
        record = read_record(folder)
        if record.get("tracking_uri") != lasting_uri(uri):  # else the id is of another store
            record = {}
        known = record.get("run_id")
        run = find_run(self._client, known) if known else None
        if run is None:
            if known:
                log.warning("MLflow no longer has run %s; this run continues as a new one there.", known)
            run = create_run(self._client, info.experiment, info.name, info.key, info.started_s)
        self.run_id = str(run.info.run_id)
        self._notes = {"", run.data.tags.get("note", ""), info.tags.get("note", "")}
        """What the user has set as ``note``, before and now."""
        self._ended = run.info.status != "RUNNING"
        self._checkpoints = CheckpointSender(self._client, run, folder, info.checkpoints)
        progress(METRICS)
        # The store is the authority on what it has. Points arrive in the order of their steps, key by key.
        self._stored = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        sessions = record.get("sessions", [])
        if session and session not in sessions:
            sessions = [*sessions, session]
        self.elsewhere = self._step_elsewhere(run, sessions) if known or not session else None
        """The step that MLflow has of this run if it was continued elsewhere; then nothing is to be sent."""
        self._record: dict[str, Any] = {
            "run_id": self.run_id,
            "experiment_id": run.info.experiment_id,
            "tracking_uri": lasting_uri(uri),
            "key": info.key,
            "sessions": sessions if self.elsewhere is None else record.get("sessions", []),
        }
        self._write_record()  # before MLflow has the session, which is then never mistaken for another folder's
        if self.elsewhere is None:
            self._describe(run, session)
        elif session:
            log.warning(
                "MLflow has step %d of this run, which was continued elsewhere. The metrics of this continuation "
                "are not sent; they are in %s. To continue the other one, use resume=mlflow:%s and another "
                "output_dir.",
                self.elsewhere,
                folder,
                self.run_id,
            )

    def send_new(self, pause: Callable[[], object]) -> None:
        """Send what is new of a run that is being trained, see ``elsewhere``; ``pause`` is called before each file."""
        if self.elsewhere is None:
            if self._ended:
                self._client.update_run(self.run_id, status="RUNNING")
                self._ended = False
            self._send_metrics()
            if self._info.checkpoints == "all" and self._checkpoints.unsent():
                self._send_checkpoints(pause)

    def _send_metrics(self) -> None:
        """Send the points of the log that the store lacks; none if it was removed."""
        if not (self._folder / METRICS_FILE).exists():
            return
        with (self._folder / METRICS_FILE).open("rb") as file:
            while True:
                file.seek(self._offset)
                lines: list[bytes] = []
                # The last line may still be being written.
                while sum(map(len, lines)) < READ_BYTES and (line := file.readline()).endswith(b"\n"):
                    lines.append(line)
                if not lines:
                    return
                self._send_points([point for line in lines for point in points(json.loads(line))])
                self._offset += sum(map(len, lines))

    def complete(self, status: str) -> None:
        """Send all of a run that has ended, and record that in ``mlflow.json``.

        If the run was continued elsewhere (``elsewhere``), nothing is sent: MLflow shows that continuation.
        """
        if self.elsewhere is None:
            self._send_rest(status)
        else:
            self._record["continued_elsewhere"] = self.elsewhere
        self._record["delivered"] = True
        self._write_record()

    def _step_elsewhere(self, run: Any, sessions: list[str]) -> int | None:
        """Return the step that MLflow has if a run has reached a later one in another folder.

        A later step in the store is not enough: a run that is resumed from an earlier checkpoint removes the later
        lines of its log, and a power failure may too. So each process that trains a run writes its session into a tag.
        """
        if run.data.tags.get(SESSION_TAG) in sessions:
            return None
        # MLflow's monitor of the machine counts its own samples.
        newest = max((step for key, step in self._stored.items() if not key.startswith("system/")), default=-1)
        here = max((int(line["step"]) for line in read_json_lines(self._folder / METRICS_FILE)), default=0)
        return newest if newest > here else None

    def _describe(self, run: Any, session: str | None) -> None:
        """Log what is known of a run when it begins.

        MLflow's params cannot be changed, so what a resumed run changed goes into a tag.
        """
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_TAG_VAL_LENGTH

        known, tags = run.data.params, dict(self._info.tags)
        params = {}
        for key, value in self._info.params.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            params[valid_key(key)] = cut(text, MAX_PARAM_VAL_LENGTH)
        if session:
            tags |= {SESSION_TAG: session, FOLDER_TAG: str(self._folder.absolute())}
        if "note" in tags and run.data.tags.get(NOTE_TAG, "") in self._notes:
            tags[NOTE_TAG] = tags["note"]
        if changed := [f"{key}={value}" for key, value in params.items() if known.get(key, value) != value]:
            tags["changed_on_resume"] = " ".join(changed)
        new = [Param(key, value) for key, value in params.items() if key not in known]
        marks = [RunTag(valid_key(key), cut(str(value), MAX_TAG_VAL_LENGTH)) for key, value in tags.items()]
        self._client.log_batch(self.run_id, params=new, tags=marks, synchronous=True)
        log_datasets(self._client, self.run_id, self._info.datasets)

    def _send_points(self, known: list[Point]) -> None:
        """Send those of which the store has no step as late; names become ones that MLflow takes."""
        from mlflow.entities import Metric

        new = [
            Metric(key, float(point.value), int(point.time_s * 1000), point.step)
            for point in known
            if point.step > self._stored.get(key := valid_key(point.name), -1)
        ]
        if new:
            self._progress(METRICS)
            self._client.log_batch(self.run_id, metrics=new, synchronous=True)

    def _send_rest(self, status: str) -> None:
        """Send the rest: first how the run ended, then what takes long; what is refused keeps nothing else back."""
        from mlflow.utils.file_utils import local_file_uri_to_path
        from mlflow.utils.uri import is_local_uri

        paths = [path for name in ARTIFACTS if (path := self._folder / name).exists()]
        rest: dict[str, Callable[[], None]] = {path.name: partial(self._send_artifact, path) for path in paths}
        rest |= {"its description": self._send_description, "its checkpoints": self._send_checkpoints}
        problems: dict[str, Exception] = {}
        self._progress(METRICS, rest=sum(map(size_of, [*paths, *self._checkpoints.unsent()])))
        self._send_metrics()
        summary = read_object(self._folder / SUMMARY_FILE)
        self._send_points(summary_metrics(self._folder / METRICS_FILE, summary))
        files = [self._folder / name for name in (METRICS_FILE, SUMMARY_FILE)]
        ended_s = max((file.stat().st_mtime for file in files if file.exists()), default=time.time())
        self._client.set_terminated(self.run_id, status, int(ended_s * 1000))
        if is_local_uri(place := self._checkpoints.run.info.artifact_uri):
            for left in Path(local_file_uri_to_path(place)).rglob(".artifact.uploading.*"):
                left.unlink()  # MLflow's, of a process that was killed
        for what, send in rest.items():
            self._progress(what)  # outside of the try: it raises if nobody waits any more
            try:
                send()
            except Exception as error:
                problems[what] = error
        if problems:
            self._progress(" and ".join(problems))
            raise next(iter(problems.values()))

    def _send_checkpoints(self, pause: Callable[[], object] = lambda: None) -> None:
        """Send the checkpoints that MLflow lacks, and new metrics meanwhile."""

        def before(what: str, file: Path) -> None:
            pause()
            self._send_metrics()
            self._progress(what, part=file)

        self._checkpoints.send(before)

    def _send_artifact(self, path: Path) -> None:
        """Send a file or a folder; the best weights are sent as a model if they can be served."""
        if path.name == BEST:
            begin = partial(self._progress, BEST)
            self._model_id = log_best(self._client, self._client.get_run(self.run_id), self._folder, self._info, begin)
        if self._model_id and path.name == BEST:
            self._record["model"] = f"models:/{self._model_id}"
            self._write_record()
        else:
            self._progress(path.name, part=path)
            self._client.log_artifact(self.run_id, str(path))
        if path.name == PRECISION_FILE and (rows := read_object(path).get("modules")):
            # As MLflow's log_table does it, which would append to the table when it is repeated.
            table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
            self._client.log_dict(self.run_id, table, MODULES_FILE)
            shown = [{"path": MODULES_FILE, "type": "table"}]
            self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps(shown))

    def _send_description(self) -> None:
        resumable = self._info.checkpoints != "none"
        if note := description(self._folder, self.run_id, self._model_id, resumable=resumable):
            before = self._client.get_run(self.run_id).data.tags.get(NOTE_TAG, "")
            if before.partition(note.partition(" in ")[0])[0].strip() in self._notes:  # other words of a user stay
                own = self._info.tags.get("note")
                self._client.set_tag(self.run_id, NOTE_TAG, f"{own}\n\n{note}" if own else note)

    def _write_record(self) -> None:
        with suppress(OSError):  # a full disk must not stop the delivery; the run's key finds it again
            write_record(self._folder, self._record)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
