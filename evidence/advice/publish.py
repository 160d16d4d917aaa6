"""An advice in MLflow: a parent run with the sentence and the files, and a run of each candidate below it."""

from __future__ import annotations

import hashlib
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence.advice.schema import FAILED, HUNG, LEFT_OUT, MEASURED, Advice, Entry
from trainer.config.schema import Config
from trainer.errors import first_line
from trainer.profiling.ledger import MIB
from trainer.tracking.mlflow.addresses import tracking_uri
from trainer.tracking.mlflow.store import connect, create_run, cut, valid_key
from trainer.tracking.ui import run_address, server_address

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "-advice"
"""What follows the recipe's experiment in the name of the advice's: its runs have no curves to draw beside others."""
_STATUS = {MEASURED: "FINISHED", FAILED: "FAILED", HUNG: "KILLED"}
_LONGEST = 500
"""Characters of a param or a tag."""


def publish(advice: Advice, config: Config, sentence: str, files: list[Path]) -> list[str]:
    """Send what MLflow lacks of the advice; nothing is sent twice, and with ``tracking=local`` nothing at all.

    Args:
        advice: to send; it is known again by its measurements, so an equivalence test may be added later.
        config: of the baseline: where it is tracked.
        sentence: that says what was found.
        files: of the advice.

    Returns:
        Lines to print: the address of MLflow's page, or why there is none.
    """
    if not config.tracking.mlflow:
        return []
    uri = tracking_uri(config.tracking.uri)
    experiment = f"{config.tracking.experiment or advice.recipe}{EXPERIMENT}"
    try:
        client = connect(uri)
        parent = _send(client, advice, uri, experiment, sentence, files)
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return [f"the advice is not in MLflow ({first_line(error)}); run the same command again to retry"]
    base = uri if uri.startswith(("http://", "https://")) else server_address()
    where = "" if base == uri else ", while python scripts/ui.py runs"
    return [f"in MLflow{where}: {run_address(base, parent.info.experiment_id, parent.info.run_id)}"]


def _send(client: MlflowClient, advice: Advice, uri: str, experiment: str, sentence: str, files: list[Path]) -> Any:
    key, now = advice.key, time.time()
    parent = create_run(client, uri, experiment, f"advice: {advice.recipe}", key, now - advice.spent_s)
    params = {
        "goal": advice.goal,
        "steps": str(advice.steps),
        "overrides": " ".join(advice.overrides),
        "baseline": advice.baseline,
        "machine": advice.machine,
        "torch": str(advice.versions.get("torch")),
        "commit": advice.git.get("commit", "unknown"),
    }
    tags = {
        "winner": advice.winner,
        "equal": ", ".join(advice.equal),
        "stopped": advice.stopped,
        "quality": str(advice.quality.get("verdict", "")),
        "mlflow.note.content": sentence,
    }
    _log(client, parent, params, tags, _numbers(advice.entry(advice.winner)) | {"minutes": advice.spent_s / 60})
    for file in files:
        client.log_artifact(parent.info.run_id, str(file))
    for entry in advice.entries:
        if entry.status == LEFT_OUT:
            continue
        name = hashlib.sha256(f"{key}-{entry.label}".encode()).hexdigest()[:32]  # labels may hold quotes
        run = create_run(client, uri, experiment, entry.label, name, now - sum(entry.step_s))
        tags = {"mlflow.parentRunId": parent.info.run_id, "status": entry.status, "reason": entry.reason}
        _log(client, run, {"overrides": " ".join(entry.candidate.overrides)}, tags, _numbers(entry))
        if run.info.status == "RUNNING":
            client.set_terminated(run.info.run_id, _STATUS[entry.status], int(now * 1000))
    client.set_terminated(parent.info.run_id, "FINISHED", int(now * 1000))
    return parent


def _log(
    client: MlflowClient, run: Any, params: dict[str, str], tags: dict[str, str], numbers: dict[str, float]
) -> None:
    """Log what the run does not have yet. MLflow would keep both points of a metric, and refuse another param."""
    from mlflow.entities import Metric, Param, RunTag

    now, known = int(time.time() * 1000), run.data
    client.log_batch(
        run.info.run_id,
        [Metric(valid_key(name), value, now, 0) for name, value in numbers.items() if known.metrics.get(name) != value],
        [Param(name, cut(value, _LONGEST)) for name, value in params.items() if value and name not in known.params],
        [RunTag(name, cut(value, _LONGEST)) for name, value in tags.items() if value or name in known.tags],
    )


def _numbers(entry: Entry) -> dict[str, float]:
    found = {
        "speed": entry.speed,
        "speed_low": entry.interval.low if entry.interval else None,
        "speed_high": entry.interval.high if entry.interval else None,
        "run_speed": entry.run_speed,
        "memory_mib": entry.memory_bytes and entry.memory_bytes / MIB,
        "step_time_ms": 1e3 * statistics.median(entry.step_s) if entry.step_s else None,
        "compile_s": entry.compile_s or None,
        "pays_after_steps": entry.pays_after_steps,
        "rounds": entry.rounds,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
