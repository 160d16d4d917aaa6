from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlflow.utils.validation import validate_param_and_metric_name
from sqlalchemy.engine import make_url

from tests.helpers import PROJECT
from tests.tracked import open_log
from trainer.config.compose import compose
from trainer.errors import UserError, first_line, redacted
from trainer.tracking.follower import Follower
from trainer.tracking.log import MetricLog
from trainer.tracking.plots import COLUMNS, _training_curve, layer_maps, plot_run, read_series
from trainer.tracking.store import curve_key, database_file, tracking_uri, valid_key
from trainer.tracking.tracked_run import TrackedRun

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Callable[..., MetricLog]]:
    """``tracker(resume_step=None)`` opens one that has no MLflow."""
    opened = []

    def open_one(resume_step: int | None = None) -> MetricLog:
        opened.append(open_log(tmp_path, resume_step, mlflow=False))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close("KILLED", {})


def strict_lines(path: Path) -> list[dict[str, object]]:
    """Parse JSON that has no NaN and no Infinity in it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_value_that_is_not_finite_is_counted_not_replaced(tracker: Callable[..., MetricLog], tmp_path: Path) -> None:
    opened = tracker()
    opened.append(3, {"loss": NAN, "norm": -INF, "lr": 0.1})
    (line,) = strict_lines(tmp_path / "metrics.jsonl")  # readable at once
    counted = {"loss": None, "loss_nonfinite": 1, "norm": None, "norm_nonfinite": 1}
    assert line == {"step": 3, "time": line["time"], **counted, "lr": 0.1}
    opened.append(4, {"loss": 2.25})
    assert [line["step"] for line in strict_lines(tmp_path / "metrics.jsonl")] == [3, 4]


@pytest.mark.usefixtures("plots")
def test_finish_writes_the_summary_and_the_plots(tracker: Callable[..., MetricLog], tmp_path: Path) -> None:
    opened = tracker()
    for step in range(1, 121):  # so many that the curve is smoothed
        opened.append(step, {"loss": 3.0 / step})
    opened.close("FINISHED", {"loss": 1.0, "best": {"value": INF}, "sizes": [1, NAN]})
    summary = json.loads((tmp_path / "summary.json").read_text())
    best = {"value": None, "value_nonfinite": 1}
    assert summary == {"status": "FINISHED", "loss": 1.0, "best": best, "sizes": [1, None]}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"loss.png"}


def test_a_line_that_is_still_being_written_is_sent_when_it_is_whole(tmp_path: Path) -> None:
    sent: list[Any] = []
    client = SimpleNamespace(log_batch=lambda run_id, metrics, **_: sent.extend(metric.step for metric in metrics))
    follower = Follower(tmp_path, "sqlite:///", TrackedRun("e", "r", {}, {}))
    one, two = (json.dumps({"step": step, "time": 0.0, "loss": 1.0}) + "\n" for step in (1, 2))
    for written, steps in ((one + two[:9], [1]), (two[9:], [1, 2])):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(written)
        follower._send_metrics(client, "id")  # type: ignore[arg-type]
        assert sent == steps


def test_metrics_of_layers_are_drawn_and_not_sent(tmp_path: Path) -> None:
    lines = [
        {"step": step, "time": 0.0, "numerics/sqnr_db/input": 1.0}
        | {f"layers/sqnr_db/{operand}/h.{layer}": float(step + layer) for layer in (0, 10) for operand in operands}
        for step, operands in ((2, ("input", "dgrad")), *((step, ("input",)) for step in range(4, 999)))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sent: set[str] = set()
    client = SimpleNamespace(log_batch=lambda run_id, metrics, **_: sent.update(metric.key for metric in metrics))
    Follower(tmp_path, "sqlite:///", TrackedRun("e", "r", {}, {}))._send_metrics(client, "id")  # type: ignore[arg-type]
    assert sent == {"numerics/sqnr_db/input"}

    plot_run(tmp_path)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"layers.png"}
    series = {name: each for name, each in read_series(tmp_path / "metrics.jsonl").items() if "layers" in name}
    operands, layers, steps, maps = layer_maps(series)
    assert (operands, layers) == (["input", "dgrad"], ["h.0", "h.10"])
    assert (steps[0], steps[-1], len(steps)) == (2, 998, COLUMNS)
    assert np.array_equal(maps[0], steps + np.array([[0.0], [10.0]]))
    assert maps[1, :, 0].tolist() == [2.0, 12.0]
    assert np.isnan(maps[1, :, 1:]).all()


@pytest.mark.parametrize("lines", [0, 2])
def test_mlflow_is_not_imported_before_the_first_line(
    lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[int] = []
    start = Follower.start

    def started(follower: Follower) -> None:
        began.append(len(strict_lines(tmp_path / "metrics.jsonl")))
        start(follower)

    monkeypatch.setattr(Follower, "start", started)
    monkeypatch.setattr(Follower, "run", lambda self: None)
    log = open_log(tmp_path)
    assert not began
    for step in range(lines):
        log.append(step, {"loss": 1.0})
    log.close("FINISHED", {})
    assert began == [min(lines, 1)]


def test_the_smoothed_curve_is_a_running_mean_of_what_is_finite() -> None:
    values = np.random.default_rng(0).normal(size=300)
    values[[3, 40, 41]], values[100:120] = (NAN, INF, -INF), NAN
    drawn: list[np.ndarray] = []
    axes = SimpleNamespace(plot=lambda steps, values, **style: drawn.append(values))
    _training_curve(axes, np.arange(300), values)
    windows = [values[max(0, place - 3) : place + 4] for place in range(300)]
    means = [np.mean(window[np.isfinite(window)]) if np.isfinite(window).any() else NAN for window in windows]
    np.testing.assert_allclose(drawn[1], means)
    assert np.isnan(means).sum() == 14


def test_resuming_removes_what_came_after_the_checkpoint(tracker: Callable[..., MetricLog], tmp_path: Path) -> None:
    opened, path = tracker(), tmp_path / "metrics.jsonl"
    for step in range(1, 8):
        opened.append(step, {"loss": float(step)})
    with path.open("a") as file:
        file.write('{"step": 8, "ti')  # killed in the middle of a line
    tracker(resume_step=5).append(6, {"loss": 60.0})
    losses = [(line["step"], line["loss"]) for line in strict_lines(path)]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 60.0)]
    with path.open("a") as file:
        file.write('{"step": 7')
    tracker(resume_step=6)
    assert strict_lines(path)[-1]["step"] == 6


@pytest.mark.parametrize("line", ['{"time": 1.5}', '{"step": "three", "time": 1.5}', "[3]", "// the loss rises here"])
def test_a_line_that_its_owner_changed_is_named_and_the_log_stays_as_it_is(line: str, tmp_path: Path) -> None:
    path, before = tmp_path / "metrics.jsonl", f'{{"step": 1, "time": 1.0}}\n{line}\n{{"step": 3, "time": 1.0}}\n'
    path.write_text(before)
    with pytest.raises(UserError, match=rf"^{path} line 2: no step or time \(.+\); restore it$"):
        open_log(tmp_path, resume_step=1, mlflow=False)
    assert path.read_text() == before


FULL_DISK = """
import json, logging, resource, sys, time
from pathlib import Path
from trainer.tracking.tracked_run import TrackedRun
from trainer.tracking.options import Tracking
from trainer.tracking.log import MetricLog
logging.basicConfig(format="%(message)s", stream=sys.stdout)
time.time = lambda: 0
folder = Path(sys.argv[1])
opened = MetricLog(Tracking(mlflow=False), folder, TrackedRun("e", "r", {}, {}))
opened.begin()
def limit(size):  # of every file, kept by the kernel: it takes a part of a write, then refuses
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
limit(100)
for step in range(1, 11):
    opened.append(step, {"loss": 1.0})
print((folder / "metrics.jsonl").stat().st_size)
if sys.argv[2] == "freed":
    limit(resource.RLIM_INFINITY)
    opened.append(11, {"loss": 1.0})
    limit(100)
opened.close("FINISHED", {"long": "x" * 100})
"""


@pytest.mark.parametrize("later", ["freed", "full to the end"])
def test_a_full_disk_ends_no_run(tmp_path: Path, later: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), later],
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    warnings = child.stdout.splitlines()
    assert warnings.pop(1) == "100"
    assert "metrics.jsonl cannot be written" in warnings.pop(0)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines(True)
             if line.endswith("\n")]  # fmt: skip
    if later == "freed":
        assert steps == list(range(1, 12))
    else:
        assert steps == [1, 2]
        assert "8 lines are lost" in warnings.pop(0)
    assert "summary.json cannot be written" in warnings.pop()
    assert not (tmp_path / "summary.json").exists()
    assert "plots" in "".join(warnings)  # matplotlib's files are larger than the limit


def test_the_tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert database_file(tracking_uri()) == (tmp_path / "mlflow.db").resolve()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert tracking_uri() == "http://tracker:5000"
    assert tracking_uri("sqlite:///x.db") == "sqlite:///x.db"
    assert database_file("http://tracker:5000") is None
    assert database_file("sqlite:////a%20b/c.db") == Path("/a b/c.db")  # as MLflow opens it
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    (unusual := tmp_path / "100% a%20b").mkdir()
    monkeypatch.chdir(unusual)
    assert database_file(tracking_uri()) == (unusual / "mlflow.db").resolve()
    assert make_url(tracking_uri()).database == str(unusual / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "here")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI=here"):
        tracking_uri()
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI=here"):
        compose(["recipe=bignet"])
    compose(["recipe=bignet", "tracking=local"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("tracking.upload_timeout_s=-1", "tracking.upload_timeout_s="),
        ("tracking.flush_every_s=0", "tracking.flush_every_s="),
        ("tracking.checkpoints=best", "(auto, last, all, none)"),
        ("tracking=local tracking.register=net", "tracking.register=net has no effect"),
        ("tracking.uri='htp://me:s3cret@host'", "=htp://***@host"),
        ("tracking.uri='me:s3cret@host'", "tracking.uri=***"),
        ("tracking.uri=127.0.0.1:5000", "; set tracking.uri=http://127.0.0.1:5000"),
        ("tracking.uri=runs.db", "; set tracking.uri=sqlite:///runs.db"),
        ("tracking.uri=sqlite:runs.db", "; set tracking.uri=sqlite:///runs.db"),
        ("tracking.uri=sqlite://runs.db", "; set tracking.uri=sqlite:///runs.db"),
        ("tracking.uri=http://host:5000/#/experiments/0", "; set tracking.uri=http://host:5000"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_without_a_secret(options: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        compose(["recipe=bignet", "tracking=mlflow", *options.split()])
    assert words in str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:s3@cr/e#t@host:5432/db", "postgresql://***@host:5432/db"),
        ("mssql+pyodbc://s3cret@host/db;PWD=s3;Driver=x", "mssql+pyodbc://***@host/db;***"),
        ("http://host/a?access_token=s3cret&runs=2#key=s3", "http://host/a?***"),
        ("http://h:5000 has no models:/a@b", "http://h:5000 has no models:/a@b"),
        ("models:/name@champion, sqlite:////home/me@x/m.db", "models:/name@champion, sqlite:////home/me@x/m.db"),
    ],
)
def test_secrets_in_addresses_are_not_shown(text: str, shown: str) -> None:
    assert redacted(f"at {text} it") == f"at {shown} it"
    assert first_line(RuntimeError(f"at {text}\nby …")) == f"at {shown}"


def test_keys_become_ones_that_mlflow_takes() -> None:
    names = ("valid/top1", "a:b é", "data.files[0]", "a//b/../c", "../x", "/", "k" * 300)
    assert [valid_key(name) for name in names] == ["valid/top1", "a:b é", "data.files_0_", "a/c", "x", "_", "k" * 250]
    lines = ("loss", "grad_norm", "checkpoint_stall_s", "tokens_per_s", "mfu", "valid/loss", "numerics/lost")
    assert [curve_key(name) for name in lines] == [
        "train/loss", "grad_norm", "checkpoint_stall_s", "train/tokens_per_s", "train/mfu",
        "valid/loss", "numerics/lost",
    ]  # fmt: skip


def test_a_runs_page_begins_with_loss_speed_and_memory(tmp_path: Path) -> None:
    sent: dict[str, float] = {}
    client = SimpleNamespace(
        log_batch=lambda run_id, metrics, **_: sent.update((one.key, one.value) for one in metrics)
    )
    line = dict.fromkeys(("loss", "lr", "loss_scale", "tokens_per_s", "step_time_s"), 1.0)
    line |= {"process_memory_bytes": 2.0**21, "activation_memory_bytes": 7.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 0.0} | line) + "\n")
    Follower(tmp_path, "sqlite:///", TrackedRun("e", "r", {}, {}))._send_metrics(client, "id")  # type: ignore[arg-type]
    first = [f"train/{name}" for name in ("loss", "tokens_per_s", "step_time_s", "process_memory_mib")]
    assert [*sent] == [*first, "lr", "loss_scale", "activation_memory_bytes"]
    assert (sent["train/process_memory_mib"], sent["activation_memory_bytes"]) == (2.0, 7.0)


def test_names_of_metrics_that_mlflow_refuses_stay_apart_and_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []
    client = SimpleNamespace(log_batch=lambda run_id, metrics, **_: sent.extend(metric.key for metric in metrics))
    follower = Follower(tmp_path, "sqlite:///", TrackedRun("e", "r", {}, {}))
    values = {"valid/f1@5%": 0.5, "valid/f1@5$": 0.6, "valid/f1_5_": 0.7, "valid/" + "k" * 250 + "a": 1.0, "loss": 1.0}
    for step in (1, 2):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": 0.0} | values) + "\n")
        follower._send_metrics(client, "id")  # type: ignore[arg-type]
    assert len(set(sent)) == len(values)
    assert sent[: len(values)] == sent[len(values) :]
    assert {"valid/f1_5_", "train/loss"} < set(sent)
    assert all(validate_param_and_metric_name(name) and len(name) <= 250 for name in sent)
    assert (
        sum("MLflow takes no metric named valid/f1@5%; there it is valid/f1_5_-" in each for each in caplog.messages)
        == 1
    )


def test_series_have_a_gap_where_a_value_was_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"time": 0, "step": step, "loss": loss} for step, loss in ((1, 1.5), (2, None), (4, 0.5))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
    steps, values = read_series(path)["loss"]
    assert steps.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(values, [1.5, NAN, 0.5])
    plot_run(tmp_path)
    shutil.copytree(tmp_path, folder := tmp_path / r"cost $a_$ b \$")
    plot_run(folder)  # whose name is no formula
    assert (folder / "plots/loss.png").is_file()
    shutil.rmtree(folder)
    (drawn,) = (tmp_path / "plots").iterdir()
    assert (drawn.name, drawn.read_bytes()[:4]) == ("loss.png", b"\x89PNG")
