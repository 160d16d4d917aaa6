from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import PROJECT
from trainer.run import provenance
from trainer.run.provenance import versions

MISSING = ("mlflow", "datasets", "pandas", "pyarrow", "sklearn", "scipy", "pynvml", "torchao", "selenium")
# Runs a script as if these packages were not installed: neither their modules nor their versions are found.
WITHOUT = """
import importlib.metadata, runpy, sys
missing = sys.argv[1].split(",")
installed = importlib.metadata.version
def version(name):
    if name in missing:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.version = version
sys.modules.update(dict.fromkeys(missing))
sys.argv[:2] = ["scripts/train.py"]
runpy.run_path("scripts/train.py", run_name="__main__")
"""


def test_versions_name_what_is_installed_and_are_none_for_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("mlflow", "datasets"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions()
    assert found["mlflow"] is None
    assert found["datasets"] is None
    assert found["torch"] == installed("torch")
    assert json.loads(json.dumps(found)) == found


def test_training_without_mlflow_needs_neither_it_nor_what_comes_with_it(tmp_path: Path) -> None:
    gpt2 = ["recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "data.vocab_size=64"]
    size = ["steps=2", "batch_size=2", "profiler=none", "tracking=local", "device=cpu", f"output_dir={tmp_path}"]
    command = [sys.executable, "-c", WITHOUT, ",".join(MISSING), *gpt2, *size, "run_name=alone"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["versions"]["mlflow"] is None
    assert summary["versions"]["torch"]


def test_the_project_is_imported_from_any_folder(tmp_path: Path) -> None:
    """As it is installed: `python scripts/train.py`, and what it starts, look for it nowhere else."""
    (tmp_path / "trainer.py").write_text("raise SystemExit('not the project')")
    command = [sys.executable, "-P", "-c", "import evidence, recipes, trainer; print(trainer.__file__)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.stdout.strip() == str(PROJECT / "trainer" / "__init__.py"), done.stderr


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
