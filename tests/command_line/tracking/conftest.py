"""A store of a test's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def store(folder: Path, empty_store: Path) -> str:
    """The address of ``mlflow.db`` in the current folder, which is where runs go without any option."""
    return f"sqlite:///{shutil.copy(empty_store, folder / 'mlflow.db')}"
