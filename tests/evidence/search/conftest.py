from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Optuna's SQLite file without a study, to be copied: making its tables takes a second."""
    import optuna

    from evidence.search.study import DATABASE, studies

    path = tmp_path_factory.mktemp("optuna") / DATABASE
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    studies(path.parent)
    return path
