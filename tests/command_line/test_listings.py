"""What scripts/reproduce.py lists."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from evidence.claims import command
from evidence.claims.claims import load
from evidence.claims.criteria import NOT_HERE


@pytest.mark.parametrize(
    ("here", "shown"),
    [
        ("epyc", ("xeon (another machine)", "epyc (this machine)", "NOT TESTABLE HERE")),
        ("h200", ("xeon", "epyc", "NOT TESTABLE THERE")),
    ],
)
def test_a_listing_shows_the_machine_of_each_verdict(here: str, shown: tuple[str, ...]) -> None:
    records = {
        "xeon": {"two_x": [{"claim_sha256": load("two_x").digest, "verdict": "CONFIRMED"}]},
        "epyc": {"clip_order": [{"claim_sha256": load("clip_order").digest, "verdict": NOT_HERE}]},
    }
    claims = {name: load(name) for name in ("two_x", "clip_order")}
    file = io.StringIO()
    command._list(claims, records, here, Console(file=file, width=200))
    assert all(words in file.getvalue() for words in shown)
    assert ("this machine)" in file.getvalue()) == (here == "epyc")
