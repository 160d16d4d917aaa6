"""What scripts/reproduce.py lists."""

from __future__ import annotations

import io

from rich.console import Console

from evidence.claims import command as reproduce_cli
from evidence.claims.claims import load
from evidence.claims.criteria import NOT_HERE


def listing(here: str) -> str:
    claims = {name: load(name) for name in ("two_x", "clip_order")}
    records = {
        "xeon": {"two_x": {"claim_sha256": claims["two_x"].digest, "verdict": "CONFIRMED"}},
        "epyc": {"clip_order": {"claim_sha256": claims["clip_order"].digest, "verdict": NOT_HERE}},
    }
    console = Console(file=io.StringIO(), width=200)
    reproduce_cli._list(claims, records, here, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_listing_shows_the_machine_of_each_verdict() -> None:
    text = listing("epyc")
    assert "xeon (another machine)" in text
    assert "epyc (this machine)" in text
    assert "NOT TESTABLE HERE" in text
    assert "tested on this machine yet" not in text
    assert text.splitlines()[-1].startswith("This machine: epyc. Test one claim with claim=")


def test_a_machine_without_verdicts_is_reported() -> None:
    text = listing("h200")
    assert "this machine)" not in text
    assert "NOT TESTABLE THERE" in text
    assert "No claim has been tested on this machine yet; the verdicts above are of other machines." in text
