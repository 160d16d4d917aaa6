"""An advice in MLflow: a run with the sentence, the winner's numbers and the files."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from evidence.advice.schema import Advice
from mantissa.ledger import MIB
from trainer.config.schema import Config
from trainer.errors import first_line
from trainer.tracking.mlflow import store
from trainer.tracking.mlflow.addresses import tracking_uri
from trainer.tracking.ui import shown_at

EXPERIMENT = "-advice"
"""What follows the recipe's experiment in the name of the advice's: its runs have no curves to draw beside others."""


def publish(advice: Advice, config: Config, sentence: str, files: list[Path]) -> str:
    """Send what MLflow lacks of the advice; nothing is sent twice, and with ``tracking=local`` nothing at all.

    Args:
        advice: to send.
        config: of the baseline: where it is tracked.
        sentence: that says what was found.
        files: of the advice.

    Returns:
        The line to print: the address of MLflow's page, or why there is none; empty with ``tracking=local``.
    """
    if not config.tracking.mlflow:
        return ""
    uri = tracking_uri(config.tracking.uri)
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
        "mlflow.note.content": sentence,
    }
    try:
        run = store.publish(
            store.connect(uri),
            f"{config.tracking.experiment or advice.recipe}{EXPERIMENT}",
            f"advice: {advice.recipe}",
            advice.key,
            started_s=time.time() - advice.spent_s,
            params={name: value for name, value in params.items() if value},
            metrics=_numbers(advice),
            tags=tags,
            files=files,
        )
    except Exception as error:  # of many kinds, by MLflow and what lies below it
        return f"the advice is not in MLflow ({first_line(error)}); run the same command again to retry"
    return shown_at(uri, run.info.experiment_id, run.info.run_id)


def _numbers(advice: Advice) -> dict[str, float]:
    entry = advice.entry(advice.winner)
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
        "minutes": advice.spent_s / 60,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
