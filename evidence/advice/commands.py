"""The command lines that an advice ends with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from evidence.advice.candidates import Candidate
from evidence.advice.schema import Advice
from evidence.runs import merged
from trainer.config.compose import key_of

NOT_ADVISED = ("output_dir", "run_name", "resume", "tracking", "checkpoint", "profiler")
"""Keys and groups that say where and how a run is recorded: those of the advice are not those of later runs."""


def overrides_of(given: Sequence[str], candidate: Candidate) -> list[str]:
    """Return the overrides of train.py that make up a candidate, the user's own (``given``) before it."""
    kept = [text for text in given if re.split(r"[.=]", text.lstrip("+~"))[0] not in NOT_ADVISED]
    return merged(kept, candidate.overrides)


def training(advice: Advice) -> str:
    """Return the command that trains with the winner."""
    overrides = overrides_of(advice.overrides, advice.entry(advice.winner).candidate)
    return shlex.join(["python", "scripts/train.py", *overrides])


def comparison(advice: Advice) -> str:
    """Return the command that tests whether the winner trains as well as the baseline."""
    common = [text for text in overrides_of(advice.overrides, Candidate("")) if key_of(text) != "seed"]
    roles = {"baseline": advice.baseline, "advised": advice.winner}
    arms = [f"arm.{role}={' '.join(advice.entry(label).candidate.overrides)}" for role, label in roles.items()]
    return shlex.join(["python", "scripts/compare.py", *common, *arms])
