"""A report as one self-contained page of HTML, for light and dark: styles and plots inside, no script, no address."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INK, QUIET, RULE, PAPER, MARGIN, ALARM = "#202124", "#5f6368", "#dadce0", "#ffffff", "#e6f4ea", "#c5221f"
"""The colours of plots: text, less important text, lines, background, what counts as equal, what is wrong."""
Plot = tuple[str, Any]
"""A title and a matplotlib figure."""

_TONES = {
    **dict.fromkeys(("EQUIVALENT", "BETTER", "complete"), "good"),
    **dict.fromkeys(("WORSE", "failed"), "bad"),
    **dict.fromkeys(("INCONCLUSIVE", "NOT JUDGED", "pruned"), "open"),
}
"""The style's class of a cell, by its text."""
_THEMED = {INK: "ink", QUIET: "quiet", RULE: "rule", MARGIN: "margin", PAPER: "paper", ALARM: "bad", "#000000": "ink"}
"""The style's variable that stands for a colour of a plot, so that it follows light and dark."""


@dataclass
class Section:
    """A part of a page; what is empty is left out."""

    title: str
    sentences: Sequence[str] = ()
    items: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    """The head, and a row each; the first cell of a row names it."""
    text: str = ""
    """As a terminal shows it."""
    plots: Sequence[Plot] = ()
    folded: bool = False
    """Whether a click on the title shows the rest."""


def page(kind: str, title: str, answer: Sequence[str], command: str, origin: str, sections: Sequence[Section]) -> str:
    """Return a page. All texts are escaped.

    Args:
        kind: of the report.
        title: what it is of.
        answer: what one would tell a colleague, in sentences.
        command: that made it.
        origin: see ``measured_on``.
        sections: the details.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["svg"] = svg
    template = environment.get_template("page.html")
    return template.render(
        kind=kind, title=title, answer=answer, command=command, origin=origin, sections=sections, tones=_TONES
    )


def measured_on(hardware: Mapping[str, Any], versions: Mapping[str, Any], git: Mapping[str, str]) -> str:
    """Return the machine and the versions in one sentence, from what a record holds of them."""
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] == 'true' else ''}" if git else ""
    where = f"{hardware['name']}, {hardware['device']}, threads {hardware['threads']}"
    return f"Machine: {where}; torch {versions['torch']}{commit}."


def svg(figure: Any) -> str:
    """Return a matplotlib figure as an SVG element, without a background and in the page's colours."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = re.sub("<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for color, name in _THEMED.items():
        text = text.replace(color, f"var(--{name})")
    return text
