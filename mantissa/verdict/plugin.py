"""The fixture ``precision_gate`` of pytest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # every run of pytest imports this file
    from mantissa.verdict.comparison import Comparison


@pytest.fixture
def precision_gate(tmp_path: Path) -> Callable[..., Comparison]:
    """``mantissa.precision_gate``, whose page goes to the test's temporary folder, or to ``report=``."""
    from mantissa import precision_gate as gate

    return partial(gate, report=tmp_path / "mantissa-gate")
