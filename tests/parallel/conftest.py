"""Real processes: torchrun, and what each of its ranks wrote down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Found = list[dict[str, Any]]


def environment() -> dict[str, str]:
    """One thread a process, and nothing of an outer torchrun or MLflow."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC", "MLFLOW", "MASTER_", "GROUP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Found]:
    """``ranks("all", 2)``: what the ranks of tests/parallel/ranks.py found, run once for all tests."""
    done: dict[tuple[str, int], Found] = {}

    def run(case: str, processes: int) -> Found:
        if (case, processes) not in done:
            folder = tmp_path_factory.mktemp(f"{case}-{processes}")
            command = [*TORCHRUN, f"--nproc-per-node={processes}"] if processes > 1 else [sys.executable]
            ended = subprocess.run(
                [*command, "-m", "tests.parallel.ranks", case, str(folder)],
                cwd=PROJECT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=400,
            )
            assert ended.returncode == 0, ended.stderr[-4000:]
            done[case, processes] = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
            assert len(done[case, processes]) == processes
        return done[case, processes]

    return run
