"""The committed outcomes, and the pages made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evidence import blocks
from evidence.claims import results
from evidence.claims.claims import load, names
from evidence.claims.criteria import CONFIRMED, NOT_HERE, REFUTED
from mantissa.statistics import INCONCLUSIVE
from tests.helpers import PROJECT


def test_the_pages_agree_with_the_outcomes() -> None:
    claims = {name: load(name) for name in names()}
    records = results.read()
    notes = results.read_notes()
    assert notes.keys() <= claims.keys()
    page = (PROJECT / results.PAGE).read_text()
    assert page == results.page(records, claims, notes), "run: python scripts/reproduce.py pages=true"
    tables = {path: {"results": table} for path, table in results.tables(records, claims).items()}
    assert blocks.stale(tables) == {}, "run: python scripts/reproduce.py pages=true"


def test_the_machine_that_could_test_most_comes_first(tmp_path: Path) -> None:
    verdicts = {"a": [NOT_HERE, NOT_HERE, NOT_HERE], "b": [REFUTED, NOT_HERE], "c": [CONFIRMED, INCONCLUSIVE]}
    for machine, found in verdicts.items():
        (tmp_path / machine).mkdir()
        for number, verdict in enumerate(found):
            (tmp_path / machine / f"claim{number}.json").write_text(json.dumps({"verdict": verdict}))
    assert list(results.read(tmp_path)) == ["c", "b", "a"]


@pytest.mark.parametrize("path", sorted(results.RESULTS.glob("*/*.json")), ids=lambda path: path.stem)
def test_an_outcome_is_of_the_file_as_it_is(path: Path) -> None:
    record = json.loads(path.read_text())
    claim = load(path.stem)
    assert record["claim_sha256"] == claim.digest, "the claim's file changed after the outcome: run it again"
    assert record["machine"] == path.parent.name
    assert record["verdict"] in (CONFIRMED, REFUTED, INCONCLUSIVE, NOT_HERE)
    assert record["git"]["commit"]
    assert record["git"]["dirty"] == "false"
    if record["verdict"] != NOT_HERE:
        assert record["findings"]


def test_an_outcome_of_an_earlier_file_does_not_count() -> None:
    claim = load("two_x")
    assert results.verdict({"verdict": CONFIRMED, "claim_sha256": claim.digest}, claim) == CONFIRMED
    assert results.verdict({"verdict": CONFIRMED, "claim_sha256": "0"}, claim) == "(CONFIRMED, of an earlier file)"
    assert results.verdict(None, claim) == ""
