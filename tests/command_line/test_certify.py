"""scripts/certify.py with real processes: a healthy job, and one whose resume is broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from evidence.certificate.certify import CertifyOptions, certify, main
from tests import forks
from tests.command_line.conftest import Result


def test_a_healthy_job_is_bitwise(folder: Path, script: Callable[..., Result]) -> None:
    """In fp16, so that it is also killed after a skipped step: every kind of kill once."""
    job = ("recipe=bignet", "recipe.width=16", "recipe.layers=2", "precision=fp16", "kills=7", "steps=20")
    done = script(main, *job)
    assert done.code == 0, done.out + done.err
    certificate = folder / "outputs/certificate-bignet-fp16"
    assert (certificate / "certificate.md").read_text() in done.out
    found = json.loads((certificate / "certificate.json").read_text())
    assert (found["verdict"], len(found["kills"]), found["comparison"]["lost"]) == ("BITWISE", 7, [])
    assert len({kill["killed"] for kill in found["kills"]}) == 7
    assert found["skipped_steps"] > 0
    assert found["resumes"] >= 6
    assert found["comparison"]["repeated_steps"] > 0
    done = script(main, *job)
    assert (done.code, "exists; remove it" in done.err) == (2, True)


def test_a_forgotten_generator_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evidence.certificate.certify.subprocess", forks)
    options = CertifyOptions(kills=2, seed=2, output_dir=folder / "outputs")
    result = certify(["recipe=gpt2", "recipe.context=8", "steps=20"], options, "tests.command_line.broken_child")
    assert result.exit_code == 6
    assert result.verdict.startswith("DIVERGED AT step ")
    assert 3 < int(result.verdict.split()[-1]) <= 20
