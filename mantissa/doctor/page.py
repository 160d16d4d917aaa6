"""The page of a diagnosis: the verdict and what to do first, then all that it rests on."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mantissa import finding as kinds
from mantissa.doctor.diagnosis import FOUND, HEALTHY, SWEEP, Diagnosis
from mantissa.doctor.pairs import FACTOR
from mantissa.doctor.sweep import BREAKS, DIFFERS, LEFT_OUT, OK
from mantissa.finding import Finding
from mantissa.page import document, items, paragraphs, plots, wide_table

MEANINGS = {
    kinds.OVERFLOW: "A number is larger than the format can hold, so it becomes infinite.",
    kinds.UNDERFLOW: "Numbers are smaller than the format can hold, so they become 0.",
    kinds.DOMAIN: "An operation has no finite result, such as 0/0, log(0) or a softmax over nothing.",
    kinds.INPUT: "A weight, a buffer or the data is not finite before the step.",
    kinds.ERROR: "The result has more rounding error than the format makes unavoidable.",
    kinds.DTYPE: "What was to be computed or stored in fp32 is in 16 bits.",
    kinds.SCALE: "No loss scale keeps the gradients of all layers in the format's range.",
    kinds.LOST: "The updates of weights are too small for the weights' format, and are rounded away.",
    kinds.MOMENT: "The optimizer's second moment is 0 where the gradient is not.",
    kinds.DIFFERENCE: "The compiled model computes other numbers than the eager one.",
    kinds.DIVERGENCE: "The loss leaves the spread of the reference within a few steps.",
}
_CLASSES = {OK: "ok", BREAKS: "breaks", DIFFERS: "differs", LEFT_OUT: "out"}

_STYLE = """
.verdict { border-left: .4rem solid #9aa0a6; padding: .1rem 0 .1rem 1rem } .verdict h1 { margin: .2rem 0 }
.verdict p { margin: .5rem 0; max-width: 60rem } .HEALTHY { border-color: #137333 } .HEALTHY h1 { color: #137333 }
.FOUND { border-color: #c5221f } .FOUND h1 { color: #c5221f } .NOT { border-color: #7a4f00 } .NOT h1 { color: #7a4f00 }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere } summary { cursor: pointer }
.ladder { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; padding: 0 }
.ladder li { border: 1px solid; border-radius: .4rem; padding: .35rem .8rem; min-width: 6.5rem }
.ladder b, .ladder span { display: block } .ladder span { font-size: .85rem }
.ok { background: #e6f4ea; color: #0d652d } .breaks { background: #fce8e6; color: #a50e0e }
.differs { background: #fef7e0; color: #7a4f00 } .out { border-style: dashed; color: #5f6368 }
td { vertical-align: top } .wrap td { white-space: normal; overflow-wrap: anywhere }
.wrap td { min-width: 6rem } .wrap td:nth-child(3) { min-width: 11rem }
.plots { grid-template-columns: repeat(auto-fill, minmax(min(32rem, 100%), 1fr)) }
"""


Plots = Mapping[str, list[tuple[str, Any]]]
"""Titles and matplotlib figures, by check."""


def page(diagnosis: Diagnosis, record: dict[str, Any], drawn: Plots) -> str:
    """Return ``report.html``.

    Args:
        diagnosis: of the step.
        record: the content of ``verdict.json``.
        drawn: the plots of ``range``, ``pairs``, ``divergence`` and ``updates``.
    """
    sections = {
        "The ladder": _sweep(diagnosis),
        "Findings": _findings(diagnosis.findings),
        "Notes": items(diagnosis.notes) if diagnosis.notes else paragraphs(["None."]),
        "Range of gradients": _range(diagnosis, drawn),
        "Error by module": _errors(diagnosis, drawn),
        "Further steps": plots(drawn["divergence"]) if diagnosis.losses else _not_examined(diagnosis, "divergence"),
        "Updates": _updates(diagnosis, drawn),
        "What ran in which format": _manifest(diagnosis),
        "What was left out": _left_out(diagnosis),
        "How it was measured": paragraphs(_method(record)) + f"<pre>{html.escape(record['command'])}</pre>",
    }
    body = [_verdict(diagnosis, record), *(f"<h2>{title}</h2>{content}" for title, content in sections.items())]
    return document(f"{record['verdict']}: {_name(record)}", _STYLE, "\n".join(body))


def _name(record: dict[str, Any]) -> str:
    return f"{record['recipe']} {record['precision']}, step {record['step']}"


def _verdict(diagnosis: Diagnosis, record: dict[str, Any]) -> str:
    after = ", the one after the run's last step" if diagnosis.replay.finished else ""
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.6g}"
    norm = "not finite" if record["grad_norm"] is None else f"{record['grad_norm']:.4g}"
    how = f"loss {loss}, gradient norm {norm}" + (", the step was skipped" if record["skipped"] else "")
    where = paragraphs([f"{_name(record)}{after}, taken from {record['began']}: {how}."])
    if diagnosis.findings:
        first, *others = diagnosis.findings
        title = html.escape(f"{FOUND}: {first.kind}, {first.direction}")
        said = _first(first) + _what_to_do(diagnosis, first)
        if others:
            said += f"<p>{len(others)} more finding{'s' * (len(others) > 1)} below.</p>"
    else:
        title = html.escape(diagnosis.verdict)
        said = "<p>Nothing was found in this step. What was examined is below.</p>"
        if diagnosis.verdict != HEALTHY:
            said = (
                "<p>The run failed at this step. Taken again, the step is finite, so its cause is not in the weights "
                "and the data alone. Train with deterministic=true; then a step that is taken again has the same "
                "bits.</p>"
            )
    return f"<div class='verdict {diagnosis.verdict}'><h1>{title}</h1>{where}{said}</div>"


def _first(first: Finding) -> str:
    operator = f"Operator <code>{html.escape(first.result)}</code>" if first.op else "Measured"
    measured = ": ".join(filter(None, [operator, html.escape(first.detail)]))
    path = f"<p>From there: {html.escape(' → '.join(first.path))}.</p>" if first.path else ""
    return (
        f"<p>{MEANINGS.get(first.kind, '')} It occurs in <code>{html.escape(first.place)}</code>, from the rung "
        f"{html.escape(first.format)} on.</p>" + (f"<p>{measured}.</p>" if first.op or first.detail else "") + path
    )


def _what_to_do(diagnosis: Diagnosis, first: Finding) -> str:
    islands = diagnosis.islands
    if islands is None or not islands.cured:
        return f"<p>What to do:</p>{items(first.cure)}" if first.cure else ""
    cost = f" Measured cost: {islands.cost}." if islands.cost else ""
    others = [cure for cure in first.cure if cure != islands.text()]
    return (
        "<p>What to do: start a new run with this option. It was tried with the weights of this step; later ones "
        f'may need more modules.{cost}</p><pre>"{html.escape(islands.override)}"</pre>'
    ) + (items(others) if others else "")


def _sweep(diagnosis: Diagnosis) -> str:
    if not diagnosis.sweep:
        return _not_examined(diagnosis, SWEEP)
    trials = "".join(
        f"<li class={_CLASSES.get(trial.status, 'out')}><b>{html.escape(trial.name)}</b><span>"
        f"{html.escape(trial.text().removeprefix(trial.name).strip())}</span></li>"
        for trial in diagnosis.sweep
    )
    return (
        "<p>The same step, with the same weights and data, in one format after another. "
        f"{BREAKS}: the loss, a gradient or a buffer is not finite.</p><ol class=ladder>{trials}</ol>"
    )


def _findings(findings: list[Finding]) -> str:
    if not findings:
        return "<p>None.</p>"
    head = ("kind", "direction", "module", "at rung", "operator and result", "measured", "from there", "what to do")
    rows = [
        (
            *(each.kind, each.direction, each.place, each.format, each.result, each.detail),
            *(" → ".join(each.path), "; ".join(each.cure)),
        )
        for each in findings
    ]
    shown = [column for column in range(len(head)) if any(row[column] for row in rows)]
    table = wide_table([head[column] for column in shown], [[row[column] for column in shown] for row in rows])
    return f"<div class=wrap>{table}</div>"


NEEDS = {
    "range": " The step is not finite in fp32.",
    "pairs": " It needs a finite step in which nothing was found before.",
    "divergence": " It needs a finite step in 16 bits in which nothing was found before.",
}
"""Why a check that was asked for does not examine a step."""


def _not_examined(diagnosis: Diagnosis, check: str) -> str:
    if check not in diagnosis.checks:
        why = f" check={check} was not asked for."
    elif any(item.startswith(check) for item in diagnosis.budget.left_out):
        why = " See what was left out."
    else:
        why = NEEDS.get(check, "")
    return f"<p>Not examined.{why}</p>"


def _range(diagnosis: Diagnosis, drawn: Plots) -> str:
    found = diagnosis.range
    if found is None:
        return _not_examined(diagnosis, "range")
    said = "The run's format needs no loss scale: it has fp32's exponents. A few samples are shown."
    if found.highest is not None and found.lowest is not None:
        said = f"In fp16 the loss scales from 2^{found.lowest} to 2^{found.highest} hold all of them"
        if found.lowest > found.highest:
            said = f"In fp16 no loss scale holds all of them: above 2^{found.highest} the largest overflow, below "
            said += f"2^{found.lowest} the smallest are lost"
        said += f". The step's scale is {diagnosis.replay.step.scale:.10g}."
    return f"<p>Gradients of the reference, before any loss scale. {html.escape(said)}</p>{plots(drawn['range'])}"


def _errors(diagnosis: Diagnosis, drawn: Plots) -> str:
    if diagnosis.pairs is None:
        return _not_examined(diagnosis, "pairs")
    if not drawn["pairs"]:
        return "<p>No module's error could be measured.</p>"
    return (
        "<p>What each module adds by itself: its own operators in the run's format and in the reference's, from the "
        f"same inputs. An error is a fault beyond its bound, {FACTOR} × what rounding makes unavoidable. The "
        f"accumulated error compares a whole step in the run's format with one in the reference.</p>"
        f"{plots(drawn['pairs'])}"
    )


def _updates(diagnosis: Diagnosis, drawn: Plots) -> str:
    if drawn["updates"]:
        return plots(drawn["updates"])
    if diagnosis.replay.folder is None:
        return (
            "<p>There is no run yet. Train with diagnostics=numerics to see how many updates are lost by rounding.</p>"
        )
    return "<p>The run did not measure lost updates. Train with diagnostics=numerics to see them.</p>"


def _manifest(diagnosis: Diagnosis) -> str:
    manifest = diagnosis.manifest
    if manifest is None:
        return _not_examined(diagnosis, "manifest")
    calls: Counter[str] = Counter()
    for row in manifest.rows:
        calls[row.output] += row.calls
    total = calls.total() or 1
    shares = ", ".join(f"{dtype} {100 * count / total:.0f} %" for dtype, count in calls.most_common())
    table = wide_table(
        ("module", "direction", "operator", "inputs", "result", "calls"),
        [(row.module, row.direction, row.op, row.inputs, row.output, f"{row.calls:,}") for row in manifest.rows],
    )
    return (
        f"<p>{calls.total():,} operators with a floating-point result: {html.escape(shares)}.</p>"
        f"<details><summary>By module, direction and operator ({len(manifest.rows):,} rows)</summary>{table}</details>"
    )


def _left_out(diagnosis: Diagnosis) -> str:
    left_out = [f"{trial.name}: {trial.why}" for trial in diagnosis.sweep if trial.status == LEFT_OUT]
    left_out += diagnosis.budget.left_out
    return items(left_out) if left_out else paragraphs(["Nothing."])


def _method(record: dict[str, Any]) -> list[str]:
    hardware, git, versions = record["hardware"], record["git"], record["versions"]
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] == 'true' else ''}" if git else ""
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in record["seconds"].items())
    return [
        f"Run: {record['run']}." if record["run"] else "A check-up before a run.",
        f"Machine: {hardware['name']}, {hardware['device']}, threads {hardware['threads']}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}{commit}.",
        f"Seconds: {seconds or 'none'} (budget_s={record['budget_s']:g}).",
    ]
