"""``scripts/ui.py`` as a user runs it, and runs that go to the server that it starts."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient

from scripts.ui import main
from tests.command_line.conftest import Result, Train
from tests.command_line.tracking.test_mlflow_checkpoints import JOB, RUN
from tests.helpers import same_bits
from tests.serving import served
from tests.tracked import open_log, points, run_id, tracked
from trainer.checkpoint.reader import load
from trainer.tracking.checkpoints import stored_names
from trainer.tracking.store import connect
from trainer.tracking.tracked_run import TrackedRun
from trainer.trainer import Trainer


def test_a_store_without_runs_is_named_and_a_server_has_a_page_of_its_own(
    folder: Path, script: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = script(main)
    assert (done.code, "no runs yet in" in done.err) == (2, True)
    assert not list(folder.iterdir())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@host:5000")
    done = script(main)
    assert (done.code, done.out) == (0, "the runs are at http://***@host:5000\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """The folder of a store with a run."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copy(empty_store, folder / "mlflow.db")
    tracked(folder / "another", uri=f"sqlite:///{folder}/mlflow.db")
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[tuple[str, str]]:
    """The address of a server over that store, which takes files itself; and what was printed. It ends with 0."""
    with served(f"sqlite:///{place}/mlflow.db", place) as found:
        yield found


def test_it_serves_the_store(place: Path, server: tuple[str, str], script: Callable[..., Result]) -> None:
    address, printed = server
    experiment = TrackedRun.read(place / "another").experiment_id
    assert f"open {address} when" in printed
    view = "workflowType=machine_learning&viewStateShareKey=mantissa"
    assert f"\n  e           {address}/#/experiments/{experiment}/runs?{view}\n" in printed
    with urlopen(f"{address}/health") as answer:
        assert answer.status == 200
    port = f"port={address.rpartition(':')[2]}"
    done = script(main, port, f"uri=sqlite:///{place}/mlflow.db")
    assert (done.code, f"{port} cannot be used" in done.err) == (2, True)


def test_files_that_would_stay_on_this_machine_are_kept_and_the_metrics_sent(
    folder: Path, place: Path, server: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere, store = folder / "elsewhere", f"sqlite:///{place}/mlflow.db"
    connect(store).create_experiment("stays", str(elsewhere / "mlruns" / "1"))
    opened = open_log(folder / "kept", experiment="stays", uri=server[0], checkpoints="all")
    opened.append(1, {"loss": 1.0})
    opened.close("FINISHED", {})
    assert not elsewhere.exists()
    assert points(store)["kept"].total() == 1
    (warned,) = [message for message in caplog.messages if "upload incomplete" in message]
    assert f"lacks its files: the server keeps the files of this experiment in {elsewhere / 'mlruns'}, " in warned
    assert "sync.py" not in warned


def test_a_run_is_continued_on_an_empty_machine_bit_for_bit(
    train: Train, succeed: Train, folder: Path, server: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = server
    succeed(*JOB, "steps=12", "tracking=local", "output_dir=whole")
    step = Trainer.train_step

    def stop_after_7(self: Trainer, *given: Any, **options: Any) -> Any:
        if self.step == 6:
            signal.raise_signal(signal.SIGINT)
        return step(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stop_after_7)
        stopped = train(*JOB, "steps=12", f"tracking.uri={address}")
        assert stopped.code == 130, stopped.err
    client, own = MlflowClient(address), run_id(RUN)
    assert "step-00000007" in stored_names(client, own)
    shutil.rmtree("outputs")  # another machine
    done = train(f"tracking.uri={address}", f"resume=mlflow:{own}")  # the recorded config is enough
    assert done.code == 0, done.err
    assert client.get_run(own).info.status == "FINISHED"
    expected = load(folder / "whole/run/checkpoints").tensors()
    assert same_bits(load(folder / RUN / "checkpoints").tensors(), expected)
    best, logged = Path("best/model.safetensors"), []
    assert (RUN / best).read_bytes() == ("whole/run" / best).read_bytes()
    for run in (RUN, Path("whole/run")):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        logged.append([(line["step"], line.get("loss"), line.get("valid/loss")) for line in lines])
    assert logged[0] == logged[1]
    for key, steps in (("train/loss", range(1, 13)), ("valid/loss", (3, 6, 9, 12))):
        assert Counter(point.step for point in client.get_metric_history(own, key)) == Counter(steps)
    assert stored_names(client, own) == sorted(path.name for path in (RUN / "checkpoints").iterdir())
    assert not list(Path("outputs").glob(".*.partial"))
