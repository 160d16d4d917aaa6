"""Claims run end to end at their reduced size, through the real command lines, and decide nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import probe
from evidence.claims.claims import load, names
from evidence.claims.reproduce import Reproduction
from evidence.measures import TIMED
from evidence.runs import Launch
from tests.command_line.conftest import Train
from trainer.config.compose import compose
from trainer.hardware import detect


@pytest.fixture
def launch(train: Train) -> Launch:
    """What a Runner calls in place of a process of its own: the same command line, in this process."""

    def run(command: list[str], log: Path, limit_s: float | None) -> int:
        script, *arguments = command[1:]
        if script.endswith("probe.py"):
            probe.measure(arguments)
            return 0
        done = train(*arguments)
        log.write_text(done.out + done.err)
        return int(done.code)

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("To be, or not to be, that is the question.\n" * 40)
    return f"data.path={path}"


def of_new_kinds() -> list[str]:
    """Claims that together have every measure and every probe."""
    chosen: list[str] = []
    seen: set[str] = set()
    for name in names():
        claim = load(name)
        probes = {word for setup in claim.setups.values() for word in setup.split() if word.startswith("probe=")}
        if kinds := {criterion.measure for criterion in claim.criteria}.union(probes) - seen:
            chosen.append(name)
            seen |= kinds
    return chosen


@pytest.mark.parametrize("name", of_new_kinds())
def test_claims_of_every_kind_run_reduced(name: str, launch: Launch, text: str, folder: Path) -> None:
    reproduction = Reproduction(detect("cpu"), folder / "runs", [text], reduced=True, launch=launch)
    record = reproduction.test(name)
    assert record["verdict"] == "reduced: no verdict"
    assert record["failures"] == []
    assert record["left_out"] == {}
    claim = load(name)
    assert set(record["arms"]) - {"null_arm"} == set(claim.arms)
    for finding, criterion in zip(record["findings"], claim.criteria, strict=True):
        assert finding["bounds"] == criterion.bounds()
        assert finding["median"] is not None or criterion.measure in TIMED, finding
    json.dumps(record, allow_nan=False)
    assert "To be" not in json.dumps(record)
    assert str(folder) not in json.dumps(record["arms"])


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("reduced", [False, True])
def test_every_arm_of_every_claim_composes(name: str, reduced: bool, text: str) -> None:
    claim = load(name)
    if reduced:
        claim.reduce()
    for arm in claim.runs(list(claim.arms), [text], "cpu", memory_ledger=False):
        if not arm.script.endswith("probe.py"):
            compose(arm.overrides)
