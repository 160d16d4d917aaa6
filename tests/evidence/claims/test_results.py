"""The committed outcomes, and the pages made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evidence.claims import results
from evidence.claims.claims import load, names
from evidence.claims.criteria import CONFIRMED, NOT_HERE, REFUTED
from mantissa.statistics import INCONCLUSIVE
from tests.helpers import PROJECT


def test_the_pages_agree_with_the_outcomes(tmp_path: Path) -> None:
    claims = {name: load(name) for name in names()}
    records = results.read()
    page = (PROJECT / results.PAGE).read_text()
    assert page == results.page(records, claims, results.read_notes()), "run: python scripts/reproduce.py pages=true"
    for path, table in results.tables(records, claims).items():
        text = (PROJECT / path).read_text()
        assert f"{results.BEGIN}\n{table}\n{results.END}" in text, "run: python scripts/reproduce.py pages=true"


def test_machines_stand_side_by_side_with_what_each_lacks() -> None:
    claims = {name: load(name) for name in ("two_x", "scaler_needed", "tf32_matmul")}
    xeon = "intel-xeon-processor-amx-2-cores"
    outcomes = results.read()[xeon]
    hardware = {"name": "AMD EPYC 7B13", "device": "cpu", "cpu_cores": 2, "cpu_flags": []}
    absent = {"verdict": NOT_HERE, "hardware": hardware}
    amd = {
        "two_x": absent | {"needs": ["bf16 in hardware"]},
        "scaler_needed": absent | {"too_slow": {"fp16_dynamic": "fp16 products take 95 times as long as fp32's here"}},
    }
    head, _, two_x, scaler = results.summary({xeon: outcomes, "amd": amd}, claims).splitlines()
    assert head == "| claim | as published | Intel Xeon, 2 cores, AMX | AMD EPYC 7B13, 2 cores |"
    assert two_x.startswith("| [two_x](results.md#two_x) | 2x or more speedup")
    assert f"| **{outcomes['two_x']['verdict']}** speed gpt2_bf16/gpt2_fp32: " in two_x
    assert two_x.endswith(" | not testable: needs bf16 in hardware |")
    assert scaler.endswith(" | not testable: fp16 products take 95 times as long as fp32's here |")
    assert "tf32_matmul" not in "".join([two_x, scaler])  # no machine could test it


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
        assert record["why"], "a verdict says why"


def test_notes_are_of_existing_claims_and_are_below_their_traps() -> None:
    claims = {name: load(name) for name in names()}
    notes = results.read_notes()
    assert notes
    assert notes.keys() <= claims.keys()
    page = results.page({}, claims, {"half_everywhere": ["what came later"]})
    _, _, section = page.partition("## half_everywhere")
    assert section.index("- Caution: ") < section.index("- Note, added later: what came later") < 700


def test_an_outcome_of_an_earlier_file_does_not_count() -> None:
    claim = load("two_x")
    assert results.verdict({"verdict": CONFIRMED, "claim_sha256": claim.digest}, claim) == CONFIRMED
    assert results.verdict({"verdict": CONFIRMED, "claim_sha256": "0"}, claim) == "(CONFIRMED, of an earlier file)"
    assert results.verdict(None, claim) == ""
