"""The local metric log, which is the truth, and MLflow behind it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError
from trainer.files import write_json, write_text
from trainer.mlflow_feed import Feed, RunInfo, read_run_record
from trainer.mlflow_store import explicit_uri, tracking_uri

log = logging.getLogger("mantissa")

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
PATIENCE_S = 30.0
"""How long a finished run waits for an MLflow that makes no progress."""

Artifact = Path | tuple[Path, str]
"""A file or folder to keep in MLflow, with the folder among the artifacts to put it in."""


@dataclass
class Tracking:
    """The ``tracking`` config group: whether MLflow is fed, where it is, and how often."""

    mlflow: bool = True
    uri: str | None = None
    """None: the environment's ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the current folder."""
    experiment: str | None = None
    """None: the recipe's name."""
    system_metrics: bool = True
    flush_every_s: float = 5.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.flush_every_s) and self.flush_every_s > 0):
            raise UserError(
                f"tracking.flush_every_s={self.flush_every_s} must be a positive number of seconds, such as 5"
            )
        if self.mlflow:
            explicit_uri(self.uri)


class Tracker:
    """One run's metric log. Only the main process of a run makes one."""

    def __init__(
        self,
        config: Tracking,
        folder: Path,
        *,
        experiment: str,
        run_name: str,
        params: dict[str, object],
        tags: dict[str, str],
        run_id: str | None = None,
        resume_step: int | None = None,
    ) -> None:
        """Open the log and start feeding MLflow in the background.

        Args:
            config: the ``tracking`` group.
            folder: the run's own, existing folder.
            experiment: where the run goes unless the config names an experiment.
            run_name: such as ``gpt2-bf16-s0``.
            params: the flattened config, of JSON types.
            tags: what runs are found and told apart by.
            run_id: MLflow's id of the run to go on with; None: the one in the folder, if any.
            resume_step: the optimizer step of the checkpoint; what was logged after it is removed.

        Raises:
            UserError: the folder holds another run's log, or a damaged one.

        """
        self.folder = folder
        self._run_name = run_name
        path = folder / METRICS_FILE
        if resume_step is not None:
            truncate(path, resume_step)
        elif path.exists() and path.stat().st_size:
            raise UserError(f"{folder} already holds the metrics of a run; use resume={folder} or another output_dir")
        self._file = path.open("a", encoding="utf-8")
        self._feed: Feed | None = None
        if not config.mlflow:
            return
        record = read_run_record(folder) if resume_step is not None else {}
        run = RunInfo(config.experiment or experiment, run_name, params, tags, run_id or record.get("run_id"))
        uri = explicit_uri(config.uri) or record.get("tracking_uri") or tracking_uri()
        self._feed = Feed(uri, run, path, config.flush_every_s, config.system_metrics)
        self._feed.start()

    @property
    def run_id(self) -> str | None:
        """MLflow's id of this run, as soon as MLflow has given one; also kept in ``mlflow.json``."""
        return self._feed.run_id if self._feed else None

    def log(self, step: int, metrics: Mapping[str, float], time_s: float | None = None) -> None:
        """Append one line to ``metrics.jsonl``; the feed takes it from there.

        Args:
            step: the optimizer step the values belong to.
            metrics: plain Python numbers. One that is not finite becomes null, and ``<name>_nonfinite`` 1.
            time_s: seconds since the epoch; None: now.

        """
        if "step" in metrics or "time" in metrics:
            raise ValueError("a metric cannot be called step or time: every line of metrics.jsonl has these keys")
        line = {"step": step, "time": time.time() if time_s is None else time_s, **_countable(metrics)}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def finish(
        self,
        status: str,
        artifacts: Sequence[Artifact],
        summary: Mapping[str, object],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Write the summary and the plots, and hand everything to MLflow. Never raises because of MLflow.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
            artifacts: files and folders to keep in MLflow, beside the summary and the plots.
            summary: what ``summary.json`` says.
            patience_s: how long to wait for an MLflow that makes no progress.

        """
        from trainer.plots import plot_run

        self._file.close()
        plots: list[Path] = []
        try:
            write_json(self.folder / SUMMARY_FILE, _countable(summary))
            plots = plot_run(self.folder / METRICS_FILE, self.folder / "plots", self._run_name)
        finally:
            if self._feed:
                own: list[Artifact] = [self.folder / SUMMARY_FILE, *((plot, "plots") for plot in plots)]
                missing = self._feed.conclude(status, [*own, *artifacts], patience_s)
                if missing:
                    log.warning("%s. The files in %s have it all.", missing, self.folder)


def truncate(path: Path, step: int) -> None:
    """Remove from a metric log what comes after ``step``, and a last line that was cut off while written.

    Raises:
        UserError: another line is damaged.

    """
    if not path.exists():
        return
    *lines, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            keep = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}, is damaged; remove that line and resume again") from None
        if keep:
            kept.append(line + "\n")
    if torn or len(kept) < len(lines):
        write_text(path, "".join(kept))


def _countable(values: Mapping[str, object]) -> dict[str, object]:
    """Strict JSON has no NaN or infinity: such a value becomes null, and its presence a count of 1."""
    result: dict[str, object] = {}
    for key, value in values.items():
        result[key] = _strict(value)
        if isinstance(value, float) and not math.isfinite(value):
            result[f"{key}_nonfinite"] = 1
    return result


def _strict(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _countable(value)
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value
