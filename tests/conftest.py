from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[1]

# No test asks a network. The libraries read this at their import, and at a closed port they give up at once.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"

# A shell starts background processes with Ctrl-C ignored, nohup without hang-ups; what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Inductor's cache does not tell kernels of AVX-512 from those that ATEN_CPU_CAPABILITY=avx2 asks for, which gives NaN.
_COMPILED = f"inductor-of-tests-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir(), _COMPILED))
torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other
ALONE = find_spec("hydra") is None
"""Whether the library is tested alone, as `pip install .` installs it."""
if not ALONE:
    from tests.composing import compose_quickly

    compose_quickly()


BY_CPU = [
    *("trainer/precision", "trainer/profiling/test_rates.py", "parity", "evidence/doctor/test_healthy.py"),
    *("evidence/claims", "command_line/test_mistakes.py", "command_line/training/test_ending.py"),
    "command_line/test_commands.py",
]
"""Tests of what differs between kinds of CPU: kernels, rounding, rates, and which claims can be tested."""


SEVERAL_PROCESSES = ("parallel", "kills")
"""Folders whose tests start several processes that compute: one at a time, and first, as they take the longest."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Tests by CPU are marked; of several workers one has all tests of a file, so that each fixture is made once."""
    tests = PROJECT / "tests"
    by_cpu, several = {tests / place for place in BY_CPU}, {tests / place for place in SEVERAL_PROCESSES}
    for item in items:
        if by_cpu & {item.path, *item.path.parents}:
            item.add_marker("by_cpu")
        if config.pluginmanager.hasplugin("xdist"):
            group = "several processes" if several & {*item.path.parents} else item.location[0]
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not several & {*item.path.parents})


@pytest.fixture(scope="session", autouse=True)
def shortcuts_taken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that tests start measure no rates, migrate no databases, draw no plots and see no modules as garbage."""
    if ALONE:
        yield
        return
    from tests import shortcuts

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    os.environ[shortcuts.STORE] = str(shared / "empty-mlflow.db")
    shortcuts.take()
    gc.freeze()  # each run looks for garbage, and would walk all modules each time
    yield
    gc.unfreeze()  # else nanobind reports leaks


@pytest.fixture(scope="session")
def empty_store(shortcuts_taken: None) -> Path:
    """An MLflow store that has been through its migrations, which take seconds, to be copied."""
    from tests import shortcuts

    return shortcuts.migrated()


@pytest.fixture
def commands_in_this_process() -> Iterator[None]:
    """What commands change in this process is undone."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """A terminal of a command, which takes the logger over, leaves it behind; also one of a fixture of the file."""
    _reset_logger()
    yield
    _reset_logger()


def _reset_logger() -> None:
    logger = logging.getLogger("mantissa")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process draw their plots."""
    from tests import shortcuts

    monkeypatch.setattr("trainer.tracking.plots.plot_run", shortcuts.draw)


@pytest.fixture(autouse=True)
def own_kernels() -> Iterator[None]:
    """A test leaves torch's own kernels behind."""
    yield
    if kernels := sys.modules.get("trainer.precision.kernels"):
        kernels.clear()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data that the repository does not hold: Shakespeare, MNIST's test images, GPT-2's tokenizer."""
    folder = Path(os.environ.get("MANTISSA_TEST_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real test data in {folder} (set MANTISSA_TEST_DATA to a folder that has it)")
    return folder
