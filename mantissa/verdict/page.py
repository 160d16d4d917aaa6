"""Reports: as text for a terminal, and as one self-contained page of HTML with styles and plots inside."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantissa.display import columns

INK, QUIET, RULE, PAPER, MARGIN, ALARM = "#202124", "#5f6368", "#dadce0", "#ffffff", "#e6f4ea", "#c5221f"
"""Colours of plots: text, less important text, lines, background, what counts as equal, what is wrong."""
Plot = tuple[str, Any]
"""A title and a matplotlib figure."""

_TONES = {
    **dict.fromkeys(("EQUIVALENT", "BETTER"), "good"),
    "WORSE": "bad",
    **dict.fromkeys(("INCONCLUSIVE", "NOT JUDGED"), "open"),
}
"""Class of a cell in the style, by its text."""
_THEMED = {INK: "ink", QUIET: "quiet", RULE: "rule", MARGIN: "margin", PAPER: "paper", ALARM: "bad", "#000000": "ink"}
"""Variable of the style that stands for a colour of a plot, so that it follows light and dark."""


@dataclass
class Section:
    """A part of a report; what is empty is left out."""

    title: str
    sentences: Sequence[str] = ()
    items: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    """Head, and a row each; the first cell of a row names it."""
    text: str = ""
    """Lines as a terminal shows them."""
    plots: Sequence[Plot] = ()
    folded: bool = False
    """Whether the page shows it only after a click on its title, and the text not at all."""

    def lines(self) -> list[str]:
        """Return it as a terminal shows it, without plots and without its title."""
        lines = [columns(self.table)] if self.table else []
        lines += [*self.sentences, *(f"- {item}" for item in self.items)]
        return [*lines, self.text] if self.text else lines


@dataclass
class Report:
    """An answer and its details, for a terminal and as a page; all texts are escaped in the page."""

    kind: str
    title: str
    """Subject."""
    answer: Sequence[str]
    """Sentences that one would tell a colleague."""
    command: str
    """Command that made it."""
    origin: str
    """Machine and versions in a sentence, see ``measured_on``."""
    sections: Sequence[Section]
    """Details."""

    def text(self) -> str:
        """Return it for a terminal: the answer, then the sections that are not folded."""
        shown = [section.lines() for section in self.sections if not section.folded]
        return "\n\n".join("\n".join(lines) for lines in (self.answer, *shown) if lines)

    def html(self) -> str:
        """Return it as a page."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            autoescape=True,
            loader=FileSystemLoader(Path(__file__).parent),
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
        )
        environment.filters["svg"] = svg
        shown = [section for section in self.sections if section.lines() or section.plots]
        return environment.get_template("page.html").render(vars(self) | {"tones": _TONES, "sections": shown})

    def write(self, folder: Path, name: str = "report") -> Path:
        """Write ``name.html`` and ``name.txt`` into a folder, which is made; return the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(self.text() + "\n", encoding="utf-8")
        page = folder / f"{name}.html"
        page.write_text(self.html(), encoding="utf-8")
        return page


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
