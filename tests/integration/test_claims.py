"""Every claim's file runs end to end at its reduced size, through the real command lines, and decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer import probes
from trainer.claims import load, names
from trainer.hardware import detect
from trainer.reproduce import Reproduction


@pytest.fixture
def launch(train: Callable[..., Any]) -> Callable[[list[str], Path], int]:
    """What a Runner calls in place of a process of its own: the same command line, in this process."""

    def run(command: list[str], log: Path) -> int:
        script, *arguments = command[1:]
        if script.endswith("probe.py"):
            probes.run(arguments)
            return 0
        done = train(*arguments)
        log.write_text(done.out + done.err)
        return int(done.code)

    return run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of tokens: the same text for all claims."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def text(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("To be, or not to be, that is the question.\n" * 40)
    return f"data.path={path}"


@pytest.mark.parametrize("name", [name for name in names() if not load(name).combines])
def test_every_claim_runs_reduced(
    name: str,
    launch: Callable[[list[str], Path], int],
    text: str,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MANTISSA_CACHE", str(cache))
    told: list[str] = []
    reproduction = Reproduction(detect("cpu"), folder / "runs", [text], reduced=True, tell=told.append, launch=launch)
    record = reproduction.test(name)
    assert record["verdict"] == "reduced: no verdict"
    assert record["failures"] == []
    assert record["left_out"] == {}
    claim = load(name)
    assert set(record["arms"]) - {"null_arm"} == set(claim.arms)
    for finding, criterion in zip(record["findings"], claim.criteria, strict=True):
        assert finding["bounds"] == criterion.bounds()
        assert finding["median"] is not None or criterion.measure in ("speed", "energy"), finding
    json.dumps(record, allow_nan=False)
    assert "To be" not in json.dumps(record)
    assert str(folder) not in json.dumps(record["arms"])
