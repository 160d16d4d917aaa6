from __future__ import annotations

from pathlib import Path

import pytest

from trainer.run import provenance


def test_a_copy_without_git_has_the_commit_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr(provenance, "PROJECT", tmp_path)
    for given, facts in {
        commit: {"commit": commit, "dirty": "false"},
        f"{commit}-dirty": {"commit": commit, "dirty": "true"},
        "main": {},
        "": {},
    }.items():
        monkeypatch.setenv("MANTISSA_COMMIT", given)
        assert provenance.git_facts() == facts
