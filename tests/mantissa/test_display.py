"""Numbers as they are shown."""

from __future__ import annotations

import pytest

from mantissa.display import mebibytes


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(40_000, "0.0381"), (3 * 2**20, "3"), (3.456 * 2**20, "3.46"), (88 * 2**20, "88.0"), (5000.4 * 2**20, "5,000")],
)
def test_the_memory_of_a_small_model_is_not_0(amount: float, shown: str) -> None:
    assert mebibytes(amount) == shown
