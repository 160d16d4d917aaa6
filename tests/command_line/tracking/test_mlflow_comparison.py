"""A comparison and a search above their runs in MLflow."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evidence.comparison import mlflow
from evidence.search.search import _publish
from mantissa.compare import Reach
from mantissa.statistics import Interval
from tests.tracked import points, run_id, runs, tracked
from trainer.tracking.store import connect


def test_a_comparison_is_published_once(folder: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked(folder / "child")
    (folder / "report.html").write_text("x")
    monkeypatch.setattr(mlflow, "lead", lambda result: ["twice as fast"])

    def result(verdict: str, seeds: int, margin: float = 0.003, common: str = "") -> Any:
        speed = SimpleNamespace(ratio=SimpleNamespace(mean=2.0), why="")
        memory, quality = SimpleNamespace(ratio=None), SimpleNamespace(verdict=verdict, test=None)
        reach = Reach(steps_ratio=Interval(0.9, 0.8, 1.0, 0.96, 5))
        arm = SimpleNamespace(label="bf16", speed=speed, memory=memory, quality=quality, reach=reach)
        plan = {"name": "it", "arms": [arm], "baseline": "fp32", "margin": margin, "common": [common]}
        outcome = SimpleNamespace(folder=folder / "child", arm="bf16", finished=True)
        of = {"plan": SimpleNamespace(seeds=range(seeds), **plan), "arms": [arm], "outcomes": [outcome]}
        return SimpleNamespace(key="key", began_s=1.0, **of)

    def again(*given: Any, **options: Any) -> Any:
        (line,) = mlflow.publish_comparison(result(*given, **options), store, [folder / "report.html"])
        (run,) = [each for each in client.search_runs([experiment]) if each.info.run_id in line]
        return run

    client = connect(store)
    experiment = client.get_experiment_by_name("e").experiment_id
    run = again("WORSE", 2, common="x" * 600)
    assert (run.info.status, run.info.run_name, run.info.start_time) == ("FINISHED", "compare-it", 1000)
    assert (run.data.tags["margin"], run.data.tags["common"]) == ("0.003", "x" * 499 + "…")
    assert run.data.tags["precision"] == "bf16"
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["report.html"]
    below = next(each.data.tags for each in client.search_runs([experiment]) if each.info.run_name == "child")
    assert (below["mlflow.parentRunId"], below["arm"]) == (run.info.run_id, "bf16")
    again("WORSE", 2)
    run = again("BETTER", 3)
    assert run.data.tags["quality.bf16"] == "BETTER"
    assert points(store, "bf16_speed_ratio") == {"compare-it": Counter([2, 3])}
    assert run.data.metrics == {"bf16_speed_ratio": 2.0, "bf16_steps_to_equal_loss_ratio": 0.9}
    assert runs(store) == [("child", "FINISHED"), ("compare-it", "FINISHED")]


def test_a_search_is_one_run_above_its_trials(folder: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["s-t0", "s-t1", "s-t2"]
    for name in names[:2]:
        tracked(folder / name, tags={"precision": "bf16" if name == "s-t0" else "fp32"})
    trials, study = range(3), SimpleNamespace(study_name="s")
    search: Any = SimpleNamespace(study=study, counted=lambda: trials, run_of=names.__getitem__)
    for _ in range(2):
        _publish(search, folder)
        assert runs(store) == [("s-t0", "FINISHED"), ("s-t1", "FINISHED"), ("search-s", "FINISHED")]
    client = connect(store)
    (above,) = {*(client.get_run(run_id(folder / name)).data.tags["mlflow.parentRunId"] for name in names[:2])}
    run = client.get_run(above)
    assert above in capsys.readouterr().out
    assert run.data.tags["precision"] == "bf16, fp32"
