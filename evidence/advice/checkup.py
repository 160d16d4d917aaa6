"""Whether the advised setting computes right: the doctor's check-up of a step."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence.runs import merge_overrides
from mantissa import shell
from mantissa.doctor.diagnosis import EXIT_CODES, HEALTHY
from mantissa.doctor.report import VERDICT
from mantissa.finding import CRASH, Finding
from trainer.config.command_line import quoted
from trainer.config.compose import compose
from trainer.files import PROJECT, read_object
from trainer.hardware import Hardware

SAMPLES = 2
"""Number of samples in the step that is examined, at most: formats do not depend on it, and batch norm needs two."""
CHECKS = ("formats", "manifest", "range", "modules", "updates")
"""Checks of the doctor that need few steps."""
BUDGET_S, LIMIT_S = 30, 180.0
"""Seconds for the doctor's checks; and for all of it, with the start of its process and the end of a part."""


def check(overrides: Sequence[str], hardware: Hardware, folder: Path) -> dict[str, Any]:
    """Examine the first step of a setting as scripts/doctor.py does, in a process of its own, with few samples.

    Args:
        overrides: of the setting.
        hardware: where it runs.
        folder: of the advice; the doctor's report goes below it.

    Returns:
        ``faults``: what the doctor found, in words; ``missed``: what it did not examine, and why; ``healthy``: whether
        it found nothing and ended. A setting that could not be examined is not healthy and has no faults.
    """
    samples = min(SAMPLES, compose(overrides).plan(hardware).batching.micro_batch_size)
    own = [f"batch_size={samples}", f"micro_batch_size={samples}", f"output_dir={quoted(str(folder))}", "run_name=null"]
    options = [f"check={','.join(CHECKS)}", f"budget_s={BUDGET_S}"]
    command = [sys.executable, str(PROJECT / "scripts" / "doctor.py"), *merge_overrides(overrides, own), *options]
    for path in folder.glob(f"doctor/*/{VERDICT}"):
        path.unlink()  # of another candidate; the one that appears is of this
    code = shell.run(command, folder / "doctor.log", limit_s=LIMIT_S).code
    if code is None:
        return _unexamined(f"the doctor did not end within {LIMIT_S:.0f} s")
    found = next((read_object(path) for path in folder.glob(f"doctor/*/{VERDICT}")), {})
    if code not in EXIT_CODES.values() or "findings" not in found:
        return _unexamined(f"the doctor ended with exit code {code}; run it: {shlex.join(['python', *command[1:]])}")
    return {
        "faults": ["; ".join(Finding(**finding).parts) for finding in found["findings"] if finding["kind"] != CRASH],
        "missed": [f"crashed: {part}" for part in found["crashes"]]
        + [f"left out: {item}" for item in found["left_out"]],
        "healthy": found["verdict"] == HEALTHY,
    }


def _unexamined(why: str) -> dict[str, Any]:
    return {"faults": [], "missed": [f"not examined: {why}"], "healthy": False}
