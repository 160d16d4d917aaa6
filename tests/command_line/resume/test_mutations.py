"""One file of a run's folder is changed: what reads it refuses that, or does as without it.

The long form, over more runs: python -m tests.mutations count=500
"""

from __future__ import annotations

from pathlib import Path

from tests.mutations import BAD, campaign


def test_a_changed_file_is_refused_or_changes_nothing(folder: Path) -> None:
    counted = campaign(folder, 12, 3, ("ema",))
    assert not [outcome for outcome in BAD if counted[outcome]]
    assert {*counted} == {"refused", "equal"}
