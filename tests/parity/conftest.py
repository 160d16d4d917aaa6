from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from recipes.gpt2 import SHAPES, Shape


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """``recipe.size=tiny``: two layers, small enough to be trained some hundred times."""
    monkeypatch.setitem(SHAPES, "tiny", Shape(2, 2, 32, 16))
    monkeypatch.setitem(SHAPES, "wide", Shape(2, 2, 128, 16))  # its memory is weights, not activations


@pytest.fixture(autouse=True)
def leave_torch_as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
