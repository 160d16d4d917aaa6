from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import CPU, PROJECT, compose
from tests.tracked import save
from trainer.config.resume import check_same, planned
from trainer.config.settle import Plan
from trainer.errors import UserError
from trainer.files import in_use
from trainer.parallel.world import World
from trainer.run.record import write_config
from trainer.run_folder import RunFolder, named

RUN: dict[str, Any] = {
    "recipe": "resnet",
    "recipe.image_size": "auto",
    "precision.mode": "bf16",
    "loader": "pinned",
    "loader.workers": 0,
    "deterministic": False,
    "micro_batch_size": 8,
    "steps": 10,
    "device": "auto",
    "checkpoint.best": "valid/loss",
    "checkpoint.keep": 1,
    "optimizer.groups": {"*.bias": {"lr": 2}, "head": {"lr": 3}},
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.write_config(RUN)
    return run


def test_continues_with_changes_that_do_not_affect_learning(folder: RunFolder) -> None:
    changes = {
        "steps": 20,
        "loader": "plain",
        "loader.workers": 2,
        "device": "cpu",
        "micro_batch_size": 4,
        "checkpoint.keep": 2,
    }
    check_same(folder, folder.config(), RUN | changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recipe.image_size": 64}, "recipe.image_size was auto, now 64"),  # auto is a choice like any other
        ({"loader": "synthetic-on-device"}, "loader was pinned, now synthetic-on-device"),  # repeats a single batch
        ({"checkpoint.best": "valid/top1"}, "checkpoint.best was valid/loss, now valid/top1"),
        ({"optimizer.new": 1}, r"written by version .*has no optimizer.new.*; a new run can start from its weights"),
        # The last pattern that fits decides.
        ({"optimizer.groups": dict(reversed(RUN["optimizer.groups"].items()))}, "optimizer.groups was"),
    ],
)
def test_refuses_what_would_be_another_run(folder: RunFolder, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_same(folder, folder.config(), RUN | change)


@pytest.mark.parametrize("typed", [["recipe.image_size=64", "resume=auto"], ["resume=auto"]], ids=str)
def test_a_run_that_was_found_by_its_name_is_continued_by_its_folder(folder: RunFolder, typed: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        check_same(folder, folder.config(), RUN | {"recipe.image_size": 64}, typed)
    assert raised.value.remedies == (f"resume={folder.path}",)


def test_the_microbatch_is_part_of_a_run_that_must_repeat_bit_for_bit(folder: RunFolder) -> None:
    folder.write_config(RUN | {"deterministic": True})
    with pytest.raises(UserError, match="micro_batch_size was 8, now 4"):
        check_same(folder, folder.config(), RUN | {"deterministic": True, "micro_batch_size": 4})


@pytest.mark.parametrize("restarted", [True, False])
def test_a_restart_of_torchrun_continues_its_run_with_fewer_ranks(
    restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though ``micro_batch_size=auto`` is another one by then, with which ``resume=same`` alone begins a new run."""
    config = compose("recipe=bignet", f"output_dir={tmp_path}", "batch_size=12", "resume=same", "run_name=run")

    def planned_of(ranks: int) -> tuple[Plan, RunFolder | None]:
        world = World()
        world.size = ranks
        return planned(config, CPU, world, None)

    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    plan, earlier = planned_of(4)
    assert earlier is None
    begun = RunFolder.create(str(tmp_path), "run")
    write_config(begun, plan.config)
    save(begun.path, step=1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(int(restarted)))
    again, earlier = planned_of(3)
    assert (plan.config.micro_batch_size, again.config.micro_batch_size) == (3, 4)
    assert (earlier and earlier.path) == (begun.path if restarted else None)


def test_a_second_run_with_the_same_name_gets_another_folder(tmp_path: Path) -> None:
    names = [RunFolder.create(str(tmp_path), "gpt2-bf16-s0").path.name for _ in range(3)]
    assert names == ["gpt2-bf16-s0", "gpt2-bf16-s0-2", "gpt2-bf16-s0-3"]


@pytest.mark.parametrize("name", ["exp", "lr[1e-3]", "a*", "exp-2", "ü b"])
def test_a_name_finds_its_own_runs_and_no_others(name: str, tmp_path: Path) -> None:
    def begin(name: str) -> Path:
        folder = RunFolder.create(str(tmp_path), name)
        folder.write_config({"run_name": name, "precision.mode": "bf16"})
        return folder.path

    own = {begin(name), begin(name), begin(name)}
    for other in (f"{name}-7", f"{name}-x", f"x{name}", "lr1", "ab", "exp-2"):
        if other != name:
            begin(other)
    assert {folder.path for folder in named(str(tmp_path), name)} == own
    assert not named(str(tmp_path / "none"), name)


def test_one_process_at_a_time_works_on_a_run(tmp_path: Path) -> None:
    hold = "import sys; from trainer.files import in_use; from pathlib import Path\n"
    hold += "with in_use(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process"), in_use(tmp_path):
            pass
        process.kill()  # without cleanup
        process.wait()
    with in_use(tmp_path), pytest.raises(UserError, match="another process"), in_use(tmp_path):
        pass
