from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import CPU, PROJECT
from trainer import bench_scale
from trainer.errors import RunError
from trainer.files import child_environment
from trainer.provenance import versions
from trainer.trial import trial

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
    done = subprocess.run(command, cwd=PROJECT, env=child_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["versions"]["mlflow"] is None
    assert summary["versions"]["torch"]


def test_a_child_finds_the_project_first_and_then_what_was_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages may be installed in a folder that only PYTHONPATH names."""
    (tmp_path / "only_there.py").write_text("")
    (tmp_path / "trainer.py").write_text("raise SystemExit('not the project')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KEPT", "1")
    command = [sys.executable, "-P", "-c", "import only_there, trainer; print(trainer.__file__)"]
    environment = child_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.stdout.strip() == str(PROJECT / "trainer" / "__init__.py"), done.stderr
    assert (environment["KEPT"], environment["OMP_NUM_THREADS"]) == ("1", "1")
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(PROJECT)
    assert "PYTHONPATH" not in os.environ


def test_trials_and_benchmarks_keep_the_path_of_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []

    def run(command: list[str], env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        paths.append(env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, 1, "", "stopped here")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match="stopped here"):
        trial(["steps=1"])
    with pytest.raises(RunError, match="stopped here"):
        bench_scale.parallel(CPU, 1, tmp_path)
    assert paths == [os.pathsep.join([str(PROJECT), str(tmp_path)])] * 2
