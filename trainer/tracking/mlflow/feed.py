"""The background thread that sends a run to MLflow; training never waits for it."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from pathlib import Path
from typing import Any

from trainer.errors import first_line, redacted
from trainer.files import METRICS_FILE
from trainer.tracking.mlflow.delivery import Delivery
from trainer.tracking.mlflow.record import RunInfo

log = logging.getLogger("mantissa")

MAX_BACKOFF_S = 60.0
PAUSE_S = 2.0
"""Seconds between the files of a checkpoint while a run trains, because only one thread runs at a time."""
LAST_ATTEMPTS = 3
"""Number of attempts to complete a run if MLflow returns errors."""
SYSTEM_METRICS_EVERY_S = 5.0


class DeliveryAbandoned(Exception):
    """The caller no longer waits for this delivery."""


class Feed(threading.Thread):
    """Sends a run to MLflow: the metric log as it grows, and at the end the artifacts and the status."""

    def __init__(
        self,
        folder: Path,
        uri: str,
        info: RunInfo,
        flush_every_s: float,
        system_metrics: bool = False,
        training: bool = True,
    ) -> None:
        super().__init__(name="mlflow-feed", daemon=True)
        self._folder = folder
        self._uri = uri
        self._delivery = Delivery(folder, uri, info, training=training, progress=self._progress)
        self._flush_every_s = flush_every_s
        self._system_metrics = system_metrics
        self._monitor: Any = None
        self._ending = threading.Event()
        self._abandoned = False
        self._deadline = self._patience_s = 0.0
        self._status = ""
        self._problem: Exception | None = None

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, as soon as there is one."""
        return self._delivery.run_id

    def conclude(self, status: str, patience_s: float) -> str | None:
        """Send the rest of the run; wait while there is progress, and at most ``patience_s`` without.

        A feed that was never started does only this.

        Returns:
            A message: what is missing in MLflow and how to send it; None: nothing is missing.
        """
        self._status, self._patience_s = status, patience_s
        self._deadline = max(self._deadline, time.monotonic() + patience_s)  # an upload may be on its way
        self._ending.set()
        if self.ident is None:
            self.start()
        try:
            while self.is_alive() and time.monotonic() < self._deadline:
                self.join(0.1)
        except BaseException:  # a signal: the caller no longer waits
            log.warning("%s", self._incomplete("interrupted"))
            raise
        finally:
            self._abandoned = True
        if self._problem:
            return self._incomplete(first_line(self._problem))
        return self._incomplete(f"no answer within {patience_s:g} s") if self.is_alive() else None

    def abandon(self) -> str | None:
        """Stop without sending anything more.

        Returns:
            A message: what MLflow lacks and how to send it; None: it has everything, or ``conclude`` was called.
        """
        if self._ending.is_set():
            return None
        self._abandoned = True
        self._ending.set()
        return self._incomplete("stopped immediately")

    def run(self) -> None:
        """Send until everything is delivered or the caller no longer waits."""
        failures = last_failures = 0
        while not self._abandoned and last_failures < LAST_ATTEMPTS:
            ending = self._ending.is_set()
            try:
                if ending:
                    self._stop_monitor()
                    self._delivery.complete(self._status)
                else:
                    self._advance()
                if failures >= 2:
                    log.info("MLflow at %s is available again.", redacted(self._uri))
                failures, self._problem = 0, None
                if ending:
                    return
            except DeliveryAbandoned:
                return
            except Exception as error:  # whatever goes wrong with MLflow, training continues
                self._delivery.ask_again()
                self._problem = error
                failures += 1
                last_failures += ending
                if failures == 2 and not ending:
                    log.warning(
                        "MLflow at %s does not accept this run yet: %s. Training continues; %s has the metrics.",
                        redacted(self._uri),
                        first_line(error),
                        self._folder / METRICS_FILE,
                    )
            if self._ending.is_set():
                time.sleep(min(last_failures, 2))
            else:
                self._ending.wait(min(self._flush_every_s * 2**failures, MAX_BACKOFF_S))

    def _advance(self) -> None:
        """Send what is new while the run trains."""
        self._delivery.begin()
        if self._delivery.elsewhere is not None:
            return
        self._delivery.send_metrics()
        if self._delivery.has_new_checkpoints():
            self._delivery.send_checkpoints(pause=lambda: self._ending.wait(PAUSE_S))
        if self._system_metrics:
            self._watch_system()

    def _watch_system(self) -> None:
        """Let MLflow sample the machine."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        if self._problem:
            self._stop_monitor()  # an outage has ended it
        if self._monitor is None:
            self._monitor = SystemMetricsMonitor(
                self.run_id, sampling_interval=SYSTEM_METRICS_EVERY_S, resume_logging=True, tracking_uri=self._uri
            )
            self._monitor.start()

    def _stop_monitor(self) -> None:
        if self._monitor:
            self._monitor.finish()
            self._monitor = None

    def _progress(self, allowance_s: float) -> None:
        if self._abandoned:
            raise DeliveryAbandoned
        self._deadline = max(self._deadline, time.monotonic() + self._patience_s + allowance_s)

    def _incomplete(self, reason: str) -> str:
        command = shlex.join(["python", "scripts/sync.py", str(self._folder)])
        return (
            f"MLflow upload incomplete ({redacted(self._uri)} lacks {self._delivery.missing()}: {reason}). "
            f"Data is safe in {self._folder}; retry with: {command}"
        )
