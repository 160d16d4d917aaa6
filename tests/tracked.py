"""Runs that a test tracks itself, and what an SQLite store then holds of them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from trainer.checkpoint.schema import FORMAT, KINDS
from trainer.files import sha256, write_json
from trainer.tracking.log import MetricLog
from trainer.tracking.options import Tracking
from trainer.tracking.tracked_run import TrackedRun

OPTIONS = {field.name for field in fields(Tracking)} - {"experiment"}


def open_log(path: Path, resume_step: int | None = None, **options: Any) -> MetricLog:
    """Open a metric log; ``options`` are those of ``Tracking`` and of ``TrackedRun``."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"system_metrics": False, "flush_every_s": 0.05, "upload_timeout_s": 300.0}
    run: dict[str, Any] = {"experiment": "e", "params": {"seed": 0}, "tags": {"precision": "bf16"}}
    run["checkpoints"] = config["checkpoints"] = options.pop("checkpoints", "last")
    for key, value in options.items():
        (config if key in OPTIONS else run)[key] = value
    opened = MetricLog(Tracking(**config), path, TrackedRun(name=path.name, **run))
    opened.begin(resume_step)
    return opened


def tracked(path: Path, steps: int = 1, status: str = "FINISHED", **options: Any) -> MetricLog:
    """Track a run to its end, with a loss at each of the steps that it has not logged."""
    opened = open_log(path, **options)
    for step in range((options.get("resume_step") or 0) + 1, steps + 1):
        opened.append(step, {"loss": float(step)})
    opened.close(status, {})
    return opened


def save(path: Path, step: int, score: float | None = None) -> Path:
    """Make a checkpoint that is whole, without weights."""
    folder = path / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(f'{{"step": {step}}}')
    for kind in KINDS:
        save_file({}, folder / f"{kind}.safetensors")
    hashes = {file.name: sha256(file) for file in folder.iterdir()}
    write_json(folder / "manifest.json", {"format": FORMAT, "step": step, "score": score, "sha256": hashes})
    return folder


def run_id(path: Path) -> str:
    """MLflow's id of a run, which its folder knows."""
    return str(TrackedRun.read(path).run_id)


def asked(uri: str, query: str, *values: str) -> list[Any]:
    """The rows of a query to a store."""
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        return database.execute(query, values).fetchall()


def points(uri: str, key: str = "train/loss") -> dict[str, Counter[int]]:
    """By the run's name, how often each step of a metric is stored."""
    found: dict[str, Counter[int]] = {}
    for name, step in asked(uri, "select name, step from metrics join runs using (run_uuid) where key = ?", key):
        found.setdefault(name, Counter())[step] += 1
    return found


def runs(uri: str) -> list[tuple[str, str]]:
    """Names and statuses."""
    return asked(uri, "select name, status from runs order by name")


def once(steps: int) -> Counter[int]:
    """Each step once."""
    return Counter(range(1, steps + 1))
