from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import attention
from tests.composing import compose_quickly
from trainer.profiling import rates
from trainer.recipe import Choice

PROJECT = Path(__file__).resolve().parents[1]

# A shell starts background processes with Ctrl-C ignored, and processes that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
compose_quickly()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that no worker is left alone with them at the end."""
    items.sort(key=lambda item: PROJECT / "tests" / "parallel" not in item.path.parents)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between equally fast choices a measurement decides by chance, and compared runs would differ."""
    monkeypatch.setattr(attention, "choose", lambda *_: Choice("recipe.attention", "sdpa", "not measured in tests"))


@pytest.fixture(scope="session", autouse=True)
def no_product_rates() -> Iterator[None]:
    """The rates of matrix products are given, not measured: every run shows them, and measuring them takes time."""
    given = {"fp32": 0.1, "tf32": 0.4, "bf16": 0.8, "fp16": 0.001, "fp8": 1.6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "remembered", lambda kind, of, work: given[of["format"]])
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data that the repository does not hold: Shakespeare, MNIST's test images, GPT-2's tokenizer."""
    folder = Path(os.environ.get("MANTISSA_TEST_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real test data in {folder} (set MANTISSA_TEST_DATA to a folder that has it)")
    return folder
