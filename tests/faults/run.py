"""Plant each fault of tests/faults/faults.yaml in a copy of the source, and report whether its tests fail.

    python tests/faults/run.py                     # all of them
    python tests/faults/run.py scale masters       # those whose names hold one of these words
    python tests/faults/run.py workers=2           # so many at a time

Exit code 1: a fault is missed, does not apply any more, or its tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from tests.faults.faults import FAULTS, DoesNotApply, Fault  # noqa: E402

CAUGHT, MISSED = "caught", "MISSED"
TIMEOUT_S = 900


def copy_source(target: Path) -> Path:
    """Copy what git tracks or could track to ``target``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, target / name)
    return target


def pytest(project: Path, *tests: str) -> tuple[int, str]:
    """Run tests until one fails; return pytest's exit code and the end of what it printed."""
    environment = os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("MANTISSA_TEST_DATA", str(PROJECT.parent / "shared" / "data"))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder}/t"]
        try:
            ended = subprocess.run(
                [*command, *tests], cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return -1, f"longer than {TIMEOUT_S} s"
    return ended.returncode, (ended.stdout + ended.stderr)[-2000:]


def attempt(fault: Fault, project: Path) -> tuple[str, str]:
    """Plant one fault, and take it back; return the outcome, and why where it is not caught."""
    path = project / fault.file
    whole = path.read_bytes()
    try:
        path.write_text(fault.planted(project), encoding="utf-8")
        code, output = pytest(project, fault.test)
    except DoesNotApply as reason:
        return "does not apply", str(reason)
    finally:
        path.write_bytes(whole)
    if code == 1:
        return CAUGHT, ""
    # 0: all passed. Anything else is no verdict of a test: a wrong name, or an end by force.
    return MISSED, "" if code == 0 else f"pytest's exit code {code}: {output}"


def main(arguments: list[str]) -> int:
    """Plant the faults whose names hold one of the words."""
    words = [each for each in arguments if "=" not in each]
    workers = int(dict(each.split("=") for each in arguments if "=" in each).get("workers", 1))
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        for worker in range(workers):
            copies.put(copy_source(Path(scratch, str(worker))))
        whole = copies.get()
        code, output = pytest(whole, *dict.fromkeys(fault.test for fault in chosen))
        copies.put(whole)
        if code:
            print(f"the tests fail without any fault:\n{output}")
            return 1

        def one(fault: Fault) -> tuple[str, str, float]:
            project, began = copies.get(), time.monotonic()
            try:
                return *attempt(fault, project), time.monotonic() - began
            finally:
                copies.put(project)

        missed = 0
        with ThreadPoolExecutor(workers) as pool:
            for fault, (outcome, why, seconds) in zip(chosen, pool.map(one, chosen), strict=True):
                missed += outcome != CAUGHT
                print(f"{outcome:<15}{seconds:4.0f} s  {fault.name}{f': {why}' if why else ''}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
