"""scripts/compare.py as a user runs it: interrupted, continued, and with an arm that diverges."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from evidence.comparison.command import main
from tests.command_line.conftest import SMALLEST, Result, Start
from tests.helpers import PROJECT
from trainer.tracking.store import VIEW_TAG, connect

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

SCRIPT = PROJECT / "scripts" / "compare.py"
COMMAND = [
    *(*SMALLEST, "steps=12", "log_every=3", "eval_every=3", "tracking.system_metrics=false"),
    *("arms=fp32", "arm.hot=optimizer.lr=1e30", "seeds=2", "name=it"),
]


def test_it_continues_where_it_was_interrupted_and_keeps_what_failed(
    folder: Path, store: str, start: Start, script: Callable[..., Result]
) -> None:
    first = start(*COMMAND, script=SCRIPT)
    assert first.stdout
    assert first.stdout.readline().startswith("2 arms × 2 seeds, alternating")
    assert first.stdout.readline().split()[:3] == ["1/4", "fp32", "s0"]  # printed immediately, also into a pipe
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=300)
    assert (first.returncode, "run the same command again to continue" in err) == (130, True), out + err

    second = script(main, *COMMAND)
    assert second.code == 1, second.out + second.err
    lines = second.out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["1/4", "2/4", "3/4", "4/4"]
    assert "already done  eta " in lines[1]
    assert "hot s0  failed with exit code 3: step 2: the gradients are not finite" in lines[2]
    root = folder / "outputs" / "compare" / "it"
    assert f"report {root}/report.html" in second.out
    assert "2 of 2 runs diverged where the baseline's did not" in (root / "report.txt").read_text()
    found = json.loads((root / "comparison.json").read_text())
    arms = [(arm["label"], arm["seeds"], arm["quality"]["verdict"]) for arm in found["arms"]]
    assert arms == [("fp32", [0, 1], ""), ("hot", [], "NOT JUDGED")]
    assert found["arms"][0]["memory"]["values"][0] > 0

    third = script(main, *COMMAND)
    assert third.code == 1
    assert (third.out.count("already done"), third.out.count("failed with exit code 3")) == (4, 2)
    client = connect(store)
    experiment = client.get_experiment_by_name("bignet")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.data.tags["group"] for run in runs} == {"it"}
    statuses = {run.info.run_name: run.info.status for run in reversed(runs)}  # the newest counts
    assert statuses == {"fp32-s0": "FINISHED", "fp32-s1": "FINISHED", "hot-s0": "FAILED", "hot-s1": "FAILED"}
    assert all(f"params.`{key}`" in experiment.tags[VIEW_TAG] for key in ("optimizer.lr", "seed"))
