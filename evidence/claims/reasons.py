"""The reasons for the outcome of a claim, as sentences from what its runs recorded: losses, ledgers, the null arm."""

from __future__ import annotations

import math

from evidence.claims.claims import NULL_ARM
from evidence.claims.criteria import Finding, number
from evidence.measures import MEASURES, TIMED, measured
from evidence.runs import DIVERGED, Arm, Outcome
from mantissa.display import size
from mantissa.ledger import STEADY

MOST = 3
"""Sentences for a claim."""


def reasons(findings: list[Finding], arms: list[Arm], outcomes: list[Outcome]) -> list[str]:
    """Return up to ``MOST`` sentences on the criteria that decided; a run says nothing about its own speed."""
    by_name = {arm.label: arm for arm in arms}
    sentences: list[str] = []
    for finding in findings:
        criterion = finding.criterion
        if not criterion.decides or finding.median is None or criterion.measure in TIMED:
            continue
        for name, other in zip(criterion.arm, criterion.over or criterion.minus or criterion.arm, strict=True):
            if len(sentences) == MOST:
                return sentences
            if criterion.measure == "memory":
                sentence = _memory_sentence(name, other, outcomes)
            elif criterion.measure in ("loss", "best_loss"):
                null = NULL_ARM in by_name and by_name[NULL_ARM].overrides == by_name[other].overrides
                sentence = _loss_sentence(name, other, outcomes, criterion.measure, null)
            else:
                sentence = _values_sentence(criterion.measure, criterion.arms, outcomes)
            if sentence and sentence not in sentences:
                sentences.append(sentence)
    return sentences


def _memory_sentence(name: str, base: str, outcomes: list[Outcome]) -> str:
    one, other = (next((run.ledger for run in outcomes if run.arm == arm), None) for arm in (name, base))
    if not (one and other):
        return ""
    held = sum(other["at_peak"][category] for category in STEADY) / other["peak_bytes"]
    kept = sum(one["steady"].values()) / sum(other["steady"].values())
    activations, copies = (
        [size(ledger["highest"][category]) for ledger in (other, one)]
        for category in ("activations", "autocast_copies")
    )
    return (
        f"By the ledger {base} peaks at {size(other['peak_bytes'])}, {held:.0%} of it weights, "
        f"gradients and optimizer state, which come to {kept:.2f}x that in {name}; activations reach "
        f"{activations[0]} in {base} and {activations[1]} in {name}, copies of weights in 16 bits "
        f"{copies[0]} and {copies[1]}."
    )


def _loss_sentence(name: str, other: str, outcomes: list[Outcome], measure: str, null: bool) -> str:
    """Return how the losses differ; ``null``: the null arm is ``other`` with other seeds."""
    runs = {(run.arm, run.seed): run for run in outcomes}
    seeds = sorted({run.seed for run in outcomes})

    def differences(arm: str, base: str) -> list[float]:
        pairs = [(runs.get((arm, seed)), runs.get((base, seed))) for seed in seeds]
        found = [(measured(a, measure), measured(b, measure)) for a, b in pairs if a and b]
        return [abs(a / b - 1) for a, b in found if a is not None and b and math.isfinite(a) and math.isfinite(b)]

    said = []
    own = [run for run in outcomes if run.arm == name]
    done = [run.summary for run in own if run.finished]
    skips, steps = ([summary[key] for summary in done] for key in ("skipped_steps", "step"))
    if broken := [run for run in own if measured(run, measure) == math.inf]:
        # A run that ends for it logs that step last.
        ends = [run.series["lr"][0][-1] for run in broken if run.exit_code == DIVERGED and "lr" in run.series]
        when = f", the first of them in step {min(ends):.0f}" if ends else ""
        said.append(f"{len(broken)} of {len(own)} runs of {name} turned non-finite{when}")
    if sum(skips):
        said.append(f"{name} skipped {sum(skips)} of {sum(steps)} steps for an overflow")
    norms = [norm for run in own for norm in run.series.get("grad_norm", ((), ()))[1]]
    if zeros := sum(norm == 0 for norm in norms):
        said.append(f"the gradient of {name} was exactly zero in {zeros} of {len(norms)} logged steps")
    apart = differences(name, other) if name != other else []
    noise = differences(NULL_ARM, other) if null and name != NULL_ARM else []
    if apart:
        text = f"run by run {name} and {other} differ by {_mean_percent(apart)} on average"
        said.append(text + (f", {other} and the same with other seeds by {_mean_percent(noise)}" if noise else ""))
    if not said:
        return ""
    sentence = "; ".join(said) + "."
    return sentence[0].upper() + sentence[1:] if not sentence.startswith((name, other)) else sentence


def _mean_percent(values: list[float]) -> str:
    mean = 100 * sum(values) / len(values)
    return f"{mean:,.0f} %" if mean >= 10 else f"{mean:.2g} %"


def _values_sentence(measure: str, names: list[str], outcomes: list[Outcome]) -> str:
    parts = []
    for name in dict.fromkeys(names):
        values = [value for run in outcomes if run.arm == name and (value := measured(run, measure)) is not None]
        if values:
            parts.append(f"{number(sorted(values)[len(values) // 2])} in {name}")
    called = MEASURES[measure][1] if measure in MEASURES else measure.replace("_", " ")
    return f"{called[0].upper()}{called[1:]}: {', '.join(parts)}." if parts else ""
