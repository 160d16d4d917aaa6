"""What scripts/reproduce.py lists."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from evidence.claims import command as reproduce_cli
from evidence.claims.claims import load
from evidence.claims.criteria import NOT_HERE


@pytest.mark.parametrize(
    ("here", "shown", "last"),
    [
        (
            "epyc",
            ("xeon (another machine)", "epyc (this machine)", "NOT TESTABLE HERE"),
            "This machine: epyc. Test one claim with claim=",
        ),
        ("h200", ("xeon", "epyc", "NOT TESTABLE THERE"), "No claim has been tested on this machine yet; the verdicts"),
    ],
)
def test_a_listing_shows_the_machine_of_each_verdict(here: str, shown: tuple[str, ...], last: str) -> None:
    claims = {name: load(name) for name in ("two_x", "clip_order")}
    records = {
        "xeon": {"two_x": {"claim_sha256": claims["two_x"].digest, "verdict": "CONFIRMED"}},
        "epyc": {"clip_order": {"claim_sha256": claims["clip_order"].digest, "verdict": NOT_HERE}},
    }
    file = io.StringIO()
    reproduce_cli._list(claims, records, here, Console(file=file, width=200))
    text = file.getvalue()
    assert all(words in text for words in shown)
    assert ("this machine)" in text) == (here == "epyc")
    assert any(line.startswith(last) for line in text.splitlines())
