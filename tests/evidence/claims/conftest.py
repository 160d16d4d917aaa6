"""Claims in a folder of their own, run on a machine that is made up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from evidence.claims import claims, reproduce, results
from tests.evidence.claims.made_up import CLAIM, Machine
from trainer.hardware import Hardware


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write claims to a folder of their own."""
    folder = tmp_path / "claim"
    folder.mkdir()
    for module in (reproduce, results):
        monkeypatch.setattr(module, "load", functools.partial(claims.load, folder=folder))
    monkeypatch.setattr(results, "names", functools.partial(claims.names, folder))

    def write(name: str, **changes: Any) -> None:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(CLAIM | changes, sort_keys=False))

    return write


@pytest.fixture
def made_up() -> Machine:
    return Machine()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """By format, why its speed is not tested here: it is, unless a test says so."""
    reasons: dict[str, str] = {}

    def not_timed_here(mode: str, hardware: Hardware) -> str | None:
        return reasons.get(mode.partition("_")[0])

    monkeypatch.setattr(claims, "not_timed_here", not_timed_here)
    return reasons
