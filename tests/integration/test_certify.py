"""scripts/certify.py with real processes: a healthy job, and one whose resume is broken on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import PROJECT
from trainer.certify import certify

SCRIPT = PROJECT / "scripts" / "certify.py"

BROKEN = """
import sys
from trainer import certify_child, run

run.set_random_state = lambda state, device: None
sys.exit(certify_child.main())
"""
SMALL = ["recipe.context=8", "steps=20"]


def test_a_healthy_job_is_bitwise(folder: Path) -> None:
    """In fp16, so that it is also killed after a skipped step: every kind of kill once."""
    command = [sys.executable, str(SCRIPT), "recipe=bignet", "precision=fp16", "kills=7", "steps=20"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BITWISE" in done.stdout
    found = json.loads((folder / "outputs/certificate-bignet-fp16/certificate.json").read_text())
    assert (found["verdict"], len(found["kills"]), found["comparison"]["differences"]) == ("BITWISE", 7, [])
    assert len({kill["killed"] for kill in found["kills"]}) == 7
    assert found["skipped_steps"] > 0
    assert found["resumes"] >= 6
    assert found["comparison"]["repeated_steps"] > 0
    assert (folder / "outputs/certificate-bignet-fp16/certificate.md").read_text() in done.stdout
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "exists; remove it" in done.stderr) == (2, True)


def test_a_forgotten_generator_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken_child.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{PROJECT}")
    result = certify(["recipe=gpt2", *SMALL], folder / "outputs", kills=2, seed=2, child="broken_child")
    assert result.exit_code == 6
    assert result.verdict.startswith("DIVERGED AT step ")
    assert 3 < int(result.verdict.split()[-1]) <= 20


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["recipe=gpt2", "kills=0"], "kills=0 must be at least 1"),
        (["recipe=gpt2", "kills=many"], "kills=many is not a number"),
        (["gpt2"], "'gpt2' is not an option; write key=value"),
    ],
)
def test_mistakes(arguments: list[str], told: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert told in done.stderr
