"""An outcome is written as a file, checked where it arrives, and refused with one sentence where it is not true."""

from __future__ import annotations

import copy
import functools
import getpass
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence.claims import claims, results, submission
from evidence.claims import command as reproduce_cli
from tests.evidence.claims.made_up import Machine, reproduction
from trainer.errors import UserError
from trainer.files import write_json

COMMIT = {"commit": "a" * 40, "dirty": "false"}


@pytest.fixture
def sent(
    tmp_path: Path, files: Callable[..., None], made_up: Machine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[str, Any]]:
    """Tests a claim in which a run fails with words that name this machine, and sends the outcome."""
    monkeypatch.setattr(submission, "load", functools.partial(claims.load, folder=tmp_path / "claim"))
    files("mine")

    def send() -> dict[str, Any]:
        here = reproduction(tmp_path, made_up)
        here.git = COMMIT
        record = here.test("mine")
        submission.write(record, tmp_path / "submit")
        return record

    return send


def path_of(record: dict[str, Any], tmp_path: Path) -> Path:
    return tmp_path / "submit" / f"mine-{record['machine']}.json"


def test_what_was_sent_is_recorded_once(tmp_path: Path, sent: Callable[[], dict[str, Any]]) -> None:
    record = sent()
    assert submission.add(path_of(record, tmp_path), tmp_path / "results").parent.name == record["machine"]
    assert results.read(tmp_path / "results") == {record["machine"]: {"mine": [record]}}
    with pytest.raises(UserError, match="already"):
        submission.add(path_of(record, tmp_path), tmp_path / "results")


def test_the_file_names_neither_user_nor_host_nor_folders(
    tmp_path: Path, sent: Callable[[], dict[str, Any]], made_up: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.secret")
    made_up.exit_codes = {"bf16-s1": 1}
    made_up.words = (
        f"no space at /scratch/mallory's/x.bin, {Path.home() / 'a'}, {tmp_path}; mallory on node17.secret, "
        "http://mallory:pw@server/x"
    )
    record = sent()
    text = path_of(record, tmp_path).read_text(encoding="utf-8")
    assert "no space at" in text
    for private in ("mallory", "node17", "scratch", "pw@", str(tmp_path), str(Path.home())):
        assert private not in text
    submission.add(path_of(record, tmp_path), tmp_path / "results")  # a failed run is an outcome, too


def faster(record: dict[str, Any]) -> None:
    record["arms"]["bf16"]["measures"]["speed"][0] *= 2


def confirmed(record: dict[str, Any]) -> None:
    record["verdict"] = "REFUTED"


def eased(record: dict[str, Any]) -> None:
    record["findings"][0]["criterion"]["at_least"] = 1.0


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (faster, "throughput, bf16 over fp32 does not follow from the values of the runs"),
        (confirmed, "the verdict REFUTED does not follow"),
        (lambda record: record["arms"]["bf16"].update(others_cpu=[0.9] * 3), "verdict of throughput, bf16 over fp32"),
        (eased, "is not the one that evidence/claims/published/mine.yaml gives"),
        (lambda record: record.update(claim_sha256="0" * 64), "it is of another version of evidence/claims"),
        (lambda record: record["arms"]["bf16"]["overrides"].append("steps=9"), "it is of another version of evidence"),
        (lambda record: record.update(git={"commit": "a" * 40, "dirty": "true"}), "by code that is no commit"),
        (lambda record: record.update(machine="../../x"), "machine is not the name of its hardware"),
        (lambda record: record.update(home="/home/me"), "home is missing, unknown, or of another type"),
        (lambda record: record.pop("versions"), "versions is missing, unknown"),
        (lambda record: record["arms"]["bf16"].pop("seeds"), "its values are not those of an outcome"),
    ],
)
def test_an_outcome_that_is_not_true_is_refused(
    tmp_path: Path, sent: Callable[[], dict[str, Any]], tamper: Callable[[dict[str, Any]], None], words: str
) -> None:
    """With a fresh hash, as by someone who knows how."""
    record = sent()
    path, changed = path_of(record, tmp_path), copy.deepcopy(record)
    tamper(changed)
    write_json(path, changed)
    with pytest.raises(UserError, match=r"is refused: .*; ask its sender") as caught:
        submission.add(path, tmp_path / "results")
    assert words in str(caught.value)
    assert not (tmp_path / "results").exists()


def test_a_file_that_was_edited_is_refused(tmp_path: Path, sent: Callable[[], dict[str, Any]]) -> None:
    path = path_of(sent(), tmp_path)
    path.write_text(path.read_text().replace("250.0", "260.0"))
    with pytest.raises(UserError, match="refused: it was changed after it was written"):
        submission.add(path, tmp_path / "results")


def test_an_outcome_that_came_with_the_checkout_is_not_sent_as_ones_own(sent: Callable[[], dict[str, Any]]) -> None:
    record, claim = sent(), submission.load("mine")
    assert reproduce_cli._known({"mine": claim}, {"mine": record}, COMMIT) == {"mine": record}
    assert reproduce_cli._known({"mine": claim}, {"mine": record}, COMMIT | {"commit": "b" * 40}) == {}
