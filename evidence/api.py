"""What a Python program compares precisions with: ``from trainer import compare``."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from evidence.comparison.command import compared
from trainer.api import as_overrides
from trainer.errors import Interrupted, UserError
from trainer.terminal import Terminal


def compare(
    *overrides: str, arms: str | Sequence[str] | Mapping[str, str | Sequence[str]], **options: Any
) -> dict[str, Any]:
    """Train precisions, or any overrides, with several seeds, print the verdicts and return them.

    Every run is a fresh process, so recipe and data are those of files (not of ``Recipe.of``). Interrupted, the same
    call continues.

    Args:
        overrides: of all runs, such as ``"recipe=gpt2"``.
        arms: precisions, as a list or as ``"fp32,bf16"``; or overrides by the arm's name, such as
            ``{"compiled": "precision=bf16 compile=default"}``.
        options: those of scripts/compare.py: ``seeds=5``, ``baseline="fp32"``, ``margin="0.3%"``,
            ``name=…``, ``output_dir=…``; and overrides.

    Returns:
        The content of comparison.json: below ``arms`` each with its ``quality``, ``speed``, ``memory`` and ``reach``.

    Raises:
        UserError: an arm or an option cannot work, or another comparison has this name.
    """
    if wrong := [given for given in overrides if not isinstance(given, str)]:
        raise UserError(f"{type(wrong[0]).__name__}: every run is a fresh process, which has only what files describe")
    if isinstance(arms, Mapping):
        typed = [f"arm.{name}={text if isinstance(text, str) else ' '.join(text)}" for name, text in arms.items()]
    else:
        typed = [f"arms={arms if isinstance(arms, str) else ','.join(arms)}"]
    try:
        with Terminal().in_use():
            return compared([*overrides, *typed, *as_overrides(options)]).to_dict()
    except KeyboardInterrupt:
        raise Interrupted("the runs that have ended are kept, and the same call continues", signal.SIGINT) from None
