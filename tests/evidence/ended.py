"""Run folders as train.py leaves them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence.runs import Outcome


def ended(
    folder: Path,
    arm: str,
    seed: int,
    steps: Sequence[int],
    losses: Sequence[float | None],
    ledger: dict[str, int] | None = None,
    *,
    to_disk: bool = False,
    **summary: Any,
) -> Outcome:
    """Write a run that has ended, and return its outcome.

    Args:
        folder: of all runs.
        arm: its label.
        seed: of the pair.
        steps: at which it was evaluated.
        losses: of the validation; None or not finite: it was not finite.
        ledger: bytes at the peak by category; None: not recorded.
        to_disk: whether its summary is written, too.
        **summary: what its summary has besides the defaults.
    """
    run = folder / f"{arm}-s{seed}"
    run.mkdir(parents=True)
    losses = [loss if loss is not None and math.isfinite(loss) else None for loss in losses]
    lines = [{"step": step, "valid/loss": loss} for step, loss in zip(steps, losses, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if ledger:
        (run / "profile").mkdir()
        record = {"peak_bytes": sum(ledger.values()), "at_peak": ledger}
        (run / "profile" / "ledger.json").write_text(json.dumps(record))
    common = {
        "status": "FINISHED",
        "final": {"valid/loss": losses[-1]},
        "unit": "samples",
        "units_per_s": 100.0,
        "peak_memory_bytes": 7_000,
        "hardware": {"device": "cpu"},
        "skipped_steps": 0,
        "fp32_arithmetic": None,
    }
    if to_disk:
        (run / "summary.json").write_text(json.dumps(common | summary))
    return Outcome(arm, seed, run, 0, summary=common | summary)
