"""Reports as one self-contained page of HTML: styles and plots inside, no script, no address."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Distinguishable with any colour vision (Okabe and Ito 2008).
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#202124")
NOISE = "#9aa0a6"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #202124; max-width: 80rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem }
pre { background: #f1f3f4; padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem } .wide { overflow-x: auto }
th, td { text-align: left; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid #dadce0; white-space: nowrap }
th { white-space: normal; vertical-align: bottom }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem }
.plots { margin: 1.5rem 0 }
figure { margin: 0 } figcaption { color: #5f6368 } svg { width: 100%; height: auto }
"""


def document(title: str, style: str, body: str) -> str:
    """Return a page.

    Args:
        title: as text.
        style: CSS besides that of all reports.
        body: as HTML.
    """
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}{style}</style>\n{body}</html>\n"
    )


def wide_table(head: Sequence[str], rows: Iterable[Sequence[str]], marked: Sequence[str] = ()) -> str:
    """Return a table of texts, which scrolls where it is too wide; a cell that is a ``marked`` word has its class."""

    def cell(text: str) -> str:
        return f"<td{f' class={text}' if text in marked else ''}>{html.escape(text)}</td>"

    below = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    above = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    return f"<div class=wide><table><thead><tr>{above}</tr></thead><tbody>{below}</tbody></table></div>"


def paragraphs(texts: Iterable[str]) -> str:
    """Return texts as paragraphs."""
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def items(texts: Iterable[str]) -> str:
    """Return texts as a list."""
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def plots(figures: Iterable[tuple[str, Any]]) -> str:
    """Return (title, matplotlib figure) as a grid of plots."""
    shown = (
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg(figure)}</figure>" for title, figure in figures
    )
    return f"<div class=plots>{''.join(shown)}</div>"


def svg(figure: Any) -> str:
    """Return a matplotlib figure as an SVG element for a page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return re.sub("<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
