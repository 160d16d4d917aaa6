"""The winner's check-up by the doctor."""

from __future__ import annotations

import json
from pathlib import Path

from evidence.advice.checkup import check
from evidence.doctor.command import main as doctor
from mantissa import shell
from tests.helpers import CPU

BIGNET = ("recipe=bignet", "recipe.layers=2", "recipe.width=8", "batch_size=4", "data.samples=64")


def in_this_process(command: list[str], log: Path, limit_s: float) -> shell.Ended:
    return shell.Ended(doctor(command[2:]), 1.0, "")


def test_a_setting_is_examined_by_the_doctor_with_few_samples(tmp_path: Path) -> None:
    given = [*BIGNET, "batch_size=64", "micro_batch_size=32", "precision=bf16", "tracking=local"]
    found = check(given, CPU, tmp_path, in_this_process)
    assert (found["faults"], found["healthy"], found["samples"]) == ([], True, 2)
    (report,) = tmp_path.glob("doctor/*/verdict.json")
    verdict = json.loads(report.read_text())
    assert [format["name"] for format in verdict["formats"]] == ["fp64", "fp32", "bf16"]

    overflow = [*BIGNET, "precision=fp16", "recipe.loss_weight=1e9", "scaler=none", "scaler.force=true"]
    found = check(overflow, CPU, tmp_path, in_this_process)
    assert not found["healthy"]
    assert "overflow" in found["faults"][0]

    for code, words in ((7, "exit code 7; run it: python "), (None, "did not end within")):
        ended = shell.Ended(code, 1.0, "")
        gone = check(overflow, CPU, tmp_path, lambda *_, ended=ended, **__: ended)  # the earlier report does not count
        assert (gone["faults"], gone["healthy"]) == ([], False)
        assert words in gone["missed"][0]
