"""The recipe of docs/recipes.md, put into a copy of the project as a reader would do it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.command_line.conftest import Start
from tests.helpers import PROJECT


def blocks() -> dict[str, str]:
    """The page's file of a recipe by its path, as its first comment names it."""
    page = (PROJECT / "docs" / "recipes.md").read_text()
    found = {}
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        path = re.search(r"^# ((?:recipes|conf)/\S+\.(?:py|yaml))", block, re.MULTILINE)
        if path:
            found[path[1]] = block
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project as it is tracked, and the file."""
    root = tmp_path / "project"
    for name in ("mantissa", "trainer", "recipes", "conf", "scripts"):
        shutil.copytree(PROJECT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in blocks().items():
        assert not (root / path).exists()
        (root / path).write_text(text)
    return root


def test_runs_and_learns_as_documented(copy: Path, folder: Path, start: Start) -> None:
    sweep = ("-m", "recipe=tumour", "precision=bf16", "recipe.width=32,64", "tracking=local")
    process = start(*sweep, script=copy / "scripts" / "train.py", fresh=True)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "569 tumours, 30 numbers each" in out
    runs = sorted((folder / "outputs").iterdir())
    for run, width in zip(runs, (32, 64), strict=True):
        summary = json.loads((run / "summary.json").read_text())
        assert summary["step"] == 200
        assert summary["final"]["valid/accuracy"] > 0.94
        assert 0.05 < summary["final"]["valid/loss"] < 0.3  # a mean over the microbatch would be divided twice
        assert (run / "best" / "model.safetensors").exists()
        config = json.loads((run / "config.json").read_text())
        assert (config["recipe"], config["recipe.width"], config["data"]) == ("tumour", width, "own")
