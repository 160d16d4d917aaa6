"""The reasons for the outcome of a claim, as sentences from measurements: operator times, ledgers, the null arm."""

from __future__ import annotations

import math
from typing import Any

from evidence.claims.claims import NULL_ARM
from evidence.claims.criteria import Finding, number
from evidence.measures import MEASURES, measured
from evidence.operators import PRODUCTS
from evidence.runs import DIVERGED, Arm, Outcome, Runner
from mantissa.display import size
from trainer.files import read_object
from trainer.profiling.ledger import STEADY

_OPERATORS, _LEDGER = "operators", "ledger"
_EXTRA = {
    _OPERATORS: (
        *("profiler=torch", "profiler.wait=1", "profiler.warmup=1", "profiler.active=2"),
        *("profiler.record_shapes=false", "steps=4"),
    ),
    _LEDGER: ("profiler=memory", "profiler.at_step=2", "steps=2"),
}
"""Short runs under a profiler: what is added to the arm's name (and the file that it writes), and the overrides."""
MOST = 3
"""Sentences for a claim."""


def reasons(findings: list[Finding], arms: list[Arm], outcomes: list[Outcome], runner: Runner, most: int) -> list[str]:
    """Return up to ``most`` sentences, one for each criterion that decided; short extra runs measure what it needs."""
    by_name = {arm.label: arm for arm in arms}
    sentences: list[str] = []
    for finding in findings:
        criterion = finding.criterion
        if not criterion.decides or finding.median is None:
            continue
        for name, other in zip(criterion.arm, criterion.over or criterion.minus or criterion.arm, strict=True):
            if len(sentences) == most:
                return sentences
            one, base = by_name[name], by_name[other]
            if criterion.measure == "speed":
                sentence = _time_sentence(one, base, runner)
            elif criterion.measure == "memory":
                sentence = _memory_sentence(one, base, runner)
            elif criterion.measure in ("loss", "best_loss"):
                null = NULL_ARM in by_name and by_name[NULL_ARM].overrides == base.overrides
                sentence = _loss_sentence(name, other, outcomes, criterion.measure, null)
            else:
                sentence = _values_sentence(criterion.measure, criterion.arms, outcomes)
            if sentence and sentence not in sentences:
                sentences.append(sentence)
    return sentences


def _time_sentence(arm: Arm, base: Arm, runner: Runner) -> str:
    compiled = any(_is_compiled(each) for each in (arm, base))
    found = [_operator_ms(each, runner, compiled) for each in (arm, base)]
    if min(min(times) for times in found) <= 0:
        return ""
    (products, rest), (base_products, base_rest) = found
    return (
        f"Matrix products, convolutions and attention are {base_products / (base_products + base_rest):.0%} of the "
        f"{'step' if compiled else 'operator'} time of {base.label} and {products / (products + rest):.0%} of "
        f"{arm.label}'s; in {arm.label} they take {products / base_products:.2f}x the time, everything else "
        f"{rest / base_rest:.2f}x."
    )


def _memory_sentence(arm: Arm, base: Arm, runner: Runner) -> str:
    one, other = (_ledger(each, runner) for each in (arm, base))
    if not (one and other):
        return ""
    held = sum(other["at_peak"][name] for name in STEADY) / other["peak_bytes"]
    kept = sum(one["steady"].values()) / sum(other["steady"].values())
    activations, copies = (
        [size(ledger["highest"][name]) for ledger in (other, one)] for name in ("activations", "autocast_copies")
    )
    return (
        f"By the ledger {base.label} peaks at {size(other['peak_bytes'])}, {held:.0%} of it weights, "
        f"gradients and optimizer state, which come to {kept:.2f}x that in {arm.label}; activations reach "
        f"{activations[0]} in {base.label} and {activations[1]} in {arm.label}, copies of weights in 16 bits "
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


def _is_compiled(arm: Arm) -> bool:
    modes = [text.partition("=")[2] for text in arm.overrides if text.partition("=")[0] in ("compile", "compile.mode")]
    return modes[-1:] not in ([], ["off"])


def _operator_ms(arm: Arm, runner: Runner, compiled: bool) -> tuple[float, float]:
    """Return milliseconds of a step: matrix products, and the other operators; 0 where they are not known.

    ``compiled``: the second is the rest of the measured step, for the operators that torch.compile fuses have no time
    of their own.
    """
    record = _profile(arm, _OPERATORS, runner)
    if not record:
        return 0.0, 0.0
    times = {name.removeprefix("aten::"): us / record["steps"] / 1e3 for name, us in record["self_time_us"].items()}
    products = sum(ms for name, ms in times.items() if PRODUCTS.search(name))
    if not compiled:
        return products, sum(times.values()) - products
    run = runner.done(arm, 0)
    step_s = run.summary.get("step_time_s") if run else None
    return products, 0.0 if step_s is None else 1e3 * step_s - products


def _ledger(arm: Arm, runner: Runner) -> dict[str, Any]:
    done = runner.done(arm, 0)
    return (done and done.ledger) or _profile(arm, _LEDGER, runner)


def _profile(arm: Arm, kind: str, runner: Runner) -> dict[str, Any]:
    """Run an arm for a few steps under a profiler, and return what that has written; empty where it failed."""
    short = Arm(f"{arm.label}-{kind}", (*arm.overrides, *_EXTRA[kind]), arm.seed_shift)
    folder = (runner.done(short, 0) or runner.run(short, 0)).folder
    return read_object(folder / "profile" / f"{kind}.json")
