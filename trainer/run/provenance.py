"""Where a run came from: the commit, the command, the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import mantissa
from trainer.config.command_line import as_typed
from trainer.files import PROJECT
from trainer.parallel.world import launched_processes

_PACKAGES = ("torch", "torchvision", "transformers", "datasets", "numpy", "hydra-core", "mlflow")
_NO_CODE = (":!*.md", ":!docs", ":!results")


def git_facts() -> dict[str, str]:
    """Return the commit and whether the tree differs from it, pages and outcomes aside; nothing without git."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_NO_CODE)
    return {"commit": commit, "dirty": str(bool(changes)).lower()}


def versions() -> dict[str, str | None]:
    """Return the installed version of every package that can change a result; None where it is not installed."""
    return {name: _version(name) for name in _PACKAGES}


def environment() -> str:
    """Return what a bug report needs, a line each: the versions of Mantissa, Python and packages, and the system."""
    git = git_facts()
    commit = f"commit {git['commit']}{' with changes' if git['dirty'] == 'true' else ''}" if git else "commit unknown"
    lines = [f"Mantissa {mantissa.__version__}, {commit}", f"Python {platform.python_version()}, {platform.platform()}"]
    return "\n".join([*lines, *(f"{name} {found or 'is not installed'}" for name, found in versions().items())])


def resume_command(folder: Path) -> str:
    """Return the command line that continues the run in ``folder``, from the current folder."""
    launcher = ["python"]
    if launched_processes():
        launcher = ["torchrun", f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}"]
        if (nodes := launched_processes() // int(os.environ["LOCAL_WORLD_SIZE"])) > 1:
            launcher.append(f"--nnodes={nodes}")
    return shlex.join([*launcher, sys.argv[0], _resume(folder)])


def doctor_command(folder: Path) -> str:
    """Return the command line that looks for the cause of a failure of the run in ``folder``, from the current folder.

    It replays all ranks in one process.
    """
    return shlex.join(["python", os.path.relpath(PROJECT / "scripts" / "doctor.py"), _resume(folder)])


def _resume(folder: Path) -> str:
    return f"resume={as_typed(str(folder))}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
