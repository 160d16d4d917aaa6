"""The background thread that sends a run to MLflow; training never waits for it."""

from __future__ import annotations

import logging
import math
import shlex
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from trainer.errors import UserError, first_line, redacted
from trainer.files import METRICS_FILE
from trainer.progress import work
from trainer.tracking.mlflow.addresses import database_file
from trainer.tracking.mlflow.delivery import Delivery, size_of
from trainer.tracking.mlflow.models import prepare
from trainer.tracking.mlflow.record import RunInfo

log = logging.getLogger("mantissa")

MAX_BACKOFF_S = 60.0
SILENT_S = 20.0  # after which the user is told
UPLOAD_BYTES_PER_S = 1e4
"""The slowest upload of a file that still counts as progress; MLflow itself ends one that stands still."""
PAUSE_S = 2.0
"""Seconds between the files of a checkpoint while a run trains, because only one thread runs at a time."""
LONGEST_PAUSE_S = 5.0
"""Between two attempts to complete a run if MLflow returns errors; the first pause has a second."""
SYNC_PAUSES_S = 3.0
"""The sum of these pauses where no run waits, whose patience limits it otherwise."""
SYSTEM_METRICS_EVERY_S = 5.0


class DeliveryAbandoned(Exception):
    """The caller no longer waits for this delivery."""


class Feed(threading.Thread):
    """Sends a run to MLflow: the metric log as it grows, and at the end the artifacts and the status."""

    def __init__(
        self, folder: Path, uri: str, info: RunInfo, flush_every_s: float | None = None, system_metrics: bool = False
    ) -> None:
        """Prepare; ``start`` begins to send.

        Args:
            folder: the run's.
            uri: of the store, password included.
            info: what MLflow gets when the run begins there.
            flush_every_s: seconds between two uploads of new metrics; None: the run is not being trained.
            system_metrics: whether MLflow samples the machine meanwhile.
        """
        super().__init__(name="mlflow-feed", daemon=True)
        self._folder = folder
        self._uri = uri
        self._info = info
        self._flush_every_s = flush_every_s or 0.0
        self._session = uuid.uuid4().hex if flush_every_s else None
        self._system_metrics = system_metrics
        self._ending = threading.Event()
        self._abandoned = False
        self._deadline = self._patience_s = 0.0
        self._status = ""
        self._lacks = "this run"
        self._total = self._sent = self._sending = 0
        """Bytes of all files, of those that are sent, and of the file or folder that is on its way."""
        self._answered = self._said = False
        """Whether MLflow has ever accepted something; whether the user was told that it does not now."""
        self._failures = 0
        self._problem: Exception | None = None

    def conclude(self, status: str, patience_s: float) -> str | None:
        """Send the rest of the run; wait while there is progress, and at most ``patience_s`` without.

        A feed that was never started does only this.

        Returns:
            What is missing in MLflow, and why; None: nothing is missing.
        """
        self._status, self._patience_s = status, patience_s
        self._deadline = max(self._deadline, time.monotonic() + patience_s)  # an upload may be on its way
        self._ending.set()
        if self.ident is None:
            self.start()
        try:
            with work("sending the run to MLflow", unit="MB") as advance:
                while self.is_alive() and time.monotonic() < self._deadline:
                    self.join(0.1)
                    advance(min(self._sent, self._total) / 1e6, self._total / 1e6)
        except BaseException:  # a signal: the caller no longer waits
            log.warning("%s", how_to_send(self._folder, self._missing("interrupted")))
            raise
        finally:
            self._abandoned = True
        if self._problem:
            return self._missing(first_line(self._problem))
        return self._missing(f"no answer within {patience_s:g} s") if self.is_alive() else None

    def abandon(self) -> str | None:
        """Stop without sending anything more, and return what ``conclude`` would; None also if that was called."""
        if self._ending.is_set():
            return None
        self._abandoned = True
        self._ending.set()
        return self._missing("stopped immediately")

    def run(self) -> None:
        """Send until everything is delivered or the caller no longer waits."""
        paused_s = pause_s = 0.0
        if database_file(self._uri) is None:  # MLflow itself waits for minutes
            silent = threading.Timer(SILENT_S, self._say_silent)
            silent.daemon = True
            silent.start()
        while not self._abandoned:
            ending = self._ending.is_set()
            try:
                self._deliver()
                return
            except DeliveryAbandoned:
                return
            except Exception as error:  # whatever goes wrong with MLflow, training continues
                self._problem = error
                self._failures += 1
                first = self._failures == 1 and not self._answered and database_file(self._uri) is None
                if not (ending or self._said) and (self._failures == 2 or first):  # others may be setting up a file
                    self._say(f"does not accept this run yet ({first_line(error)})")
            if not ending:
                self._ending.wait(min(self._flush_every_s * 2**self._failures, MAX_BACKOFF_S))
                continue
            # What is always refused lets everything else make progress: so the pauses have a limit, too.
            most_s = self._patience_s if math.isfinite(self._patience_s) else SYNC_PAUSES_S
            pause_s = min(2 * pause_s or 1, LONGEST_PAUSE_S, most_s - paused_s, self._deadline - time.monotonic())
            if pause_s <= 0 or isinstance(self._problem, UserError):  # which no patience mends
                return
            time.sleep(pause_s)
            paused_s += pause_s

    def _deliver(self) -> None:
        """Send what is new while the run trains, then the rest."""
        delivery = Delivery(self._folder, self._uri, self._info, self._session, self._progress)
        samples = self._system_metrics and delivery.elsewhere is None and not self._ending.is_set()
        with self._sampling(delivery.run_id) if samples else nullcontext():
            while not self._ending.is_set():
                delivery.send_new(pause=lambda: self._ending.wait(PAUSE_S))
                self._works()
                prepare()
                self._ending.wait(self._flush_every_s)
        delivery.complete(self._status)
        self._works()

    def _works(self) -> None:
        if self._said:
            log.info("MLflow at %s is available again.", redacted(self._uri))
        self._failures, self._problem, self._answered, self._said = 0, None, True, False

    def _say_silent(self) -> None:
        if not (self._answered or self._said or self._ending.is_set()):
            self._say(f"has not answered within {SILENT_S:g} s")

    def _say(self, problem: str) -> None:
        """Warn about an MLflow that does not take the run, while it trains."""
        log.warning(
            "MLflow at %s %s. Training continues; %s has the metrics. If the address is wrong, set tracking.uri or "
            "MLFLOW_TRACKING_URI; tracking=local sends nothing.",
            redacted(self._uri),
            problem,
            self._folder / METRICS_FILE,
        )
        self._said = True

    @contextmanager
    def _sampling(self, run_id: str) -> Iterator[None]:
        """Let MLflow sample the machine meanwhile; where that cannot start, say so once and go on without."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        try:
            monitor = SystemMetricsMonitor(
                run_id, sampling_interval=SYSTEM_METRICS_EVERY_S, resume_logging=True, tracking_uri=self._uri
            )
            monitor.start()
        except Exception as error:  # of many kinds, by the libraries that MLflow asks
            self._system_metrics = False
            log.warning(
                "MLflow cannot sample this machine: %s. The run's own metrics are still sent.", first_line(error)
            )
            yield
            return
        try:
            yield
        finally:
            monitor.finish()

    def _progress(self, what: str, part: Path | None = None, rest: int | None = None, allowance_s: float = 0.0) -> None:
        if self._abandoned:
            raise DeliveryAbandoned
        self._lacks = what
        if rest is not None:
            self._total, self._sent, self._sending = rest, 0, 0
        if part is not None:
            self._sent, self._sending = self._sent + self._sending, size_of(part)
            allowance_s = self._sending / UPLOAD_BYTES_PER_S
        self._extend(allowance_s)

    def _extend(self, allowance_s: float) -> None:
        """There is progress: wait for more of it from now on."""
        self._deadline = max(self._deadline, time.monotonic() + self._patience_s + allowance_s)

    def _missing(self, reason: str) -> str:
        return f"{redacted(self._uri)} lacks {self._lacks}: {reason}"


def how_to_send(folder: Path, missing: str) -> str:
    """Return the warning about a run of which MLflow does not have everything."""
    command = shlex.join(["python", "scripts/sync.py", str(folder)])
    return f"MLflow upload incomplete ({missing}). Data is safe in {folder}; retry with: {command}"
