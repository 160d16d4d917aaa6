"""Runs that belong together in MLflow: the columns of what varies among them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tracked import tracked
from trainer.tracking.store import VIEW_TAG, connect


def shown(store: str, experiment: str = "e") -> list[str]:
    """The params that are columns of the experiment's view, in its order."""
    view = json.loads(connect(store).get_experiment_by_name(experiment).tags[VIEW_TAG])
    state = json.loads(view["state"])
    assert state["columnOrder"][2:] == state["selectedColumns"] == [*state["columnWidths"]]
    assert state["selectedColumns"][0] == "tags.`precision`"
    return [found[1] for column in state["selectedColumns"] if (found := re.fullmatch("params.`(.+)`", column))]


@pytest.mark.parametrize("group", ["lr", """it's "100 %" \\ `"""])
def test_what_varies_within_a_group_is_a_column(folder: Path, store: str, group: str) -> None:
    common = {"steps": 4, "recipe": "gpt2", "betas": [0.9, 0.95]}

    def track(name: str, tags: dict[str, str], **params: object) -> None:
        own = {"precision.mode": name, "hardware.name": name, "run_name": name}
        tracked(folder / name, tags={"precision": "bf16"} | tags, params=common | own | params)

    track("before", {}, seed=7, steps=9)
    track("other", {"group": "another"}, seed=8, steps=8)
    track("a", {"group": group}, seed=0, **{"optimizer.lr": 1e-3})
    assert shown(store) == []
    track("b", {"group": group}, seed=0, **{"optimizer.lr": 1e-2, "optimizer.momentum": 0.9})
    assert shown(store) == ["optimizer.lr"]
    track("c", {"group": group}, seed=1, **{"optimizer.lr": 1e-2})
    assert shown(store) == ["optimizer.lr", "seed"]
    track("after", {}, seed=9, steps=10)
    track("x", {"group": "many"}, **{f"x{number}": number for number in range(30)})
    track("y", {"group": "many"}, **{f"x{number}": -number for number in range(30)})
    columns = shown(store)
    assert columns[:2] == ["optimizer.lr", "seed"]
    track("swept", {"group": "sweep", "swept": "precision z.last"}, **{"z.last": 1})
    assert shown(store)[:2] == ["z.last", "optimizer.lr"], "what a sweep sweeps comes first, from its first run on"
    assert 2 < len(columns) < 32, "MLflow takes 5,000 characters"
