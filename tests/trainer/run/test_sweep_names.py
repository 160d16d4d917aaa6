"""Names and the table of several runs from one command; real sweeps are in tests/command_line/test_sweep.py."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from mantissa.display import loss
from tests.helpers import CONF, compose
from trainer.config.command_line import read
from trainer.config.registration import register
from trainer.run.sweep import Row, Sweep, name_of


def test_the_swept_keys_are_those_of_the_command_line() -> None:
    line = ["-m", "recipe=bignet", "optimizer=adamw,sgd", "optimizer.lr=1e-3,3e-3", "optimizer.betas=[0.9,0.95]"]
    assert read(line).swept_keys == ["optimizer", "optimizer.lr"]
    assert read(["--multirun", "+seed=range(0,3)"]).swept_keys == ["seed"]
    assert read(line[1:]).swept_keys == []
    assert read(["-m", "seed=0,1", "seed=2,3"]).swept_keys == ["seed"]


@pytest.mark.parametrize(
    ("typed", "values", "name"),
    [
        ([], {"precision": "fp32", "seed": "0", "recipe": "bignet"}, "bignet-fp32-s0"),  # as without a sweep
        ([], {"optimizer": "sgd", "optimizer.lr": "1e-3"}, "bignet-fp32-s0-sgd-lr_1e-3"),
        ([], {"optimizer.betas": "[0.9,0.95]"}, "bignet-fp32-s0-betas_0.9_0.95"),
        ([], {"optimizer.betas": "[0.95,0.9]"}, "bignet-fp32-s0-betas_0.95_0.9"),
        ([], {"data.path": "'/my data/a.txt'"}, "bignet-fp32-s0-path_my_data_a.txt"),
        (["run_name=mine"], {"run_name": "mine", "seed": "3"}, "mine"),
        ([], {"data.path": "a", "recipe.path": "b"}, "bignet-fp32-s0-data.path_a-recipe.path_b"),
        (["run_name=mine"], {"seed": "1", "precision": "fp32"}, "mine-seed_1-fp32"),
    ],
)
def test_a_run_is_named_by_what_is_swept(typed: list[str], values: dict[str, str], name: str) -> None:
    config = compose("recipe=bignet", *typed)
    assert name_of(config.name, values, config.run_name is not None) == name


def test_long_names_stay_short_and_apart() -> None:
    one, other = (name_of("bignet-fp32-s0", {"data.path": 300 * "x" + end}) for end in "ab")
    assert one != other
    assert len(one) < 200


def composed(*overrides: str) -> DictConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config", ["recipe=bignet", *overrides])


def test_the_table_is_sorted_by_the_best_score_and_keeps_failed_runs_last() -> None:
    def summary(best: float, **more: Any) -> dict[str, Any]:
        common = {"status": "FINISHED", "best": {"step": 20.0, "value": best}, "final": {"valid/loss": 2 * best}}
        return common | {"unit": "tokens", "units_per_s": 12_345.0, "peak_memory_bytes": 3 * 2**20} | more

    sweep = Sweep(read(["-m", "optimizer.lr=1,2,3"]))
    fast = summary(1.2e-5, run="bignet-fp32-s0-lr_3-2", units_per_s=24_690.0)
    for value, result in (("1", {}), ("2", summary(0.5)), ("3", fast)):
        named = sweep.set_name(composed(), ["steps=3", f"optimizer.lr={value}"])
        sweep.rows.append(Row(*named, 0 if result else 3, result))
    heading, *rows = [" ".join(line.split()) for line in sweep.table().splitlines()]
    assert heading == "lr best final throughput status"  # the memory is the same in all
    assert rows == [
        "3 1.2e-05 2.4e-05 24.7k tokens/s finished",
        "2 0.5000 1.0000 12.3k tokens/s finished",
        "1 failed",
        "",
        "best: bignet-fp32-s0-lr_3-2",
    ]
    for row in sweep.rows:
        row.summary["units_per_s"] = None  # of a run that ended at its first step
    assert "throughput" not in sweep.table()
    assert Sweep(read([])).table() == ""


def test_seeds_are_averaged_for_each_combination_of_the_rest() -> None:
    sweep = Sweep(read(["-m", "precision=fp32,bf16", "seed=0,1,2"]))
    results = {("fp32", 0): 4.0, ("bf16", 0): 1.0, ("fp32", 1): 2.0, ("bf16", 1): 3.0, ("fp32", 2): 9.0}
    for (precision, seed), best in results.items():
        overrides = [f"precision={precision}", f"seed={seed}"]
        named = sweep.set_name(composed(*overrides), overrides)
        row = {"status": "FINISHED" if best < 9 else "KILLED", "best": {"step": 1, "value": best}, "unit": "samples"}
        row |= {"run": named[0], "units_per_s": 100 * best, "peak_memory_bytes": 2**20}
        sweep.rows.append(Row(*named, 0, row))
    sweep.rows.append(sweep.rows[0])  # named twice: it counts once
    heading, *rows = [" ".join(line.split()) for line in sweep.table().splitlines()]
    assert heading.split()[:3] == ["precision", "seed", "best"]
    assert rows[5:7] == [
        "bf16 mean of 2 2.0000 ± 1.4142 200 ± 141 samples/s 1.0 MiB ± 0 B",
        "fp32 mean of 2 3.0000 ± 1.4142 300 ± 141 samples/s 1.0 MiB ± 0 B",
    ]


def test_small_losses_keep_their_digits() -> None:
    values = [0.00456, 0.0123, 0.0, -0.00001, float("nan")]
    assert [loss(value) for value in values] == ["0.00456", "0.0123", "0.0000", "-1e-05", "not finite"]
