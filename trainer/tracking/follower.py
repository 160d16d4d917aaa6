"""The thread that sends a run to MLflow; training never waits for it.

``metrics.jsonl`` is the only queue. The thread reads from the offset that ``tracking.json`` has, sends the points with
the times of the file, and records the new offset. Whatever fails is tried again from there.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.schema import MANIFEST_FILE, path_of
from trainer.errors import UserError, first_line, redacted
from trainer.files import (
    BEST,
    CHECKPOINTS,
    CONFIG_FILE,
    LAYERS,
    METRICS_FILE,
    PRECISION_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    TOKENIZER,
    command,
    read_object,
)
from trainer.terminal import work
from trainer.tracking import checkpoints
from trainer.tracking.datasets import log_datasets
from trainer.tracking.models import architecture, describe, log_model, register
from trainer.tracking.refusal import check_files_arrive, refusal
from trainer.tracking.results import NOTE_TAG, best_lines, description, summary_lines
from trainer.tracking.store import (
    GROUP_TAG,
    connect,
    create_run,
    curve_key,
    cut,
    database_file,
    find_run,
    metric_key,
    show_swept,
    valid_key,
)
from trainer.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mantissa")

ARTIFACTS = (
    *(CONFIG_FILE, RUN_FILE, PRECISION_FILE, SUMMARY_FILE),
    *(TOKENIZER, "plots", "profile", BEST),
)
"""Files and folders of a run that go to MLflow under their own names, beside the metrics."""
FOLDER_TAG = "mantissa.folder"
"""The tag that holds where the run's folder was when it was trained last."""
ERROR_TAG = "error"
"""The tag that says why a run ended early."""
METRICS = "the last metrics"
READ_BYTES = 1 << 16
"""Bytes of the metric log in one call of MLflow: some hundred lines."""
FIRST_PAUSE_S = 1.0
"""Pause after a failed attempt; it doubles with each further one."""
LONGEST_PAUSE_S = 30.0
SET_UP_S = 60.0
"""Longest duration of the set-up of a new SQLite file, here or by another process, which reports no progress."""
UPLOAD_BYTES = 1 << 12
"""An upload goes on if this process has read more bytes since the last look at it; the look itself reads some."""
SYSTEM_METRICS_EVERY_S = 5.0


class Follower(threading.Thread):
    """Sends a run to MLflow: the metric log as it grows, and at the end the artifacts and the status."""

    def __init__(
        self, folder: Path, uri: str, run: TrackedRun, flush_every_s: float = 5.0, system_metrics: bool = False
    ) -> None:
        """Prepare; ``start`` begins to send.

        Args:
            folder: folder of the run.
            uri: address of the store, password included.
            run: what MLflow gets, and how much it has; kept up to date.
            flush_every_s: seconds between two uploads of new metrics.
            system_metrics: whether MLflow samples the machine while the run trains.
        """
        super().__init__(name="mlflow-follower", daemon=True)
        self._folder = folder
        self._uri = uri
        self._run = run
        self._flush_every_s = flush_every_s
        self._system_metrics = system_metrics
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._status = ""
        self._lacks = "this run"
        """What MLflow has to get next."""
        self._progressed_s = 0.0
        """When MLflow got something last."""
        self._allowance_s = 0.0
        """How long the present call may take."""
        self._failures = 0
        """Number of failed attempts since there was progress."""
        self._problem: Exception | None = None
        self._may_remove = True
        """False: MLflow has refused to remove a checkpoint."""
        self._no_files: UserError | None = None
        """Why files do not arrive at the server."""
        self._renamed: set[str] = set()
        """Metrics of which it has been said that MLflow does not take their names."""
        self._stored: dict[str, int] = {}
        """The last step of each metric in MLflow when this attempt began: a resumed run logs later steps again."""

    def conclude(self, status: str, timeout_s: float) -> None:
        """Send the rest of the run; wait at most ``timeout_s`` without progress, and warn of what is still missing."""
        self._status, self._progressed_s = status, time.monotonic()
        self._ending.set()
        reason = "interrupted"
        try:
            with work("sending the run to MLflow"):
                read = bytes_read()
                while self.is_alive() and time.monotonic() < self._progressed_s + self._allowance_s + timeout_s:
                    self.join(0.1)
                    before, read = read, bytes_read()
                    if read - before > UPLOAD_BYTES and not self._failures:  # else what is refused is sent for ever
                        self._progressed_s = time.monotonic()
            reason = f"no answer within {timeout_s:g} s" if self.is_alive() else ""
            reason = _said(self._problem) if self._problem else reason
        finally:  # also by a signal: the caller no longer waits
            self._given_up.set()
            if reason:
                self._warn_incomplete(reason)

    def abandon(self) -> None:
        """Stop without sending anything more, and warn of what is missing, unless ``conclude`` did."""
        if not self._ending.is_set():
            self._given_up.set()
            self._ending.set()
            self._warn_incomplete("stopped immediately")

    def send(self, status: str) -> str | None:
        """Send the rest of a run that has ended, in one attempt; return what is missing and why, None: nothing."""
        self._status = status
        self._ending.set()
        try:
            self._follow()
        except Exception as error:  # of many kinds, by MLflow and what lies below it
            self._problem = refusal(error, self._uri)
            return self._incomplete(_said(self._problem))
        return None

    def run(self) -> None:
        """Send until everything is delivered or the caller no longer waits."""
        failed = False
        while not self._given_up.is_set():
            ending = self._ending.is_set()
            try:
                self._follow()
                self._problem = None
                return
            except Exception as error:  # whatever goes wrong with MLflow, training continues
                self._problem = refusal(error, self._uri)
            self._failures += 1
            silent = failed and self._run.run_id is None  # a server that has never answered
            failed, mistake = True, isinstance(self._problem, UserError)
            ending = ending or (mistake and self._ending.is_set())
            if ending and (silent or mistake):
                return  # no patience mends this
            if not ending and (mistake or self._failures == 2):  # one alone is common: another run may set a store up
                self._warn(_said(self._problem))
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10), LONGEST_PAUSE_S)
            if (self._given_up if ending else self._ending).wait(pause_s):
                self._failures = 0

    def _follow(self) -> None:
        """Send what is new while the run trains, then the rest."""
        database = database_file(self._uri)
        self._allowance_s = SET_UP_S if database and not database.exists() else 0.0
        client = connect(self._uri)
        self._allowance_s = 0.0
        self._check_wanted()
        training = not self._ending.is_set()
        run_id = self._begin(client)
        with self._sampling(run_id) if training and self._system_metrics else nullcontext():
            while not self._ending.is_set():
                self._send_metrics(client, run_id)
                if self._run.checkpoints == "all" and not self._no_files:
                    self._send_checkpoints(client, run_id)
                self._ending.wait(self._flush_every_s)
        self._complete(client, run_id)

    def _record(self) -> None:
        """Note what MLflow has got now, which is progress."""
        self._check_wanted()
        with suppress(OSError):  # a full disk must not stop it; the next attempt asks MLflow what it has
            self._run.write(self._folder)
        self._progressed_s, self._failures, self._problem = time.monotonic(), 0, None

    def _check_wanted(self) -> None:
        """Raise where the caller no longer waits: another process may send the rest by now."""
        if self._given_up.is_set():
            raise RuntimeError("the caller no longer waits")

    def _begin(self, client: MlflowClient) -> str:
        """Find or create the run, log what is known of it when it begins, and return MLflow's id of it."""
        from mlflow.entities import Param, RunTag
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_TAG_VAL_LENGTH

        run = self._run
        found = find_run(client, run.run_id) if run.run_id else None
        if found is None:
            if run.run_id:
                log.warning("MLflow no longer has run %s; this run continues as a new one there.", run.run_id)
                run.offset, run.sent = 0, {}
            found = create_run(client, run.experiment, run.name, run.key, run.started_s)
            run.run_id, run.experiment_id = str(found.info.run_id), str(found.info.experiment_id)
            self._record()
        run_id = str(run.run_id)
        try:
            check_files_arrive(str(found.info.artifact_uri), self._uri)
        except UserError as error:
            if not (self._no_files or self._ending.is_set()):
                log.warning("MLflow gets no files of this run: %s. It gets the metrics.", error)
            self._no_files = error
        self._stored = {metric.key: metric.step for metric in found.data.to_proto().metrics}
        known, tags, params = found.data.params, dict(run.tags), {}
        for key, value in run.params.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            params[valid_key(key)] = cut(text, MAX_PARAM_VAL_LENGTH)
        # MLflow's params cannot be changed, so what a resumed run changed goes into a tag.
        if changed := [f"{key}={value}" for key, value in params.items() if known.get(key, value) != value]:
            tags["changed_on_resume"] = " ".join(changed)
        tags[FOLDER_TAG] = str(self._folder.absolute())
        new = [Param(key, value) for key, value in params.items() if key not in known]
        marks = [RunTag(valid_key(key), cut(str(value), MAX_TAG_VAL_LENGTH)) for key, value in tags.items()]
        client.log_batch(run_id, params=new, tags=marks, synchronous=True)
        if ERROR_TAG in found.data.tags:  # it goes on
            client.delete_tag(run_id, ERROR_TAG)
        if GROUP_TAG in tags:
            show_swept(client, run_id)
        log_datasets(client, run_id, run.datasets)
        if not self._ending.is_set() and found.info.status != "RUNNING":
            client.update_run(run_id, status="RUNNING")
        self._lacks = METRICS
        return run_id

    def _send_metrics(self, client: MlflowClient, run_id: str) -> None:
        """Send the points of the metric log that MLflow lacks."""
        with (self._folder / METRICS_FILE).open("rb") as file:
            while True:
                file.seek(self._run.offset)
                lines = file.readlines(READ_BYTES)
                if lines and not lines[-1].endswith(b"\n"):  # it is still being written
                    lines.pop()
                if not lines:
                    return
                self._send_points(client, run_id, map(json.loads, lines), curve_key)
                self._run.offset += sum(map(len, lines))
                self._record()

    def _send_points(
        self, client: MlflowClient, run_id: str, lines: Iterable[dict[str, Any]], key_of: Callable[[str], str]
    ) -> None:
        """Send the values of lines of a metric log, but for those of steps that MLflow has, and those not finite."""
        from mlflow.entities import Metric

        lines = list(lines)
        for name in {name for line in lines for name in line if not name.startswith(LAYERS)} - self._renamed:
            if valid_key(name) != name:
                self._renamed.add(name)
                log.warning("MLflow takes no metric named %s; there it is %s.", name, key_of(name))

        # A point for each value: MLflow's name of the metric, the time in milliseconds, the step.
        metrics = [
            Metric(
                key,
                value / 2**20 if name.endswith("_bytes") and key.endswith("_mib") else float(value),
                int(line["time"] * 1000),
                line["step"],
            )
            for line in lines
            for name, value in line.items()
            if name not in ("step", "time") and value is not None and not name.startswith(LAYERS)
            if line["step"] > self._stored.get(key := key_of(name), -1)
        ]
        if metrics:
            # A run's page shows them in the order in which they came first: what is in no section last.
            metrics.sort(key=lambda metric: "/" not in metric.key)
            client.log_batch(run_id, metrics=metrics, synchronous=True)

    def _complete(self, client: MlflowClient, run_id: str) -> None:
        """Send the rest: first how the run ended, then what takes long; what is refused keeps nothing else back."""
        self._send_metrics(client, run_id)
        summary = read_object(self._folder / SUMMARY_FILE)
        self._send_points(client, run_id, summary_lines(self._folder / METRICS_FILE, summary), metric_key)
        files = [self._folder / name for name in (METRICS_FILE, SUMMARY_FILE)]
        ended_s = max((file.stat().st_mtime for file in files if file.exists()), default=time.time())
        client.set_terminated(run_id, self._status, int(ended_s * 1000))
        if error := summary.get("error"):
            client.set_tag(run_id, ERROR_TAG, error)
        there = [self._folder / name for name in ARTIFACTS if (self._folder / name).exists()]
        parts: dict[str, Callable[[], None]] = {
            path.name: partial(self._send_files, client, run_id, path) for path in there if not self._no_files
        }
        if evaluated := best_lines(self._folder / METRICS_FILE, summary):
            params = {name: value for name, value in self._run.tags.items() if name in ("recipe", "precision")}
            parts["its entry in Models"] = partial(log_model, client, run_id, self._run.key, evaluated, params)
        parts["its description"] = partial(self._send_description, client, run_id)
        if not self._no_files:
            parts["its checkpoints"] = partial(self._send_checkpoints, client, run_id)
        problems: dict[str, Exception] = {"its files": self._no_files} if self._no_files else {}
        for part, send in parts.items():
            self._check_wanted()
            self._lacks = part
            try:
                send()
            except Exception as error:
                problems[part] = error
        if problems:
            self._lacks = " and ".join(problems)
            raise next(iter(problems.values()))
        self._run.delivered = True
        self._record()

    def _has(self, path: Path) -> bool:
        """Return whether MLflow has a file or a folder of the run as it is now."""
        return self._run.sent.get(self._place(path)) == changed_ns(path)

    def _place(self, path: Path) -> str:
        """Return the place of a file or a folder in the run's folder, and among the run's artifacts."""
        return path.relative_to(self._folder).as_posix()

    def _send_files(self, client: MlflowClient, run_id: str, path: Path, linked: bool = False) -> None:
        """Send a file, or those of a folder, unless MLflow has it; best weights as a model if there is a flavour.

        Args:
            client: of the store.
            run_id: MLflow's.
            path: in the run's folder.
            linked: whether MLflow has the safetensors already.
        """
        if self._has(path):
            return
        changed = changed_ns(path)
        for file in files_in(path):
            if linked and file.suffix == ".safetensors":
                continue
            self._send_metrics(client, run_id)  # the run may train on meanwhile
            client.log_artifact(run_id, str(file), None if file == path else self._place(file.parent))
        if path.name == BEST and architecture(self._folder):
            with TemporaryDirectory() as scratch:
                describe(Path(scratch), path, run_id)
                client.log_artifacts(run_id, scratch, BEST)
        if path.name == BEST and self._run.register:
            register(client, self._run.register, run_id)
        self._run.sent[self._place(path)] = changed
        self._record()

    def _send_checkpoints(self, client: MlflowClient, run_id: str) -> None:
        """Send the checkpoints that MLflow lacks, after what is needed beside them; remove those that are gone here."""
        wanted = checkpoints.wanted(self._folder, self._run.checkpoints)
        whole = None
        if wanted and self._ending.is_set():  # somebody may have removed what was sent
            steps = checkpoints.complete_steps(client, run_id)
            whole = {path_of(self._folder / CHECKPOINTS, step) for step in steps}
        lacking = []
        for path in wanted:
            with suppress(FileNotFoundError):  # the run has removed it meanwhile
                if not self._has(path) or (whole is not None and path not in whole):
                    lacking.append(path)
        artifacts = checkpoints.artifact_folder(client, run_id) if lacking else None
        links = artifacts is not None and checkpoints.can_link(self._folder / METRICS_FILE, artifacts)
        if artifacts and not links and self._run.checkpoints == "auto":
            log.warning(
                "No links can be made in %s to %s, as on two file systems: MLflow gets no checkpoints. Set "
                "tracking.checkpoints=last for copies.",
                *(artifacts, self._folder),
            )
            return
        for path in lacking:
            with suppress(FileNotFoundError):  # removed since
                if self._run.sent.pop(self._place(path), None):  # the same step was saved again, after a resume
                    self._remove(client, run_id, {path.name})
                if artifacts and links:
                    checkpoints.link_tensors(path, artifacts / self._place(path))
                for needed in (*(self._folder / name for name in checkpoints.COMPANIONS), path):
                    self._send_files(client, run_id, needed, links)
        if wanted and (lacking or self._ending.is_set()):
            stored = checkpoints.stored_names(client, run_id)
            self._remove(client, run_id, {*stored} - {path.name for path in wanted})

    def _remove(self, client: MlflowClient, run_id: str, names: set[str]) -> None:
        """Remove checkpoints from MLflow, unless it has refused that; one that stays too long is no failure."""
        try:
            if self._may_remove:
                checkpoints.remove(client, run_id, names)
                for name in names:
                    self._run.sent.pop(f"{CHECKPOINTS}/{name}", None)
        except Exception as error:  # of many kinds
            log.warning("MLflow does not remove old checkpoints (%s); they stay there.", first_line(error))
            self._may_remove = False

    def _send_description(self, client: MlflowClient, run_id: str) -> None:
        """Set the description of the run on MLflow's page; words that a user wrote in its place stay."""
        text, before = description(self._folder, self._run), client.get_run(run_id).data.tags.get(NOTE_TAG, "")
        if text and text != before and before in ("", self._run.description):
            client.set_tag(run_id, NOTE_TAG, text)
            self._run.description = text
            self._record()

    @contextmanager
    def _sampling(self, run_id: str) -> Iterator[None]:
        """Let MLflow sample the machine meanwhile; where that cannot start, say so once and go on without."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor: Any = None
        try:
            monitor = SystemMetricsMonitor(
                run_id, sampling_interval=SYSTEM_METRICS_EVERY_S, resume_logging=True, tracking_uri=self._uri
            )
            monitor.start()
        except Exception as error:  # of many kinds, by the libraries that MLflow asks
            self._system_metrics = False
            why = first_line(error)
            log.warning("MLflow cannot sample this machine: %s. The run's own metrics are still sent.", why)
        try:
            yield
        finally:
            if self._system_metrics:
                monitor.finish()

    def _warn(self, problem: str) -> None:
        log.warning(
            "MLflow at %s does not accept this run yet (%s). Training continues; %s has the metrics. If the address is "
            "wrong, set tracking.uri or MLFLOW_TRACKING_URI; tracking=local sends nothing.",
            redacted(self._uri),
            problem,
            self._folder / METRICS_FILE,
        )

    def _warn_incomplete(self, reason: str) -> None:
        log.warning("%s", self._incomplete(reason))

    def _incomplete(self, reason: str) -> str:
        """Return what MLflow lacks of the run, and how to send it later, unless this run's files never arrive."""
        missing = f"{redacted(self._uri)} lacks {self._lacks}: {reason}"
        resend = command("sync.py", [str(self._folder)])
        when = "when that is mended, send it with" if isinstance(self._problem, UserError) else "retry with"
        later = "" if self._problem and self._problem is self._no_files else f"; {when}: {resend}"
        return f"MLflow upload incomplete ({missing}). Data is safe in {self._folder}{later}"


def _said(problem: Exception) -> str:
    return redacted(str(problem)) if isinstance(problem, UserError) else first_line(problem)


def bytes_read() -> int:
    """Return how many bytes this process has read, those of an upload among them; only Linux counts them."""
    try:
        return int(Path("/proc/self/io").read_text(encoding="ascii").split(maxsplit=2)[1])
    except OSError:
        return 0


def files_in(path: Path) -> list[Path]:
    """Return the files in a folder, a checkpoint's manifest last; of a file, itself."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return sorted(files, key=lambda file: file.name == MANIFEST_FILE)


def changed_ns(path: Path) -> int:
    """Return when a file, or one in a folder, was changed last."""
    return max((file.stat().st_mtime_ns for file in files_in(path)), default=0)
