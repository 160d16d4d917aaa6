from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to the project's conf/."""
    monkeypatch.setattr("evidence.advice.command.CONF", tmp_path / "conf")
