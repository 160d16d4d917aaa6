"""The page of a diagnosis: the verdict and what to do first, then all that it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, TypeVar

from mantissa.doctor.diagnosis import FOUND, HEALTHY, SWEEP, Diagnosis
from mantissa.doctor.pairs import FACTOR
from mantissa.doctor.range import Range
from mantissa.doctor.report import opening
from mantissa.doctor.sweep import BREAKS, DIFFERS, LEFT_OUT, OK, FormatTrial
from mantissa.finding import MEANINGS, Finding
from mantissa.manifest import OperatorManifest
from mantissa.page import document, items, paragraphs, plots, wide_table

Found = TypeVar("Found")
_CLASSES = {OK: "ok", BREAKS: "breaks", DIFFERS: "differs", LEFT_OUT: "out"}
_STYLE = """
.verdict { border-left: .4rem solid #7a4f00; padding: .1rem 0 .1rem 1rem } .verdict h1 { margin: .2rem 0 }
.HEALTHY { border-color: #137333 } .FOUND { border-color: #c5221f } summary { cursor: pointer }
.ladder { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; padding: 0 }
.ladder li { border: 1px solid; border-radius: .4rem; padding: .35rem .8rem; min-width: 6.5rem }
.ladder b, .ladder span { display: block } .ladder span { font-size: .85rem }
.ok { background: #e6f4ea; color: #0d652d } .breaks { background: #fce8e6; color: #a50e0e }
.differs { background: #fef7e0; color: #7a4f00 } .out { border-style: dashed; color: #5f6368 }
.plots { grid-template-columns: repeat(auto-fill, minmax(min(32rem, 100%), 1fr)) }
"""
_NEEDS = {
    "range": " The step is not finite in fp32.",
    "pairs": " It needs a finite step in which nothing was found before.",
    "divergence": " It needs a finite step in 16 bits in which nothing was found before.",
}
"""Why a check that was asked for does not examine a step."""


def page(diagnosis: Diagnosis, record: dict[str, Any], drawn: Mapping[str, list[tuple[str, Any]]]) -> str:
    """Return ``report.html``.

    Args:
        diagnosis: of the step.
        record: the content of ``verdict.json``.
        drawn: titles and matplotlib figures of ``range``, ``pairs``, ``divergence`` and ``updates``.
    """
    name = f"{record['recipe']} {record['precision']}"
    not_measured = "There is no run yet." if record["run"] is None else "The run did not measure lost updates."
    not_measured += " Train with diagnostics=numerics to see how many updates are lost by rounding."
    left_out = [f"{trial.name}: {trial.why}" for trial in diagnosis.sweep if trial.status == LEFT_OUT]
    left_out += diagnosis.budget.left_out
    sections = {
        "The ladder": _examined(diagnosis, SWEEP, diagnosis.sweep, _sweep),
        "Findings": "".join(map(_finding, diagnosis.findings)) or "<p>None.</p>",
        "Notes": items(diagnosis.notes or ["None."]),
        "Range of gradients": _examined(
            diagnosis,
            "range",
            diagnosis.range,
            lambda found: paragraphs([_range(diagnosis, found)]) + plots(drawn["range"]),
        ),
        "Error by module": _examined(
            diagnosis, "pairs", diagnosis.pairs, lambda found: paragraphs([_ERRORS]) + plots(drawn["pairs"])
        ),
        "Further steps": _examined(diagnosis, "divergence", diagnosis.losses, lambda found: plots(drawn["divergence"])),
        "Updates": plots(drawn["updates"]) if drawn["updates"] else paragraphs([not_measured]),
        "What ran in which format": _examined(diagnosis, "manifest", diagnosis.manifest, _manifest),
        "What was left out": items(left_out or ["Nothing."]),
        "How it was measured": paragraphs(_method(record)) + f"<pre>{escape(record['command'])}</pre>",
    }
    body = _verdict(diagnosis, name) + "".join(f"\n<h2>{title}</h2>{content}" for title, content in sections.items())
    return document(f"{record['verdict']}: {name}, step {record['step']}", _STYLE, body)


def _examined(diagnosis: Diagnosis, check: str, found: Found | None, show: Callable[[Found], str]) -> str:
    """Return what a check found, or why there is nothing."""
    if found:
        return show(found)
    if check not in diagnosis.checks:
        why = f" check={check} was not asked for."
    elif any(item.startswith(check) for item in diagnosis.budget.left_out):
        why = " See what was left out."
    else:
        why = _NEEDS.get(check, "")
    return f"<p>Not examined.{why}</p>"


def _verdict(diagnosis: Diagnosis, name: str) -> str:
    title, where = diagnosis.verdict, f"{name}: {opening(diagnosis.replay)}."
    if diagnosis.findings:
        first, *others = diagnosis.findings
        title = f"{FOUND}: {first.kind}, {first.direction}"
        said = paragraphs([where, MEANINGS[first.kind]]) + _finding(first) + _islands(diagnosis)
        said += paragraphs([f"{len(others)} more finding{'s' * (len(others) > 1)} below."] if others else [])
    elif diagnosis.verdict == HEALTHY:
        said = paragraphs([where, "Nothing was found in this step. What was examined is below."])
    else:
        why = (
            "The run failed at this step. Taken again, the step is finite, so its cause is not in the weights and "
            "the data alone. Train with deterministic=true; then a step that is taken again has the same bits."
        )
        said = paragraphs([where, why])
    return f"<div class='verdict {diagnosis.verdict}'><h1>{escape(title)}</h1>{said}</div>"


def _finding(finding: Finding) -> str:
    return f"<pre>{escape(chr(10).join([*finding.lines(), f'  at rung {finding.format}']))}</pre>"


def _islands(diagnosis: Diagnosis) -> str:
    islands = diagnosis.islands
    if islands is None or not islands.cured:
        return ""
    cost = f" Measured cost: {islands.cost}." if islands.cost else ""
    return (
        "<p>What to do: start a new run with this option. It was tried with the weights of this step; later ones "
        f'may need more modules.{cost}</p><pre>"{escape(islands.override)}"</pre>'
    )


def _sweep(sweep: list[FormatTrial]) -> str:
    trials = "".join(
        f"<li class={_CLASSES[trial.status]}><b>{escape(trial.name)}</b>"
        f"<span>{escape(trial.text().removeprefix(trial.name).strip())}</span></li>"
        for trial in sweep
    )
    return (
        "<p>The same step, with the same weights and data, in one format after another. "
        f"{BREAKS}: the loss, a gradient or a buffer is not finite.</p><ol class=ladder>{trials}</ol>"
    )


_ERRORS = (
    "What each module adds by itself: its own operators in the run's format and in the reference's, from the same "
    f"inputs. An error is a fault beyond its bound, {FACTOR} × what rounding makes unavoidable. The accumulated error "
    "compares a whole step in the run's format with one in the reference."
)


def _range(diagnosis: Diagnosis, found: Range) -> str:
    said = "Gradients of the reference, before any loss scale. "
    if found.highest is None or found.lowest is None:
        return f"{said}The run's format needs no loss scale: it has fp32's exponents. Two samples are shown."
    if found.lowest <= found.highest:
        said += f"In fp16 the loss scales from 2^{found.lowest} to 2^{found.highest} hold all of them"
    else:
        said += f"In fp16 no loss scale holds all of them: above 2^{found.highest} the largest overflow, below "
        said += f"2^{found.lowest} the smallest are lost"
    return f"{said}. The step's scale is {diagnosis.replay.step.scale:.10g}."


def _manifest(found: OperatorManifest) -> str:
    calls: Counter[str] = Counter()
    for row in found.rows:
        calls[row.output] += row.calls
    shares = ", ".join(f"{dtype} {100 * count / calls.total():.0f} %" for dtype, count in calls.most_common())
    head = ("module", "direction", "operator", "inputs", "result", "calls")
    table = wide_table(head, [(*row[:-1], f"{row.calls:,}") for row in found.rows])
    return (
        f"<p>{calls.total():,} operators with a floating-point result: {escape(shares)}.</p>"
        f"<details><summary>By module, direction and operator ({len(found.rows):,} rows)</summary>{table}</details>"
    )


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
