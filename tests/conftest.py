from __future__ import annotations

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data that the repository does not hold: Shakespeare, MNIST's test images, GPT-2's tokenizer."""
    folder = Path(os.environ.get("MANTISSA_TEST_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real test data in {folder} (set MANTISSA_TEST_DATA to a folder that has it)")
    return folder
