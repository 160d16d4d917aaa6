"""Where a run came from: the commit, the versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

import mantissa
from trainer.files import PROJECT

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
