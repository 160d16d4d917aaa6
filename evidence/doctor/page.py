"""The page of a diagnosis: the verdict and what to do first, then all that it rests on."""

from __future__ import annotations

import html
from collections import Counter
from typing import Any

from evidence.doctor.diagnosis import FOUND, HEALTHY, Diagnosis
from evidence.doctor.ladder.rungs import BREAKS, DIFFERS, LEFT_OUT, OK
from evidence.doctor.measured.pairs import FACTOR
from evidence.doctor.plots import divergence, errors, exponents, updates
from evidence.doctor.step import finding as kinds
from evidence.doctor.step.finding import Finding
from mantissa.page import document, items, paragraphs, plots, wide_table
from trainer.tracking.plots import Series

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


def page(diagnosis: Diagnosis, record: dict[str, Any], series: dict[str, Series]) -> str:
    """Return ``report.html``.

    Args:
        diagnosis: of the step.
        record: the content of ``verdict.json``.
        series: of the run's metric log; empty where there is none.
    """
    parts = [
        _verdict(diagnosis, record),
        f"<h2>The ladder</h2>{_ladder(diagnosis)}",
        f"<h2>Findings</h2>{_findings(diagnosis.findings)}",
        f"<h2>Notes</h2>{items(diagnosis.notes) if diagnosis.notes else paragraphs(['None.'])}",
        f"<h2>Range of gradients</h2>{_range(diagnosis)}",
        f"<h2>Error by module</h2>{_errors(diagnosis)}",
        f"<h2>Further steps</h2>{_divergence(diagnosis)}",
        f"<h2>Updates</h2>{_updates(diagnosis, series)}",
        f"<h2>What ran in which format</h2>{_manifest(diagnosis)}",
        f"<h2>What was left out</h2>{_left_out(diagnosis)}",
        f"<h2>How it was measured</h2>\n{paragraphs(_method(record))}<pre>{html.escape(record['command'])}</pre>",
    ]
    return document(f"{record['verdict']}: {_name(record)}", _STYLE, "\n".join(parts))


def _name(record: dict[str, Any]) -> str:
    return f"{record['recipe']} {record['precision']}, step {record['step']}"


def _verdict(diagnosis: Diagnosis, record: dict[str, Any]) -> str:
    after = ", the one after the run's last step" if diagnosis.replay.finished else ""
    where = paragraphs([f"{_name(record)}{after}, taken from {record['began']}{_loss(record)}."])
    if not diagnosis.findings:
        title, said = html.escape(diagnosis.verdict), paragraphs(_nothing(diagnosis))
    else:
        first = diagnosis.findings[0]
        title = html.escape(f"{FOUND}: {first.kind}, {first.direction}")
        said = _first(first) + _what_to_do(diagnosis, first)
        if (others := len(diagnosis.findings) - 1) > 0:
            said += f"<p>{others} more finding{'s' * (others > 1)} below.</p>"
    return f"<div class='verdict {diagnosis.verdict}'><h1>{title}</h1>{where}{said}</div>"


def _loss(record: dict[str, Any]) -> str:
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.6g}"
    norm = "not finite" if record["grad_norm"] is None else f"{record['grad_norm']:.4g}"
    return f": loss {loss}, gradient norm {norm}" + (", the step was skipped" if record["skipped"] else "")


def _nothing(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.verdict == HEALTHY:
        return ["Nothing was found in this step. What was examined is below."]
    return [
        "The run failed at this step. Taken again, the step is finite, so its cause is not in the weights and the data "
        "alone. Train with deterministic=true; then a step that is taken again has the same bits."
    ]


def _first(first: Finding) -> str:
    operator = f"Operator <code>{html.escape(_operator(first))}</code>" if first.op else "Measured"
    detail = html.escape(first.detail)
    path = f"<p>From there: {html.escape(' → '.join(first.path))}.</p>" if first.path else ""
    return (
        f"<p>{MEANINGS.get(first.kind, '')} It occurs in <code>{html.escape(first.place)}</code>, from the rung "
        f"{html.escape(first.rung)} on.</p>"
        + (f"<p>{operator}{': ' if detail else ''}{detail}.</p>" if first.op or detail else "")
        + path
    )


def _operator(finding: Finding) -> str:
    return " ".join(filter(None, [finding.op, finding.dtype, str(list(finding.shape)) if finding.shape else ""]))


def _what_to_do(diagnosis: Diagnosis, first: Finding) -> str:
    islands = diagnosis.islands
    if islands is not None and islands.cured:
        cost = f" Measured cost: {islands.cost}." if islands.cost else ""
        copied = (
            "<p>What to do: start a new run with this option. It was tried with the weights of this step; later ones "
            f'may need more modules.{cost}</p><pre>"{html.escape(islands.override)}"</pre>'
        )
        others = [cure for cure in first.cure if cure != islands.text()]
        return copied + (items(others) if others else "")
    return f"<p>What to do:</p>{items(first.cure)}" if first.cure else ""


def _ladder(diagnosis: Diagnosis) -> str:
    ladder = diagnosis.ladder
    if not ladder:
        return _not_examined(diagnosis, "ladder")
    rungs = "".join(
        f"<li class={_CLASSES.get(rung.status, 'out')}><b>{html.escape(rung.name)}</b><span>"
        f"{html.escape(rung.text().removeprefix(rung.name).strip())}</span></li>"
        for rung in ladder
    )
    return (
        "<p>The same step, with the same weights and data, in one format after another. "
        f"{BREAKS}: the loss, a gradient or a buffer is not finite.</p><ol class=ladder>{rungs}</ol>"
    )


def _findings(findings: list[Finding]) -> str:
    if not findings:
        return "<p>None.</p>"
    head = ("kind", "direction", "module", "at rung", "operator and result", "measured", "from there", "what to do")
    rows = [
        (
            *(each.kind, each.direction, each.place, each.rung, _operator(each), each.detail),
            *(" → ".join(each.path), "; ".join(each.cure)),
        )
        for each in findings
    ]
    shown = [column for column in range(len(head)) if any(row[column] for row in rows)]
    table = wide_table([head[column] for column in shown], [[row[column] for column in shown] for row in rows])
    return f"<div class=wrap>{table}</div>"


def _not_examined(diagnosis: Diagnosis, check: str) -> str:
    if check not in diagnosis.checks:
        why = f" check={check} was not asked for."
    elif any(item.startswith(check) for item in diagnosis.budget.left_out):
        why = " See what was left out."
    else:
        why = NEEDS.get(check, "")
    return f"<p>Not examined.{why}</p>"


NEEDS = {
    "range": " The step is not finite in fp32.",
    "pairs": " It needs a finite step in which nothing was found before.",
    "divergence": " It needs a finite step in 16 bits in which nothing was found before.",
}
"""Why a check that was asked for does not examine a step."""


def _range(diagnosis: Diagnosis) -> str:
    found = diagnosis.range
    if found is None:
        return _not_examined(diagnosis, "range")
    own, scales = diagnosis.replay.case.scale, {}
    said = "The run's format needs no loss scale: it has fp32's exponents. A few samples are shown."
    if found.highest is not None and found.lowest is not None:
        said = f"In fp16 the loss scales from 2^{found.lowest} to 2^{found.highest} hold all of them"
        if found.lowest > found.highest:
            said = f"In fp16 no loss scale holds all of them: above 2^{found.highest} the largest overflow, below "
            said += f"2^{found.lowest} the smallest are lost"
        said += f". The step's scale is {own:.10g}."
        scales = {f"scale {own:.10g}": own} | {f"scale 2^{found.highest}": 2.0**found.highest}
    outputs = [layer for layer in found.layers if layer.tensor == "output"]
    weights = [layer for layer in reversed(found.layers) if layer.tensor != "output"]  # they came in backward order
    drawn = [plot for layers in (outputs, weights) if (plot := exponents(layers, scales))]
    return f"<p>Gradients of the reference, before any loss scale. {html.escape(said)}</p>{plots(drawn)}"


def _errors(diagnosis: Diagnosis) -> str:
    if diagnosis.pairs is None:
        return _not_examined(diagnosis, "pairs")
    rows = diagnosis.pairs.rows
    drawn = [plot for direction in (kinds.FORWARD, kinds.BACKWARD) if (plot := errors(rows, direction))]
    if not drawn:
        return "<p>No module's error could be measured.</p>"
    return (
        "<p>What each module adds by itself: its own operators in the run's format and in the reference's, from the "
        f"same inputs. An error is a fault beyond its bound, {FACTOR} × what rounding makes unavoidable. The "
        f"accumulated error compares a whole step in the run's format with one in the reference.</p>{plots(drawn)}"
    )


def _divergence(diagnosis: Diagnosis) -> str:
    if not diagnosis.losses:
        return _not_examined(diagnosis, "divergence")
    return plots([divergence(diagnosis.losses, diagnosis.replay.precision, diagnosis.replay.case.step)])


def _updates(diagnosis: Diagnosis, series: dict[str, Series]) -> str:
    drawn = updates(series, diagnosis.replay.case.step)
    if drawn is not None:
        return plots([drawn])
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
    left_out = [f"{rung.name}: {rung.why}" for rung in diagnosis.ladder if rung.status == LEFT_OUT]
    left_out += diagnosis.budget.left_out
    return items(left_out) if left_out else paragraphs(["Nothing."])


def _method(record: dict[str, Any]) -> list[str]:
    hardware, git, versions = record["hardware"], record["git"], record["versions"]
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] == 'true' else ''}" if git else ""
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in record["seconds"].items())
    run = f"Run: {record['run']}." if record["run"] else "A check-up before a run."
    return [
        run,
        f"Machine: {hardware['name']}, {hardware['device']}, threads {hardware['threads']}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}{commit}.",
        f"Seconds: {seconds or 'none'} (budget_s={record['budget_s']:g}).",
    ]
