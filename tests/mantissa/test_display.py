"""Numbers as they are shown."""

from __future__ import annotations

import pytest

from mantissa.commands import seconds_of
from mantissa.display import counted, loss, mebibytes


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(40_000, "0.0381"), (3 * 2**20, "3"), (3.456 * 2**20, "3.46"), (88 * 2**20, "88.0"), (5000.4 * 2**20, "5,000")],
)
def test_the_memory_of_a_small_model_is_not_0(amount: float, shown: str) -> None:
    assert mebibytes(amount) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(2.5, "2.5000"), (0.00123456, "0.00123"), (123456.7, "123456.7000"), (1.2851e216, "1.29e+216")]
)
def test_a_huge_perplexity_has_no_hundred_digits(value: float, shown: str) -> None:
    assert loss(value) == shown


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5min", 300), ("1.5h", 5400)])
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert seconds_of("time_budget=", text) == seconds


@pytest.mark.parametrize(
    ("number", "noun", "shown"), [(1, "step", "1 step"), (2000, "step", "2,000 steps"), (0, "batch", "0 batches")]
)
def test_a_number_and_its_noun_agree(number: int, noun: str, shown: str) -> None:
    assert counted(number, noun) == shown
