"""A comparison in MLflow: a parent run with the report, and the runs of its arms below it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence.comparison.compare import Result
from evidence.comparison.judge import ArmResult
from evidence.comparison.report import lead
from evidence.mlflow import publish, run_above
from evidence.runs import Outcome, redacted_arguments
from trainer.files import TRACKING_FILE
from trainer.tracking import store
from trainer.tracking.sync import send
from trainer.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LONGEST = 500
"""Characters of a tag."""


def publish_comparison(result: Result, uri: str, files: list[Path]) -> list[str]:
    """Send to MLflow what it lacks of the comparison and the files of its report; nothing is sent twice.

    Returns:
        Lines to print: the address of MLflow's page, or why there is none; none where no run was tracked.
    """
    delivered: list[tuple[Outcome, TrackedRun]] = []
    for outcome in result.outcomes:
        folder = outcome.folder
        if not (folder / TRACKING_FILE).exists():  # it failed before its tracking started
            continue
        sent = send(folder, uri)
        if sent.status == "incomplete":
            problem = f"not all runs are in MLflow, so neither is the comparison ({folder.name}: {sent.message})"
            return [f"{problem}; run the same command again to retry"]
        tracked = TrackedRun.read(folder)
        if tracked.uri == store.storable_uri(uri):
            delivered.append((outcome, tracked))
    if not any(outcome.finished for outcome, _ in delivered):
        return []
    return [publish("the comparison", uri, lambda client: _update_parent(client, result, delivered, files))]


def _update_parent(
    client: MlflowClient, result: Result, delivered: list[tuple[Outcome, TrackedRun]], files: list[Path]
) -> Any:
    """Create the run above those of the comparison, or bring it up to date, and return it; nothing is logged twice."""
    from mlflow.entities import Metric, RunTag

    plan = result.plan
    run = run_above(client, [sent for _, sent in delivered], f"compare-{plan.name}", result.key, result.began_s)
    run_id, began_ms = run.info.run_id, int(result.began_s * 1000)
    tags = {
        "arms": ", ".join(arm.label for arm in plan.arms),
        "baseline": plan.baseline,
        "margin": str(plan.margin),
        "common": " ".join(redacted_arguments(plan.common)),
        "mlflow.note.content": "\n\n".join(lead(result)),
    }
    tags |= {f"quality.{arm.label}": arm.quality.verdict for arm in result.arms if arm.quality.verdict}
    client.log_batch(
        run_id,
        # MLflow ignores a point that it has, the time included.
        [
            Metric(f"{arm.label}_{name}", value, began_ms, len(plan.seeds))
            for arm in result.arms
            for name, value in _numbers(arm).items()
        ],
        tags=[RunTag(key, store.cut(text, _LONGEST)) for key, text in tags.items()],
    )
    for file in files:
        client.log_artifact(run_id, str(file))
    for outcome, sent in delivered:
        client.set_tag(str(sent.run_id), "arm", outcome.arm)
    return run


def _numbers(arm: ArmResult) -> dict[str, float]:
    sides = (("speed", arm.speed), ("memory", arm.memory))
    found = {f"{name}_ratio": side.ratio.mean for name, side in sides if side.ratio and not side.why}
    reached = (("steps", arm.reach.steps_ratio), ("seconds", arm.reach.seconds_ratio))
    found |= {f"{name}_to_equal_loss_ratio": ratio.mean for name, ratio in reached if ratio}
    if arm.quality.test:
        found["loss_difference"] = arm.quality.test.difference.mean
    return found
