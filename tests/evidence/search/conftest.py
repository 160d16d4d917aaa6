from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optuna's SQLite file without a study, to be copied: making its tables takes a second."""
    import optuna

    path = tmp_path_factory.mktemp("optuna") / "optuna.db"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna.storages.RDBStorage(f"sqlite:///{path}")
    return path
