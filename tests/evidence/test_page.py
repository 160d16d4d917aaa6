"""The page that every report is: self-contained, escaped, and in the reader's colours."""

from __future__ import annotations

import html
import re

from mantissa.verdict.page import Report, Section
from trainer.tracking.plots import COLORS, INK, QUIET, RULE, bare_figure

HOSTILE = "</title><script>alert('1')</script> onload=\"x\" {{ 7 * 7 }} &amp;"


def test_whatever_a_name_says_is_text() -> None:
    figure, axes = bare_figure(3, 2)
    axes.set_title(HOSTILE)
    row = [HOSTILE, HOSTILE]
    section = Section(HOSTILE, row, row, [row, row], HOSTILE, [(HOSTILE, figure)], folded=True)
    text = Report(HOSTILE, HOSTILE, [HOSTILE], HOSTILE, HOSTILE, [section]).html()
    body = re.sub("<(?!/?(?:script|title))[^<>]*>", " ", text.partition("</head>")[2])
    assert ("<script" in text, text.count("</title>"), "{{" in body) == (False, 1, True)
    assert html.unescape(body).count(HOSTILE) == 17  # in each place, and in the figure
    labels = re.findall(r'aria-label="([^"]*)"', text)
    assert [html.unescape(label) for label in labels] == [f"Table: {HOSTILE}", HOSTILE]


def test_a_page_needs_nothing_else_and_follows_light_and_dark() -> None:
    figure, axes = bare_figure(3, 2)
    axes.plot([1, 2], [1, 2], color=COLORS[0])
    axes.axvline(1, color="black")
    axes.grid(color=RULE)
    axes.set_xlabel("x", color=QUIET)
    plots = Section("Plots", plots=[("caption", figure)])
    text = Report("Kind", "title", ["answer"], "command", "origin", [plots]).html()
    assert not re.search(r"<script|<link|<iframe|<img|@import|javascript:|\son\w+=|\ssrc=", text)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)  # XML's own names are no addresses
    assert re.findall(r"url\((?!#)", text) == []
    drawn = text[text.index("<svg") : text.index("</svg>")]
    assert COLORS[0] in drawn
    assert [color for color in (INK, QUIET, RULE, "#000000", "#ffffff") if color in drawn] == []
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    for scheme in text.split("prefers-color-scheme: dark"):
        assert used <= set(re.findall(r"--([\w-]+):", scheme))


def test_the_text_is_the_answer_and_what_is_not_folded() -> None:
    shown = Section("Results", ["A sentence."], ["an item"], [("arm", "loss"), ("fp32", "2.5")], "raw")
    report = Report(
        "Kind", "title", ["It is so.", "And so."], "command", "origin", [shown, Section("x", ["y"], folded=True)]
    )
    assert report.text() == "It is so.\nAnd so.\n\narm   loss\nfp32  2.5\nA sentence.\n- an item\nraw"
