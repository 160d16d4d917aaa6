"""A comparison in MLflow: a parent run with the report, and the runs of its arms below it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence.comparison.compare import Result
from evidence.comparison.report import lead
from evidence.mlflow import publish
from evidence.runs import Outcome, redacted_arguments
from trainer.files import TRACKING_FILE
from trainer.tracking import store
from trainer.tracking.sync import send
from trainer.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient


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
    plan = result.plan
    return store.publish(
        client,
        client.get_experiment(delivered[0][1].experiment_id).name,
        f"compare-{plan.name}",
        result.key,
        started_s=result.began_s,
        params={
            "arms": ", ".join(arm.label for arm in plan.arms),
            "baseline": plan.baseline,
            "margin": plan.margin,
            "common": " ".join(redacted_arguments(plan.common)),
        },
        metrics={f"{arm.label}/{name}": value for arm in result.arms for name, value in _numbers(arm).items()},
        step=len(plan.seeds),
        tags={f"quality.{arm.label}": arm.quality.verdict for arm in result.arms if arm.quality.verdict}
        | {"mlflow.note.content": "\n\n".join(lead(result))},
        files=files,
        children={str(sent.run_id): {"arm": outcome.arm} for outcome, sent in delivered},
    )


def _numbers(arm: Any) -> dict[str, float]:
    found = {
        f"{name}_ratio": ratio.ratio.mean
        for name, ratio in (("speed", arm.speed), ("memory", arm.memory))
        if ratio.ratio and not ratio.why
    } | {
        "loss_difference": arm.quality.test and arm.quality.test.difference.mean,
    }
    return {name: value for name, value in found.items() if value is not None}
