"""The committed outcomes, and the pages made of them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from evidence import blocks
from evidence.claims import results, submission
from evidence.claims.claims import load, names
from evidence.claims.criteria import CONFIRMED, NOT_HERE, REFUTED, RELATED, Criterion
from evidence.claims.reproduce import save
from mantissa.statistics import INCONCLUSIVE
from tests.helpers import PROJECT

RECORDED = [
    pytest.param(path.parent.name, json.loads(line), id=f"{path.parent.name}-{number}")
    for path in sorted(results.RESULTS.glob("*/claims.jsonl"))
    for number, line in enumerate(path.read_text().splitlines(), 1)
]


def recorded(claim: str, commit: str) -> dict[str, Any]:
    """The outcome of a claim that was recorded at a commit."""
    every = (case.values[1] for case in RECORDED)
    return next(each for each in every if each["claim"] == claim and each["git"]["commit"].startswith(commit))


def test_the_pages_agree_with_the_outcomes() -> None:
    claims = {name: load(name) for name in names()}
    records = results.read()
    notes = results.read_notes()
    assert notes.keys() <= claims.keys()
    page = (PROJECT / results.PAGE).read_text()
    assert page == results.page(records, claims, notes), "run: python scripts/reproduce.py pages=true"
    tables = {path: {"results": table} for path, table in results.tables(records, claims).items()}
    assert blocks.stale(tables) == {}, "run: python scripts/reproduce.py pages=true"


@pytest.mark.parametrize(("machine", "record"), RECORDED)
def test_every_recorded_verdict_follows_from_its_values(machine: str, record: dict[str, Any]) -> None:
    assert (record["machine"], record["git"]["dirty"], len(record["git"]["commit"])) == (machine, "false", 40)
    assert datetime.date.fromisoformat(record["date"])
    assert record["command"].startswith(f"python scripts/reproduce.py claim={record['claim']}")
    assert submission.untrue(record) == ""


def test_the_machine_that_could_test_most_comes_first(tmp_path: Path) -> None:
    verdicts = {"a": [NOT_HERE, NOT_HERE, NOT_HERE], "b": [REFUTED, NOT_HERE], "c": [CONFIRMED, INCONCLUSIVE]}
    for machine, found in verdicts.items():
        for number, verdict in enumerate(found):
            save({"machine": machine, "claim": f"claim{number}", "verdict": verdict}, tmp_path)
    assert list(results.read(tmp_path)) == ["c", "b", "a"]


def test_outcomes_are_appended_also_after_one_that_was_cut_short(tmp_path: Path) -> None:
    outcomes = [{"machine": "a", "claim": "x", "verdict": REFUTED, "n": number} for number in range(3)]
    save(outcomes[0], tmp_path)
    path = save(outcomes[1], tmp_path)
    whole = path.read_bytes()
    for cut in (1, 20, len(whole) // 2 - 2):  # killed while the third was written
        path.write_bytes(whole + json.dumps(outcomes[2]).encode()[:cut])
        assert results.read(tmp_path) == {"a": {"x": outcomes[:2]}}
        save(outcomes[2], tmp_path)
        assert results.read(tmp_path) == {"a": {"x": outcomes}}
        assert path.read_bytes().startswith(whole)


def test_an_outcome_of_an_earlier_file_is_judged_by_the_present_one_beside_what_was_recorded() -> None:
    many = recorded("two_x", "759c91ad3")
    verdict, _, remark = results.judged(many, load("two_x"))
    assert (many["verdict"], verdict, remark) == (REFUTED, RELATED, "recorded as REFUTED by an earlier file, with ≥ 2")
    claim = load("cpu_bf16")
    claim.related, claim.criteria[0].at_least = "", 2
    quiet, busy = recorded("cpu_bf16", "a8605496d"), recorded("cpu_bf16", "fba84dab9")
    for record, expected in ((quiet, CONFIRMED), (busy, INCONCLUSIVE)):
        verdict, (finding,), remark = results.judged(record, claim)
        assert (verdict, finding["bounds"]) == (expected, "≥ 2")
        assert remark == f"recorded as {expected} by an earlier file, with ≥ 1.3"
    on_a_cpu = recorded("amp_recipe", "a8605496d")  # which this claim does not speak of
    assert results.judged(on_a_cpu, load("amp_recipe"))[0] == RELATED
    present = quiet | {"claim_sha256": claim.digest, "verdict": REFUTED}
    assert results.judged(present, claim) == (REFUTED, quiet["findings"], "")


def test_what_other_arms_gave_is_no_verdict_of_the_present_file() -> None:
    two_x, bf16, clip = recorded("two_x", "759c91ad3"), recorded("cpu_bf16", "a8605496d"), load("clip_order")
    many = load("two_x")
    many.setups["gpt2"] += " steps=99"  # what was run then is no longer what the file runs
    verdict, findings, remark = results.judged(two_x, many)
    assert (verdict, remark) == (RELATED, "recorded as REFUTED by an earlier file, with ≥ 2, of other arms")
    assert {finding["verdict"] for finding in findings} == {"", NOT_HERE}
    claim = load("cpu_bf16")
    claim.setups["resnet50"] += " steps=99"
    claim.related, claim.speaks_of = "", ["cuda"]  # which that machine lacks
    assert results.judged(bf16, claim)[0] == RELATED
    claim.speaks_of = []
    assert results.judged(bf16, claim)[0] == results.UNJUDGED
    record = recorded("clip_order", "82efd3a80") | {"claim_sha256": "of an earlier file"}
    assert results.judged(record, clip)[0] == CONFIRMED
    clip.arms["more"] = clip.arms["after"]
    clip.criteria.append(Criterion("grad_norm", "more", "fp32"))
    assert results.judged(record, clip)[0] == CONFIRMED  # it does not decide
    clip.criteria[-1].at_most = 1.0
    assert results.judged(record, clip)[0] == results.UNJUDGED
    for kind in ("left_out", "too_slow"):
        assert results.judged(record | {kind: {"more": "why"}}, clip)[0] == CONFIRMED
    assert results.judged(record | {"not_timed": {"more": "why"}}, clip)[0] == results.UNJUDGED  # it is no time
    clip.arms_need["more"] = ["cuda"]
    assert results.judged(record, clip)[0] == CONFIRMED


def test_a_related_outcome_says_why_also_where_the_claim_no_longer_does() -> None:
    claim = load("clip_order")
    record = recorded("clip_order", "82efd3a80") | {"claim_sha256": claim.digest, "verdict": RELATED}
    page = results.page({"a": {claim.id: [record | {"related": "the claim speaks of a GPU"}]}}, {claim.id: claim}, {})
    assert ". Without a verdict: the claim speaks of a GPU." in page


def test_pages_show_every_outcome_with_date_commit_and_age_the_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "newest", lambda: "2026-11-24")
    claim, lacking = load("cpu_bf16"), recorded("cpu_bf16", "6f236207b")
    older, newer = recorded("cpu_bf16", "fba84dab9"), recorded("cpu_bf16", "a8605496d") | {"date": "2026-11-24"}
    newer["git"] = newer["git"] | {"dirty": "true"}
    records = {"xeon": {claim.id: [older, newer]}, "epyc": {claim.id: [lacking]}}
    page = results.page(records, {claim.id: claim}, {})
    for text in (page, results.summary(records, {claim.id: claim})):
        assert 0 < text.index("2.324x") < text.index("1.482x")
        assert "2026-11-24, a8605496d with changes" in text
        assert "2026-11-21, fba84dab9, 3 days before the newest" in text
        assert "needs a CPU with AMX" in text
    assert "`epyc` (2026-11-23, 6f236207b, 1 day before the newest)" in page


def test_what_cannot_be_tested_for_the_same_reason_says_nothing_new() -> None:
    lacking = {"verdict": NOT_HERE, "claim_sha256": "a", "needs": ["a GPU"], "date": "2026-01-01"}
    assert results.repeats(lacking | {"date": "2026-01-02"}, [lacking])
    assert not results.repeats(lacking | {"needs": ["more"]}, [lacking])
    assert not results.repeats(lacking, [lacking, lacking | {"verdict": CONFIRMED}])
