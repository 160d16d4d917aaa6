"""Whether the advised setting computes right: the doctor's check-up of a step, and on request an equivalence test."""

from __future__ import annotations

import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evidence.advice.experiment import overrides_of
from evidence.advice.schema import Advice
from evidence.comparison.compare import Comparison, check_arms, compare
from evidence.comparison.report import write_report
from evidence.doctor.report import VERDICT
from evidence.runs import Arm, in_a_process, merged
from mantissa.display import duration
from mantissa.doctor.diagnosis import EXIT_CODES, HEALTHY
from mantissa.statistics import EQUIVALENT, INCONCLUSIVE
from trainer.config.compose import compose, quoted
from trainer.errors import RunError, UserError, first_line
from trainer.files import PROJECT, read_object
from trainer.hardware import Hardware, detect

SAMPLES = 2
"""Of the step that is examined, at most: formats do not depend on their number, and batch norm needs two."""
CHECKS = ("ladder", "manifest", "range", "pairs", "updates")
"""Of the doctor's, those that need few steps."""
BUDGET_S, LIMIT_S = 30, 180.0
"""For the doctor's checks; and for all of it, with the start of its process and the part that is running at the end."""
Launch = Callable[[list[str], Path, float], int]
"""Runs a command line, its output going to a file, and returns its exit code; a ``TimeoutExpired`` after some time."""


def check(overrides: Sequence[str], hardware: Hardware, folder: Path, launch: Launch = in_a_process) -> dict[str, Any]:
    """Examine the first step of a setting as scripts/doctor.py does, in a process of its own, with few samples.

    Args:
        overrides: of the setting, see ``overrides_of``.
        hardware: where it runs.
        folder: of the advice; the doctor's report goes below it.
        launch: runs the doctor.

    Returns:
        ``faults``: what the doctor found, in words; ``missed``: what it did not examine, and why; ``healthy``: whether
        it found nothing and ended. A setting that could not be examined is not healthy and has no faults.
    """
    samples = min(SAMPLES, compose(overrides).resolve(hardware).plan.batching.micro_batch_size)
    own = [f"batch_size={samples}", f"micro_batch_size={samples}", f"output_dir={quoted(str(folder))}", "run_name=null"]
    options = [f"check={','.join(CHECKS)}", f"budget_s={BUDGET_S}"]
    command = [sys.executable, str(PROJECT / "scripts" / "doctor.py"), *merged(overrides, own), *options]
    for path in folder.glob(f"doctor/*/{VERDICT}"):
        path.unlink()  # of another candidate; the one that appears is of this
    try:
        code = launch(command, folder / "doctor.log", LIMIT_S)
    except subprocess.TimeoutExpired:
        return _unexamined(f"the doctor did not end within {LIMIT_S:.0f} s")
    found = next((read_object(path) for path in folder.glob(f"doctor/*/{VERDICT}")), {})
    if code not in EXIT_CODES.values() or "findings" not in found:
        return _unexamined(f"the doctor ended with exit code {code}; run it: {shlex.join(['python', *command[1:]])}")
    return {
        "faults": [_in_words(finding) for finding in found["findings"]],
        "missed": [f"left out: {item}" for item in found.get("left_out", [])],
        "healthy": found["verdict"] == HEALTHY,
        "samples": samples,
    }


def _unexamined(why: str) -> dict[str, Any]:
    return {"faults": [], "missed": [f"not examined: {why}"], "healthy": False}


def _in_words(finding: dict[str, Any]) -> str:
    what = " ".join(filter(None, [finding["op"], finding["dtype"]]))
    place = f"{finding['kind']}, {finding['direction']}: {finding['module'] or 'the model itself, or the loss'}"
    detail = ": ".join(filter(None, [what, finding["detail"]]))
    return f"{place} ({detail})" if detail else place


BASELINE, ADVISED = "baseline", "advised"
"""The arms of the equivalence test."""
MARGIN = 0.003
"""The relative difference of the loss that is too small to matter."""
PAIRS = 5
"""Of runs, at most."""
LEAST_STEPS = 40
"""Of a run, so that the loss has begun to fall."""
START_S = 12.0
"""That a run takes besides its steps."""
EVALUATION = 1.2
"""A run with its evaluation over its steps alone."""


def quality(advice: Advice, folder: Path, left_s: float, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Train the winner and the baseline with several seeds, and test whether the final losses are equivalent.

    Args:
        advice: with a winner.
        folder: of the advice; the runs go to ``folder/compare``.
        left_s: seconds for it.
        show: called with lines of progress.

    Returns:
        ``verdict``, ``margin`` and ``why``; where it was tested also ``difference`` (mean, low, high, level),
        ``pairs``, ``steps`` and ``report``. INCONCLUSIVE where there is no time.
    """
    found = {"verdict": EQUIVALENT, "margin": MARGIN, "why": "the advised setting is the baseline"}
    if advice.winner == advice.baseline:
        return found
    try:
        return found | _tested(advice, folder, left_s, show)
    except RunError as error:
        return found | {"verdict": INCONCLUSIVE, "why": first_line(error)}


def fitting(advice: Advice, left_s: float, most_steps: int) -> tuple[int, int]:
    """Return how many pairs fit, and of how many steps. Both follow from step times, and so not from the losses.

    Raises:
        UserError: there is no time for two pairs; it says for how long there would be.
    """
    entries = [advice.entry(advice.baseline), advice.entry(advice.winner)]
    step_s = EVALUATION * sum(statistics.median(entry.step_s) for entry in entries)
    start_s = 2 * START_S + sum(entry.compile_s for entry in entries)
    least = min(LEAST_STEPS, most_steps)
    least_s = start_s + least * step_s
    pairs = min(PAIRS, int(left_s / least_s))
    if pairs < 2:
        raise UserError(
            f"two pairs of {least} steps need about {duration(2 * least_s)}, and {duration(max(0.0, left_s))} are "
            f"left; set budget_minutes={math.ceil((advice.spent_s + 2 * least_s) / 60) + 1}"
        )
    return pairs, min(int((left_s / pairs - start_s) / step_s), most_steps)


def _tested(advice: Advice, folder: Path, left_s: float, show: Callable[[str], None]) -> dict[str, Any]:
    settings = {
        name: overrides_of(advice.overrides, advice.entry(label).candidate)
        for name, label in {BASELINE: advice.baseline, ADVISED: advice.winner}.items()
    }
    default = compose(settings[BASELINE])
    pairs, steps = fitting(advice, left_s, default.resolve(detect(default.device)).plan.steps)
    common = ["tracking=local", "checkpoint=none", "profiler=none", "log_every=10"]
    common += ["epochs=null", "early_stopping.patience=null", f"steps={steps}", f"eval_every={steps}"]
    arms = [Arm(name, tuple(merged(overrides, common))) for name, overrides in settings.items()]
    name = f"quality-{advice.key[:8]}-{steps}"
    comparison = Comparison(arms, BASELINE, list(range(pairs)), MARGIN, common, folder, name)
    show(f"quality: {pairs} pairs of {steps} steps, in about {duration(left_s)} at most")
    result = compare(comparison, check_arms(comparison), show)
    judged = next(arm for arm in result.arms if arm.label == ADVISED).quality
    report, *_ = write_report(result, ["python", "scripts/advise.py", *advice.overrides, "quality=true"])
    facts = {"pairs": len(judged.differences), "steps": steps, "report": str(report)}
    if (test := judged.test) is not None:
        facts["difference"] = {name: getattr(test.difference, name) for name in ("mean", "low", "high", "level")}
    return {"verdict": judged.verdict, "why": judged.why} | facts
