"""Real processes: torchrun, and what each of its ranks wrote down."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests import forks

PROJECT = Path(__file__).resolve().parents[2]
LINUX = sys.platform == "linux"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FORKED_TORCHRUN = [sys.executable, str(PROJECT / "tests" / "parallel" / "launch.py")] if LINUX else TORCHRUN
"""For ``forks.Popen``."""
Found = list[dict[str, Any]]


def environment() -> dict[str, str]:
    """One thread a process, and nothing of an outer torchrun or MLflow."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC", "MLFLOW", "MASTER_", "GROUP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    paths = filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])  # packages may be in a folder of their own
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def forked_environment() -> dict[str, str]:
    """The same for ``forks.Popen``, whose server needs no path of its own."""
    return {key: value for key, value in environment().items() if key != "PYTHONPATH"}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Found]:
    """``ranks("all", 2)``: what the ranks of tests/parallel/ranks.py found, run once for all tests of all workers."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    @functools.cache
    def found(case: str, processes: int) -> Found:
        kept = shared / f"ranks-{case}-{processes}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                kept.write_text(json.dumps(run(case, processes)))
        result: Found = json.loads(kept.read_text())
        return result

    def run(case: str, processes: int) -> Found:
        folder = tmp_path_factory.mktemp(f"{case}-{processes}")
        torchrun = [*FORKED_TORCHRUN, "--standalone", f"--nproc-per-node={processes}"]
        command = torchrun if processes > 1 else [sys.executable]
        ended = forks.run(
            [*command, "-m", "tests.parallel.ranks", case, str(folder)],
            cwd=PROJECT,
            env=forked_environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        parts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        assert len(parts) == processes
        return parts

    return found
