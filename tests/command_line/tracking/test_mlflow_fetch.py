"""A run brought back from an SQLite store: from an earlier checkpoint, once more, damaged, finished."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout
from mlflow import MlflowClient

from trainer.errors import UserError
from trainer.tracking.mlflow.fetch import fetch

JOB = (
    *("recipe=bignet", "recipe.width=8", "recipe.layers=2", "data.samples=16", "batch_size=4", "eval_samples=4"),
    *("deterministic=true", "log_every=1", "steps=6", "eval_every=3", "profiler=none", "run_name=run"),
    *("tracking.system_metrics=false", "tracking.flush_every_s=0.05", "tracking.checkpoints=all", "checkpoint.keep=2"),
)


@pytest.fixture
def client(store: str) -> MlflowClient:
    return MlflowClient(store)


@pytest.fixture
def saved(train: Callable[..., Any], store: str) -> str:
    """The id of a run that has finished, with the checkpoints of steps 3 and 6 in MLflow."""
    done = train(*JOB)
    assert done.code == 0, done.err
    return run_id_of("outputs/run")


def run_id_of(folder: str) -> str:
    return str(json.loads(Path(folder, "mlflow.json").read_text())["run_id"])


def state(client: MlflowClient, run_id: str) -> tuple[Any, ...]:
    run = client.get_run(run_id)
    steps = Counter(point.step for point in client.get_metric_history(run_id, "loss"))
    return run.info.status, run.info.end_time, dict(run.data.tags), steps


def test_what_starts_from_an_earlier_checkpoint_is_a_new_run(
    train: Callable[..., Any], store: str, client: MlflowClient, saved: str
) -> None:
    before = state(client, saved)
    earlier = f"resume=runs:/{saved}/checkpoints/step-00000003"
    refused = train(earlier)
    assert refused.code == 2
    assert "outputs/run is another run than this would be; use resume=outputs/run, or choose another" in refused.err
    done = train(earlier, "output_dir=other")
    assert done.code == 0, done.err
    assert "MLflow has this run up to step 6; from step 3 on it is a new run there" in done.out
    new = run_id_of("other/run")
    assert new != saved
    assert state(client, saved) == before
    status, _, _, steps = state(client, new)
    assert (status, steps) == ("FINISHED", Counter(range(1, 7)))
    again = train(earlier, "output_dir=other")  # a job that is started once more by the same command
    assert again.code == 0, again.err
    assert "already complete (6 steps)" in again.out


def test_a_finished_run_that_is_fetched_stays_as_it_was_in_mlflow(
    train: Callable[..., Any], client: MlflowClient, saved: str
) -> None:
    before = state(client, saved)
    done = train(f"resume=mlflow:{saved}", "output_dir=other")
    assert done.code == 0, done.err
    assert "already complete (6 steps)" in done.out
    assert state(client, saved) == before
    more = train(f"resume=mlflow:{saved}", "output_dir=other", "steps=9")
    assert more.code == 0, more.err
    assert state(client, saved)[3] == Counter(range(1, 10))  # sent nevertheless


def test_damage_is_found_and_named_as_in_mlflow_and_nothing_is_left(
    store: str, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MlflowClient.download_artifacts
    broken = "step-00000006/model.safetensors"

    def damage(self: MlflowClient, run_id: str, path: str, target: str | None = None) -> str:
        got = real(self, run_id, path, target)
        file = Path("other", f".run.{saved}.partial", "checkpoints", broken)
        if path.endswith("step-00000006"):
            content = file.read_bytes()
            planted = content.replace(b'"sha256": {', b'"sha256": {"../../planted": "0",')
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if planted == content else planted)
        return got

    monkeypatch.setattr(MlflowClient, "download_artifacts", damage)
    for found in ("model.safetensors does not match its SHA-256", "'../../planted'"):
        with pytest.raises(UserError) as raised:
            fetch(f"mlflow:{saved}", store, "other")
        step = f"runs:/{saved}/checkpoints/step-0000000"
        assert str(raised.value).startswith(f"resume=mlflow:{saved}: {step}6 is damaged or incomplete: ")
        assert found in str(raised.value)
        assert str(raised.value).endswith(f"; use resume={step}3, an earlier one")
        assert [path.suffix for path in Path("other").iterdir()] == [".lock"]
        broken = "step-00000006/manifest.json"
    assert fetch(f"runs:/{saved}/checkpoints/step-00000003", store, "other") == Path("other/run")


def test_the_lock_of_a_download_is_beside_it_and_a_full_disk_is_not_the_servers(
    store: str, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def full(self: MlflowClient, run_id: str, path: str, target: str | None = None) -> str:
        with pytest.raises(Timeout):  # which hosts that share the folder see too
            FileLock(f"other/.run.{saved}.lock", thread_local=False).acquire(timeout=0)
        held.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MlflowClient, "download_artifacts", full)
    with pytest.raises(UserError, match=r"output_dir=other cannot be written .*No space left on device"):
        fetch(f"mlflow:{saved}", store, "other")
    assert held
    Path("file").touch()
    with pytest.raises(UserError, match=r"output_dir=file: .* is a file"):
        fetch(f"mlflow:{saved}", store, "file")
