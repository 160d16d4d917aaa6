from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import PROJECT
from trainer.run import provenance

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
