"""``mantissa.precision_gate``: a test that fails where a precision changes what training reaches."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from mantissa.errors import UsageError, check_number, check_type, names_in
from mantissa.verdict.comparison import Comparison
from mantissa.verdict.report import report as report_of
from mantissa.verdict.report import write
from mantissa.verdict.runs import Run, Store
from mantissa.verdict.statistics import EQUIVALENT, INCONCLUSIVE


def precision_gate(
    train: Callable[[str, int], float],
    arms: Sequence[str] = ("fp32", "bf16"),
    *,
    margin: float = 0.003,
    seeds: int = 4,
    max_seeds: int | None = None,
    higher_is_better: bool = False,
    report: str | Path = "mantissa-gate",
) -> Comparison:
    """Train with each precision and seed, in turns, and fail unless every arm is EQUIVALENT to the first.

    WORSE fails, and so does BETTER: the precision changes the training. INCONCLUSIVE trains on to ``max_seeds``, and
    fails if that does not decide it: a gate that lets pass what it cannot tell protects nothing. The chance that an arm
    passes whose true difference is the margin or more is at most 4.5 %, 4 % with ``seeds`` and 0.5 % with more, where
    the differences are about normal; where they are strongly skewed it may be 3.7 to 5.7 times that.

    Args:
        train: takes a precision and a seed, trains from nothing, and returns the final loss.
        arms: the precisions, as ``train`` knows them; the first is the baseline.
        margin: the relative difference that is too small to matter; 0.003 is 0.3 %.
        seeds: how many, from 0 on; 3 or more.
        max_seeds: how many if those do not decide it; default: four times as many.
        higher_is_better: whether ``train`` returns something like an accuracy.
        report: folder of the page, which is replaced.

    Returns:
        The comparison, with the verdicts.

    Raises:
        AssertionError: an arm is not EQUIVALENT; the message is the report.
        UsageError: an argument cannot work.
    """
    __tracebackhide__ = True  # pytest shows the report, and none of this
    check_type("train", train, callable(train), "a function of a precision and a seed")
    check_number("seeds", seeds, 4)
    check_number("max_seeds", seeds if max_seeds is None else max_seeds, 16)
    if max_seeds is not None and max_seeds < seeds:
        raise UsageError(f"max_seeds={max_seeds} is below seeds={seeds}")
    with suppress(ValueError):  # a builtin has no signature
        signature = inspect.signature(train, follow_wrapped=False)
        try:
            signature.bind("fp32", 0)
        except TypeError as error:
            raise UsageError(f"train is called as train(precision, seed), which it does not take: {error}") from None
    arms = names_in("arms", arms)
    if len(set(arms)) < max(2, len(arms)):
        raise UsageError(f"arms {arms!r} must be two or more different precisions, such as ('fp32', 'bf16')")

    def run(arm: str, seed: int) -> Run:
        __tracebackhide__ = True
        began = time.monotonic()
        returned = train(arm, seed)
        returned = returned.detach() if isinstance(returned, Tensor) else returned
        seconds = time.monotonic() - began
        try:
            loss = float(returned)
        except (TypeError, ValueError, RuntimeError):  # of a list, of text, and of a tensor
            raise UsageError(f"train must return the final loss, a number, and returned {returned!r:.60}") from None
        values = {"loss": loss if math.isfinite(loss) else None, "minutes": seconds / 60}
        return Run(arm, seed, values, seconds)

    comparison = Comparison(dict.fromkeys(arms, "train(…)"), "loss", margin, higher_is_better)
    store = Store()  # a gate measures anew each time
    for count in dict.fromkeys((seeds, max_seeds or 4 * seeds)):
        comparison.run(range(count), run, store)
        if {quality.verdict for quality in comparison.verdicts.values()} - {"", EQUIVALENT} != {INCONCLUSIVE}:
            break  # more seeds would decide nothing, or change nothing
    for arm, row in comparison.rows.items():
        if row.quality.differences and not any(row.quality.differences):
            warnings.warn(f"{arm} is equal to {comparison.baseline} in every digit; does train use it?", stacklevel=2)
    called = f"mantissa.precision_gate(…, arms={tuple(arms)})"
    page = write(comparison, report, called)
    if not comparison.equivalent:
        raise AssertionError(f"{report_of(comparison, called).text()}\n\nreport {page}")
    return comparison
