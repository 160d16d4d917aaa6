from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optuna's SQLite file without a study, to be copied: making its tables takes a second."""
    import optuna

    path = tmp_path_factory.mktemp("optuna") / "optuna.db"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna.storages.RDBStorage(f"sqlite:///{path}")
    return path
