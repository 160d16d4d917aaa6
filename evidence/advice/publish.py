"""An advice in MLflow: a parent run with the sentence and the files, and a run of each candidate below it."""

from __future__ import annotations

import hashlib
import statistics
import time
from pathlib import Path

from evidence.advice.schema import LEFT_OUT, MEASURED, Advice, Entry
from trainer.config.schema import Config
from trainer.errors import first_line
from trainer.profiling.ledger import MIB
from trainer.tracking.mlflow import store
from trainer.tracking.mlflow.addresses import tracking_uri
from trainer.tracking.ui import shown_at

EXPERIMENT = "-advice"
"""What follows the recipe's experiment in the name of the advice's: its runs have no curves to draw beside others."""


def publish(advice: Advice, config: Config, sentence: str, files: list[Path]) -> str:
    """Send what MLflow lacks of the advice; nothing is sent twice, and with ``tracking=local`` nothing at all.

    Args:
        advice: to send; an equivalence test may be added to it later.
        config: of the baseline: where it is tracked.
        sentence: that says what was found.
        files: of the advice.

    Returns:
        The line to print: the address of MLflow's page, or why there is none; empty with ``tracking=local``.
    """
    if not config.tracking.mlflow:
        return ""
    uri = tracking_uri(config.tracking.uri)
    try:
        return _send(advice, uri, f"{config.tracking.experiment or advice.recipe}{EXPERIMENT}", sentence, files)
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return f"the advice is not in MLflow ({first_line(error)}); run the same command again to retry"


def _send(advice: Advice, uri: str, experiment: str, sentence: str, files: list[Path]) -> str:
    client, now = store.connect(uri), time.time()
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
    parent = store.publish(
        client,
        experiment,
        f"advice: {advice.recipe}",
        advice.key,
        started_s=now - advice.spent_s,
        params={name: value for name, value in params.items() if value},
        metrics=_numbers(advice.entry(advice.winner)) | {"minutes": advice.spent_s / 60},
        tags=tags,
        files=files,
    )
    for entry in advice.entries:
        if entry.status != LEFT_OUT:
            store.publish(
                client,
                experiment,
                entry.label,
                hashlib.sha256(f"{advice.key}-{entry.label}".encode()).hexdigest()[:32],  # labels may hold quotes
                started_s=now - sum(entry.step_s),
                params={"overrides": text} if (text := " ".join(entry.candidate.overrides)) else {},
                metrics=_numbers(entry),
                tags={"mlflow.parentRunId": parent.info.run_id, "status": entry.status, "reason": entry.reason},
                status="FINISHED" if entry.status == MEASURED else "FAILED",
            )
    return shown_at(uri, parent.info.experiment_id, parent.info.run_id)


def _numbers(entry: Entry) -> dict[str, float]:
    found = {
        "speed": entry.speed,
        "speed_low": entry.interval.low if entry.interval else None,
        "speed_high": entry.interval.high if entry.interval else None,
        "run_speed": entry.run_speed,
        "memory_mib": entry.memory_bytes and entry.memory_bytes / MIB,
        "step_time_ms": 1e3 * statistics.median(entry.step_s) if entry.turns else None,
        "compile_s": entry.compile_s or None,
        "pays_after_steps": entry.pays_after_steps,
        "rounds": entry.processes + len(entry.final),
    }
    return {name: float(value) for name, value in found.items() if value is not None}
