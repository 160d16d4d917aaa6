"""What a run folder tells the comparison of a killed run: the trace of every step, the last checkpoint, the log."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from evidence.certificate.child import TRACE_FILE
from mantissa.differences import Differences, Lines, Record, compare, leaves
from trainer.checkpoint.reader import load
from trainer.files import METRICS_FILE, read_json_lines

_CLOCKS = ("time", "step_time_s", "mfu", "memory_bytes", "checkpoint_stall_s")


def differences_between(whole: Path, killed: Path, last_step: int) -> Differences:
    """Compare the folders of the uninterrupted and the killed run, with their checkpoints of ``last_step``."""
    return compare(_record(whole, last_step), _record(killed, last_step))


def _record(run: Path, last_step: int) -> Record:
    starts: list[Lines] = [{}]
    for line in trace(run):
        if "resumed_after" in line:
            starts.append({})
        elif "step" in line:
            starts[-1].setdefault(line.pop("step"), []).append(json.dumps(line))
    saved = load(run / "checkpoints", last_step)
    parts = {"tensor": saved.tensors(), "progress": saved.progress, METRICS_FILE: [*map(json.dumps, metrics(run))]}
    values = {(part, "", name): value for part, held in parts.items() for name, value in leaves(held)}
    return Record(starts, [{} for _ in starts], [values])


def trace(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a trace, without incomplete ones (after a kill)."""
    lines = []
    for line in (run / TRACE_FILE).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metric log without times and memory, which differ between equal runs."""
    return [
        {key: value for key, value in line.items() if key not in _CLOCKS and not key.endswith("_per_s")}
        for line in read_json_lines(run / METRICS_FILE)
    ]
