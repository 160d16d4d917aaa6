"""The fixture ``precision_gate`` and the option ``--mantissa-report`` of pytest."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # every run of pytest imports this file
    from mantissa.compare import Comparison


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--mantissa-report", metavar="FOLDER", help="where precision_gate writes its pages; default: a temporary folder"
    )


@pytest.fixture
def precision_gate(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Comparison]:
    """``mantissa.precision_gate``, whose page goes to a folder of the test's own."""
    from mantissa import precision_gate as gate

    folder = request.config.getoption("--mantissa-report")
    name = re.sub(r"[^\w.]+", "-", request.node.nodeid).strip("-")
    return partial(gate, report=Path(folder, name) if folder else tmp_path / "mantissa-gate")
