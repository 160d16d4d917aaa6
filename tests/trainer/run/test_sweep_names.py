"""Names and the table of several runs from one command; real sweeps are in tests/command_line/test_sweep.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from mantissa.display import loss
from tests.helpers import CONF, compose
from trainer.config.command_line import read
from trainer.config.registration import register
from trainer.run.sweep import Ended, Sweep, name_of


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
    for value, result in (("1", {}), ("2", summary(0.5)), ("3", summary(1.2e-5, run="bignet-fp32-s0-lr_3-2"))):
        sweep.begin(composed(), ["steps=3", f"optimizer.lr={value}"])
        sweep.end(0, Ended(0 if result else 3, result))
    lines = [line.split() for line in sweep.table().splitlines()]
    assert " ".join(lines[1]) == "bignet-fp32-s0-lr_3-2 3 1.2e-05 20 2.4e-05 12.3k tokens/s 3.0 MiB finished"
    assert [line[1] for line in lines] == ["optimizer.lr", "3", "2", "1"]
    assert lines[3] == ["bignet-fp32-s0-lr_1", "1", "failed"]
    assert Sweep(read([])).table() == ""


def test_seeds_are_averaged_for_each_combination_of_the_rest_and_labels_that_differ_are_columns() -> None:
    sweep = Sweep(read(["-m", "precision=fp32,bf16", "seed=0,1,2"]))
    results = {("fp32", 0): 4.0, ("bf16", 0): 1.0, ("fp32", 1): 2.0, ("bf16", 1): 3.0, ("fp32", 2): 9.0}
    for (precision, seed), best in results.items():
        sweep.begin(composed(), [f"precision={precision}", f"seed={seed}"])
        row = {"status": "FINISHED" if best < 9 else "KILLED", "best": {"step": 1, "value": best}, "unit": "samples"}
        row |= {"units_per_s": 100 * best, "peak_memory_bytes": 2**20, "tags": {"team": "a"}, "group": f"g{seed}"}
        sweep.end(0, Ended(0, row))
    heading, *rows = sweep.table().splitlines()
    assert heading.split()[:5] == ["run", "precision", "seed", "group", "best"]  # no tags.team: it is always the same
    assert [row.split()[3] for row in rows[:5]] == ["g0", "g1", "g1", "g0", "g2"]
    means = [" ".join(row.split()) for row in rows[5:]]
    assert means == [
        "mean ± sd bf16 2 seeds 2.0000 ± 1.4142 200 ± 141 samples/s 1.0 MiB ± 0 B",
        "mean ± sd fp32 2 seeds 3.0000 ± 1.4142 300 ± 141 samples/s 1.0 MiB ± 0 B",
    ]


def test_small_losses_keep_their_digits() -> None:
    values = [0.00456, 0.0123, 0.0, -0.00001, float("nan")]
    assert [loss(value) for value in values] == ["0.00456", "0.0123", "0.0000", "-1e-05", "not finite"]


def test_what_jobs_leave_is_in_the_table_of_the_command(tmp_path: Path) -> None:
    own = ["recipe=bignet", "seed=0,1,2", "seed=3,4,5", f"output_dir='{tmp_path}/my runs'"]
    sweep = Sweep(read(["-m", "hydra/launcher=submitit_slurm", *own]))
    with sweep.scratch() as scratch:
        pass
    assert sweep.jobs == Path(scratch)
    assert sweep.jobs.parent == tmp_path / "my runs" / ".jobs"
    best = {"status": "FINISHED", "best": {"step": 2.0, "value": 0.5}}
    for number, ended in enumerate([(0, best), (143, {})]):  # the last one's job is lost
        job = pickle.loads(pickle.dumps(sweep))
        config = composed(f"seed={number + 3}")
        job.begin(config, [f"seed={number + 3}"])
        assert (config.run_name, config.resume) == (f"bignet-fp32-s{number + 3}", "same")
        job.end(number, Ended(*ended))
    sweep.collect()
    assert [row.code for row in sweep.rows] == [0, 143, 1]
    lines = [line.split() for line in sweep.table().splitlines()]
    assert [(line[0], line[1], line[-1]) for line in lines[1:3]] == [
        ("bignet-fp32-s3", "3", "finished"), ("bignet-fp32-s4", "4", "stopped"),
    ]  # fmt: skip
    assert lines[3] == ["5", "5", "failed"]
