"""Whether the advised setting computes right: the doctor's check-up of a step, and on request an equivalence test."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from evidence.advice.experiment import overrides_of
from evidence.advice.schema import Advice
from evidence.comparison.compare import Comparison, check_arms, compare
from evidence.comparison.report import write_report
from evidence.doctor.diagnosis import EXIT_CODES
from evidence.doctor.report import VERDICT
from evidence.intervals import EQUIVALENT, INCONCLUSIVE
from evidence.runs import Arm, Runner, merged
from trainer.config.compose import compose, quoted
from trainer.errors import RunError, UserError, first_line
from trainer.files import PROJECT, make_folder, read_object, write_json
from trainer.formats import duration
from trainer.hardware import Hardware, detect

SAMPLES = 2
"""Of the step that is examined, at most: formats do not depend on their number, and batch norm needs two."""
CHECKS = ("ladder", "manifest", "range", "pairs", "updates")
"""Of the doctor's, those that need few steps."""
BUDGET_S, LIMIT_S = 30, 180.0
"""For the doctor's checks; and for all of it, with the start of its process and the part that is running at the end."""

NOT_EXAMINED = ("left out", "not examined")
"""Begin the notes on what the doctor did not do."""

Launch = Callable[[list[str], float], int]
"""Runs a command line for at most so many seconds and returns its exit code; a ``TimeoutExpired`` beyond that."""


def check(overrides: Sequence[str], hardware: Hardware, folder: Path, launch: Launch | None = None) -> dict[str, Any]:
    """Examine the first step of a setting as scripts/doctor.py does, in a process of its own, with few samples.

    Args:
        overrides: of the setting, see ``overrides_of``.
        hardware: where it runs.
        folder: of the advice; the doctor's report goes below it.
        launch: runs the doctor; None: as a process.

    Returns:
        ``faults``: what the doctor found, in words; ``notes``; ``healthy``: whether it found nothing and ended.
        A setting that could not be examined is not healthy and has no faults.
    """
    try:
        plan = compose(overrides).resolve(hardware).plan
    except RunError as error:
        return _unexamined(first_line(error))
    samples = min(SAMPLES, plan.batching.micro_batch_size)
    own = [f"batch_size={samples}", f"micro_batch_size={samples}", f"output_dir={quoted(str(folder))}", "run_name=null"]
    options = [f"check={','.join(CHECKS)}", f"budget_s={BUDGET_S}"]
    command = [sys.executable, str(PROJECT / "scripts" / "doctor.py"), *merged(overrides, own), *options]
    reports = folder / "doctor"
    before = set(reports.glob(f"*/{VERDICT}"))
    try:
        make_folder(folder)
        for path in before:
            path.unlink()  # of another candidate; the one that appears is of this
        code = (launch or _run)(command, LIMIT_S)
    except subprocess.TimeoutExpired:
        return _unexamined(f"the doctor did not end within {LIMIT_S:.0f} s")
    except OSError as error:
        return _unexamined(f"the doctor could not be run ({error.strerror})")
    found = next((read_object(path) for path in sorted(reports.glob(f"*/{VERDICT}"))), {})
    if code not in EXIT_CODES.values() or "findings" not in found:
        return _unexamined(f"the doctor ended with exit code {code}; run it: {shlex.join(['python', *command[1:]])}")
    faults = [_in_words(finding) for finding in found["findings"]]
    missing = [f"{NOT_EXAMINED[0]}: {item}" for item in found.get("left_out", [])]
    return {
        "faults": faults,
        "notes": [*found.get("notes", []), *missing],
        "healthy": found["verdict"] == next(iter(EXIT_CODES)),
        "samples": samples,
    }


def _unexamined(why: str) -> dict[str, Any]:
    return {"faults": [], "notes": [f"{NOT_EXAMINED[1]}: {why}"], "healthy": False}


def _in_words(finding: dict[str, Any]) -> str:
    what = " ".join(filter(None, [finding["op"], finding["dtype"]]))
    place = f"{finding['kind']}, {finding['direction']}: {finding['module'] or 'the model itself, or the loss'}"
    detail = ": ".join(filter(None, [what, finding["detail"]]))
    return f"{place} ({detail})" if detail else place


def _run(command: list[str], limit_s: float) -> int:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.run(command, timeout=limit_s, check=False, **quiet).returncode  # type: ignore[call-overload]


BASELINE, ADVISED = "baseline", "advised"
"""The arms of the equivalence test."""
MARGIN = 0.003
PAIRS = 5
"""Of runs, at most."""
LEAST_STEPS = 40
"""Of a run, so that the loss has begun to fall."""
START_S = 12.0
"""That a run takes besides its steps."""
EVALUATION = 1.2
"""A run with its evaluation over its steps alone."""


@dataclass(frozen=True)
class Size:
    """Of an equivalence test that fits into a time."""

    pairs: int
    steps: int
    seconds: float
    """That are expected for all of it."""


def quality(
    advice: Advice, folder: Path, left_s: float, show: Callable[[str], None] = print, margin: float = MARGIN
) -> dict[str, Any]:
    """Train the winner and the baseline with several seeds, and test whether the final losses are equivalent.

    The number of steps follows from the step times that were measured, the number of seeds from the time that the
    first pair took; neither depends on the losses.

    Args:
        advice: with a winner.
        folder: of the advice; the runs go to ``folder/compare``.
        left_s: seconds for it.
        show: called with lines of progress.
        margin: the relative difference of the loss that is too small to matter.

    Returns:
        ``verdict``, ``margin`` and ``why``; where it was tested also ``difference`` (mean, low, high, level),
        ``pairs``, ``steps``, ``seconds`` and ``report``. INCONCLUSIVE where there is no time.
    """
    began = time.monotonic()
    if advice.winner == advice.baseline:
        return {"verdict": EQUIVALENT, "margin": margin, "why": "the advised setting is the baseline"}
    try:
        return _tested(advice, folder, began + left_s, began, show, margin)
    except RunError as error:
        return {"verdict": INCONCLUSIVE, "margin": margin, "why": first_line(error)}


def fitting(advice: Advice, left_s: float, most_steps: int) -> Size:
    """Return the size of the test, as many pairs as fit.

    Raises:
        UserError: there is no time for two pairs; it says for how long there would be.
    """
    entries = [advice.entry(advice.baseline), advice.entry(advice.winner)]
    pair_step_s = EVALUATION * sum(statistics.median(entry.step_s) for entry in entries)
    start_s = 2 * START_S + sum(entry.compile_s for entry in entries)
    least = min(LEAST_STEPS, most_steps)
    for pairs in range(PAIRS, 1, -1):
        steps = int((left_s / pairs - start_s) / pair_step_s)
        if steps >= least:
            steps = min(steps, most_steps)
            return Size(pairs, steps, pairs * (start_s + steps * pair_step_s))
    need = 2 * (start_s + least * pair_step_s)
    raise UserError(
        f"two pairs of {least} steps need about {duration(need)}, and {duration(max(0.0, left_s))} are left; "
        f"set budget_minutes={math.ceil((advice.spent_s + need) / 60) + 1}"
    )


def _tested(
    advice: Advice, folder: Path, deadline: float, began: float, show: Callable[[str], None], margin: float
) -> dict[str, Any]:
    candidates = {BASELINE: advice.entry(advice.baseline).candidate, ADVISED: advice.entry(advice.winner).candidate}
    size, plan = _size(advice, folder, deadline - time.monotonic())
    given = [*_GIVEN, f"steps={size.steps}", f"eval_every={size.steps}"]
    arms = [Arm(name, tuple(merged(overrides_of(advice.overrides, each), given))) for name, each in candidates.items()]
    comparison = Comparison(arms, BASELINE, [0, 1], margin, list(_ADDED), folder, plan.stem)
    configs = check_arms(comparison)
    show(f"quality: up to {size.pairs} pairs of {size.steps} steps, about {duration(size.seconds)}")
    runner, first = Runner(comparison.folder, comparison.common), time.monotonic()
    missing = [arm for arm in arms if runner.done(arm, 0) is None]
    for arm in missing:  # the comparison finds these runs done
        runner.run(arm, 0)
    if len(missing) == len(arms):
        pair_s, left_s = time.monotonic() - first, deadline - time.monotonic()
        more = int(left_s / pair_s)
        if more < 1:
            raise UserError(
                f"one pair took {duration(pair_s)}, which left no time for a second; set a larger budget_minutes"
            )
        size = replace(size, pairs=min(size.pairs, 1 + more))
        write_json(plan, asdict(size))
    comparison.seeds = list(range(size.pairs))
    result = compare(comparison, configs, show)
    advised = next(arm for arm in result.arms if arm.label == ADVISED)
    found: dict[str, Any] = {"verdict": advised.quality.verdict, "margin": margin, "why": advised.quality.why}
    if (test := advised.quality.test) is not None:
        found["difference"] = {name: getattr(test.difference, name) for name in ("mean", "low", "high", "level")}
    files = write_report(result, ["python", "scripts/advise.py", *advice.overrides, "quality=true"])
    return found | {
        "pairs": len(advised.quality.differences),
        "steps": size.steps,
        "seconds": time.monotonic() - began,
        "report": str(files[0]),
    }


_ADDED = ("checkpoint=none", "profiler=none")
_GIVEN = ("tracking=local", *_ADDED, "epochs=null", "early_stopping.patience=null", "log_every=10")


def _size(advice: Advice, folder: Path, left_s: float) -> tuple[Size, Path]:
    """Return the size of the test, and the file that keeps it for a call that continues after an interruption."""
    of = [advice.winner, advice.baseline, advice.overrides, advice.git, advice.versions]
    plan = folder / f"quality-{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:10]}.json"
    if known := read_object(plan):
        return Size(**known), plan
    config = compose(overrides_of(advice.overrides, advice.entry(advice.baseline).candidate))
    size = fitting(advice, left_s, config.resolve(detect(config.device)).plan.steps)
    make_folder(folder)
    write_json(plan, asdict(size))
    return size, plan
