from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from recipes.gpt2_model import SHAPES, Shape


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def smallest_gpt2() -> Iterator[None]:
    """recipe.size=tiny of gpt2: two blocks of width 32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", Shape(2, 2, 32, 16))
        yield
