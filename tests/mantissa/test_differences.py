"""What a killed run has lost is named: by training that forgets one thing when it resumes, and by single values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mantissa.differences import Differences, Record, compare, drop, ulps, unlike, values_in

STEPS, EVERY, BATCH = 12, 3, 2


def start(path: Path, forgets: str, until: int) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Train from the checkpoint, if there is one, to a step; return what is said of the loss and of the samples."""
    torch.manual_seed(0)
    order = torch.randperm(64).tolist()
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 4)
    step = place = 0
    if path.exists():
        saved = torch.load(path)
        step, place = saved["step"], saved["place"]
        place += {"to take a batch": BATCH, "that it took a batch": -BATCH}.get(forgets, 0)
        step += forgets == "to take a step"
        if forgets != "the weights":
            model.load_state_dict(saved["model"])
        if forgets != "the optimizer":
            optimizer.load_state_dict(saved["optimizer"])
        if forgets != "the generator":
            torch.set_rng_state(saved["rng"])
    metrics, data = {}, {}
    while step < until:
        step, samples, place = step + 1, order[place : place + BATCH], place + BATCH
        data[step] = [str(samples)]
        loss = (model(inputs[samples]) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics[step] = [f"{loss.item():.5f}"]
        if step % EVERY == 0:
            state = {"step": step, "place": place, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"rng": torch.get_rng_state()}, path)
    return metrics, data


def recorded(folder: Path, forgets: str = "nothing", kills: tuple[int, ...] = ()) -> Record:
    folder.mkdir()
    starts = [start(folder / "last.pt", forgets, until) for until in (*kills, STEPS)]
    metrics, data = zip(*starts, strict=True)
    return Record(list(metrics), list(data), [values_in(folder / "last.pt", "last.pt")])


def lost(tmp_path: Path, forgets: str) -> Differences:
    return compare(recorded(tmp_path / "whole"), recorded(tmp_path / "killed", forgets, (2, 5, 6)))


def test_a_perfect_resume_is_bitwise(tmp_path: Path) -> None:
    found = lost(tmp_path, "nothing")
    assert (found.judge(0), found.lost) == (("BITWISE", 0), [])
    assert (found.steps, found.repeated_steps) == (STEPS, 2 + 2)


@pytest.mark.parametrize(
    ("forgets", "verdict", "named"),
    [
        ("to take a batch", 4, ["Start 3 took other samples at step 4", "4 samples (", "were skipped", "alone"]),
        ("that it took a batch", 4, ["took other samples at step 4", "4 samples (", "were skipped", "were seen twice"]),
        ("to take a step", 5, ["Start 3 took other samples at step 5", "were seen twice", "1 step (7) missing"]),
        ("the optimizer", 5, ["differed from step 5 on, with the same samples: the optimizer's state"]),
        ("the generator", 4, ["began at step 4 and differed from step 4 on, with the same samples: the weights or"]),
        ("the weights", 4, ["began at step 4 and differed from step 4 on, with the same samples: the weights or"]),
    ],
)
def test_what_is_forgotten_is_named(forgets: str, verdict: int, named: list[str], tmp_path: Path) -> None:
    found = lost(tmp_path, forgets)
    assert found.judge(1e30) == (f"DIVERGED AT step {verdict}", 6)
    text = "\n".join(found.lost)
    assert [words for words in named if words not in text] == [], text
    assert "last.pt: model: 4 of 4 values differ, first 0.bias, by up to" in text
    assert ("sample" in text.replace("with the same samples", "")) == ("batch" in forgets or "step" in forgets)


def whole(**values: Any) -> Record:
    lines = {step: [f"{step}.5"] for step in (1, 2, 3)}
    return Record([lines], [{}], [{("f", "", name): value for name, value in values.items()}])


def test_a_line_that_a_kill_cut_or_swallowed_is_no_loss_where_the_files_are_equal() -> None:
    cut = [{1: ["1.5"], 2: []}, {2: ["2.5"], 3: ["3.5"]}]
    assert compare(whole(), Record(cut, [{}, {}], [{}])).lost == []
    swallowed = Record([{1: ["1.5"]}, {3: ["3.5"]}], [{}, {}], [{("f", "", "a"): 1}])
    assert compare(whole(a=1), swallowed).judge(0) == ("BITWISE", 0)
    assert compare(whole(), swallowed._replace(values=[{}])).lost == ["1 step (2) missing."]
    assert compare(whole(a=2), swallowed).judge(0) == ("DIVERGED AT step 2", 6)


def test_a_start_discards_the_steps_after_its_first_one() -> None:
    ends_early = Record([{1: ["1.5"], 2: ["2.5"], 3: ["3.5"]}, {2: ["2.5"]}], [{}, {}], [{}])
    assert compare(whole(), ends_early).lost == ["1 step (3) missing."]


def test_a_step_taken_twice_and_samples_in_another_order() -> None:
    twice = Record([{1: ["1.5"]}, {2: ["2.5", "2.5"], 3: ["3.5"], 4: ["4.5"]}], [{}], [{}])
    assert compare(whole(), twice).lost == ["2 steps (2, 4) taken once too often, without a kill between."]
    one = whole()._replace(data=[{1: ["7 8"], 2: ["9"]}])
    other = whole()._replace(data=[{1: ["8 7"], 2: ["9"]}])
    assert compare(one, other).lost == ["1 step (1) with the samples in another order, or replayed with others."]


def test_what_two_undisturbed_runs_do_not_agree_in_is_not_judged() -> None:
    one, again, killed = whole(a=1.0, b=2), whole(a=1.5, b=2), whole(a=7.0, b=2)
    again.metrics[0][3] = ["9"]
    killed.metrics[0][3] = ["8"]
    unstable = unlike(one, again)
    assert unstable == [{3}, set(), {("f", "", "a")}]
    assert drop(one, unstable)
    drop(killed, unstable)
    assert compare(one, killed).judge(0) == ("BITWISE", 0)
    assert not drop(one, unlike(one, Record([{}], [{}], [{}])))


def test_values_of_every_kind_of_file_are_compared_by_name(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.arange(3)}
    save_file(weights, tmp_path / "w.safetensors")
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": 3}
    torch.save(
        state | {"rng": {"numpy": np.random.default_rng(0).integers(9, size=4, dtype=np.uint32)}}, tmp_path / "s"
    )
    (tmp_path / "t.json").write_text(json.dumps({"log": [{"loss": 1.5}], "best": None}))
    np.savez(tmp_path / "n.npz", one=np.ones(2))
    found = {name: values_in(tmp_path / name, name) for name in ("w.safetensors", "s", "t.json", "n.npz")}
    assert {*found["w.safetensors"]} == {("w.safetensors", "", "a"), ("w.safetensors", "", "b")}
    assert [*found["s"]] == [
        ("s", "state", "0.exp_avg"),
        ("s", "groups", "0.lr"),
        ("s", "groups", "0.betas"),
        ("s", "", "step"),
        ("s", "rng", "numpy"),
    ]
    assert [*found["t.json"].values()] == [1.5, None]
    assert [*found["n.npz"].values()] == [(tmp_path / "n.npz").read_bytes()]
    for values in found.values():
        other = dict(values)
        key = next(iter(other))
        other[key] = other[key] + 1 if not isinstance(other[key], bytes) else b""
        pair = (Record([{}], [{}], [each]) for each in (values, other))
        assert compare(*pair).place == ": ".join(filter(None, key))


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_values_of_every_kind_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    nan = float("nan")
    kept: dict[Any, Any] = {1: torch.ones(2), "1": torch.zeros(2), "losses": [nan, 1.0], "none": None}
    kept["sparse"] = torch.eye(2).to_sparse()
    changed = [
        (1, torch.zeros(2), "DIVERGED IN f: 1"),
        ("1", torch.ones(2), "DIVERGED IN f: 1'"),
        ("losses", [nan, 1.0000000000000002], "ULP <= 1"),
        ("losses", [1.0, nan], "DIVERGED IN f: losses"),
        ("sparse", torch.zeros(2, 2).to_sparse(), "DIVERGED IN f: sparse"),
        ("none", 0, "DIVERGED IN f: none"),
    ]
    verdicts = []
    for key, value, _ in [(1, kept[1], ""), *changed]:
        torch.save(kept, tmp_path / "one")
        torch.save(kept | {key: value}, tmp_path / "other")
        pair = (Record([{}], [{}], [values_in(tmp_path / name, "f")]) for name in ("one", "other"))
        verdicts.append(compare(*pair).judge(4)[0])
    assert verdicts == ["BITWISE", *(verdict for _, _, verdict in changed)]
    assert compare(whole(a=None), whole()).judge(0)[0] == "DIVERGED IN f: a"


def test_units_in_the_last_place() -> None:
    one = torch.tensor([1.0, -2.0, 0.0])
    assert ulps(one, one.clone()) == 0
    assert ulps(one, torch.nextafter(one, torch.full((3,), 9.0))) == 1
    assert ulps(torch.tensor([0.0]), torch.tensor([-0.0])) == 1
    tiny = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    assert ulps(torch.tensor([tiny]), torch.tensor([-tiny])) == 2
    assert ulps(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)) == 1
    assert ulps(torch.tensor([1]), torch.tensor([2])) == float("inf")
    assert ulps(torch.tensor([torch.nan]), torch.tensor([torch.nan])) == 0
    assert ulps(one, one.double()) == float("inf")
