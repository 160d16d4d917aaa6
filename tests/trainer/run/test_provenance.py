from __future__ import annotations

from pathlib import Path

import pytest

from trainer.run import provenance


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run without MLflow imports is in tests/command_line/training/test_imports.py."""
    monkeypatch.setattr(provenance, "_PACKAGES", ("pytest", "a-package-that-nobody-has"))
    assert provenance.versions() == {"pytest": pytest.__version__, "a-package-that-nobody-has": None}


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
