"""What the other scripts' messages say to do instead is done, as a user would, and ends well."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.command_line.conftest import _command as train_here
from tests.command_line.test_remedies import Began, cells, names
from trainer.config.options import run

TINY = "recipe=bignet recipe.layers=2 recipe.width=16"
SCRIPTS = {
    "compare": ("evidence.comparison.command:main", "evidence.runs.Runner.run_all"),
    "advise": ("evidence.advice.command:main", "evidence.advice.search.Search.run"),
    "search": ("evidence.search.search:main", "evidence.search.search.run_trials"),
    "trial": ("evidence.search.search:main", "trainer.trainer.Trainer.train_step"),
    "lr_range": ("evidence.search.lr_range:main", "evidence.search.lr_range.range_test"),
    "memory": ("evidence.memory.command:memory", "evidence.memory.command.forecast"),
    "max_batch": ("evidence.memory.command:max_batch", "evidence.memory.max_batch.search"),
    "doctor": ("evidence.doctor.command:main", "evidence.doctor.command.diagnose"),
    "reproduce": ("evidence.claims.reproduce:main", "evidence.claims.reproduce.test"),
    "evaluate": ("inference.evaluate:evaluate", "inference.evaluate.measure"),
    "sync": ("scripts.sync:main", "trainer.tracking.follower.Follower.send"),
    "ui": ("scripts.ui:main", "os.execve"),
}
"""A script's function, and where it has accepted all that was typed."""
# What both commands have | the mistake | what its message says to write instead | or instead; "-" is nothing.
ROWS = """
compare TINY | arms=fp32,bf61 | arms=fp32,bf16
compare TINY | arms=fp32 | arms=fp32,bf16
compare TINY | - | arms=fp32,bf16
compare TINY arms=fp32,bf16 | seeds=1 | seeds=5
compare TINY arms=fp32,bf16 | seeds=many | seeds=5
compare TINY arms=fp32,bf16 | seeds=1,1 | seeds=5
compare TINY arms=fp32,bf16 | margin=0 | margin=0.3%
compare TINY arms=fp32,bf16 | baseline=bf61 | baseline=bf16
compare TINY arms=fp32,bf16 | seed=3 | - | seeds=5
compare TINY arms=fp32,bf16 | run_name=here | - | seeds=5
compare TINY arms=fp32,bf16 | parallel=ddp | -
compare TINY arms=fp32,bf16 | steps=10 | steps=40
compare TINY arms=fp32,bf16 log_every=10 | steps=10 | steps=40
compare TINY arms=fp32,bf16 | batch_size=8,16 | arm.8=batch_size=8 arm.16=batch_size=16
compare TINY arms=fp32,bf16 | sedes=3 | seeds=3
compare TINY arms=fp32,bf16 | -m | -
compare TINY arms=fp32,bf16 | optimzer=adamw | optimizer=adamw
compare TINY arms=fp32,bf16 | lr=0.1 | optimizer.lr=0.1
compare TINY arms=fp32 | arm.fp32=precision=bf16 | arm.fp32=precision=fp32
compare TINY | arms=fp32 arm.same=precision=fp32 | arms=fp32,fp32
compare TINY arms=fp32 | 'arm.b=precision=bf16 lr=0.1' | 'arm.b=precision=bf16 optimizer.lr=0.1'
compare TINY arms=fp32 | arm.b=precision=bf16,fp16 | arm.bf16=precision=bf16 arm.fp16=precision=fp16
compare TINY arms=fp32 | 'arm.b=batch_size=7 micro_batch_size=2' | 'arm.b=batch_size=7 micro_batch_size=1'
advise TINY | time_budget=0min | time_budget=90s
advise TINY | time_budget=long | time_budget=90s
advise TINY | time_budgt=3min | time_budget=3min
advise TINY | resume=runs/mine | -
advise TINY | debug=overfit | -
advise TINY | precision=fp32,bf16 | precision=fp32 | -
search TINY | - | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.optimizer.lr=1e-4 | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.optimizer.lr=log(1e-4,1e-2) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.optimizer.lr=interval(1e-4) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.optimizer.lr=interval(1e-2,1e-4) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.optimizer.lr=tag(log,interval(0,1e-4)) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.optimizer.lr=interval(a,b) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.output_dir=choice(a,b) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.device=choice(cpu,cuda) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.lr=tag(log,interval(1e-4,1e-2)) | space.optimizer.lr=tag(log,interval(1e-4,1e-2))
search TINY | space.precision=choice(fp32,bf61) | space.precision=choice(fp32,bf16)
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | optimizer.lr=0.1 | -
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | precision=fp32,bf16 | space.precision=choice(fp32,bf16)
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | pruner=mean | pruner=median
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | trials=0 | trials=1
trial TINY tracking=local space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | metric=valid/los | metric=valid/loss
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | checkpoint.best=valid/loss | -
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | run_name=here | -
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | trails=3 | trials=3
search TINY space.optimizer.lr=tag(log,interval(1e-4,1e-2)) | study=taken | study=NAME
lr_range TINY | min=1 max=0.1 | min=1e-07 max=10
lr_range TINY | min=0 | min=1e-07 max=10
lr_range TINY | max=high | max=0.001
lr_range TINY | steps=5 | steps=100
lr_range TINY | optimizer.lr=0.1 | -
lr_range TINY | schedule=cosine | -
lr_range TINY | epochs=3 | -
lr_range TINY | resume=runs/mine | -
lr_range TINY | precision=fp32,bf61 | precision=fp32,bf16
memory TINY precision=fp32,bf16 | -m | -
memory TINY | precision=fp32,bf61 | precision=fp32,bf16
memory TINY | batch=8 | batch_size=8
max_batch TINY | memory_budget=8 | memory_budget=8GiB
max_batch TINY | memory_budget=9999GiB | memory_budget=device
max_batch TINY | micro_batch_size=8 | -
max_batch TINY | memory_budgt=8GiB | memory_budget=8GiB
max_batch TINY | precision=fp32,bf16 | precision=fp32 | -
max_batch TINY | parallel=ddp | -
doctor TINY | check=format | check=formats
doctor TINY | check=islands | check=formats,islands
doctor TINY | steps=3 step=4 | step=4 steps=4
doctor TINY | precision=fp32,bf16 | precision=fp32 | -
doctor TINY | step=-1 | step=0
doctor TINY | time_budget=0s | time_budget=90s
doctor TINY | time_budget=60 | time_budget=90s
doctor TINY | checks=all | check=all
doctor TINY | --check=all | check=all
doctor | nowhere | outputs/ended
doctor | notes.txt | outputs/ended
doctor | empty | outputs/ended
doctor | runs | runs/mine
doctor TINY | precision=bf61 | precision=bf16
doctor TINY | outputs/ended | -
doctor resume=outputs/ended | step=9 | step=6
reproduce | claim=bignet_memroy | claim=bignet_memory
reproduce | claims=bignet_memory | claim=bignet_memory
reproduce claim=bignet_memory | device=tpu | device=cpu
sync | uri=runs.db | uri=sqlite:///runs.db
sync | uri=folder | uri=sqlite:///folder.db
sync | output=outputs | output_dir=outputs
sync | --uri=sqlite:///runs.db | uri=sqlite:///runs.db
ui | uri=here.db | uri=sqlite:///here.db
ui uri=sqlite:///here.db | port=70000 | port=5001
ui uri=sqlite:///here.db | port=0 | port=1
ui uri=sqlite:///here.db | prot=5001 | port=5001
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What users have: a run, a comparison and a study that have begun, and files that are none of these."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("empty", "folder"):
        (folder / name).mkdir(parents=True)
    (folder / "here.db").touch()
    (folder / "notes.txt").write_text("one two three\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTISSA_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        short = "batch_size=8 data.samples=64 eval_samples=8 steps=6 profiler=none tracking=local"
        ended = train_here(*TINY.split(), *short.split(), "run_name=ended")
        assert ended.code == 0, ended.err
        shutil.copytree("outputs/ended", "runs/mine")
        for command in (
            f"compare {TINY} arms=fp32,bf16 name=taken margin=1%",
            f"search {TINY} space.optimizer.lr=tag(log,interval(1e-3,1e-2)) study=taken",
        ):
            assert not end_of(shlex.split(command))
    return folder


def end_of(words: list[str]) -> str:
    """The message that a script's command ends with; empty: it has accepted all, or has ended well."""
    name, *arguments = words
    main, place = SCRIPTS[name]

    def begin(*_: object, **__: object) -> None:
        raise Began

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()), redirect_stderr(StringIO()) as err:
        patch.setattr(place, begin)
        patch.setattr("evidence.advice.command.cpu_share_of_others", lambda: 0.0)
        try:
            code = run(main, None, arguments)
        except Began:
            return ""
    return err.getvalue().rpartition("error: ")[2] if code else ""


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_what_a_script_says_to_do_is_accepted(
    row: str, made: Path, folder: Path, commands_in_this_process: None
) -> None:
    def end(words: list[str]) -> str:
        shutil.rmtree("outputs", ignore_errors=True)  # what an earlier command has begun
        shutil.copytree(made, folder, dirs_exist_ok=True)
        return end_of(words)

    common, wrong, remedies = cells(row.replace("TINY", TINY))
    said = end([*common, *wrong])
    assert said, "no mistake"
    for words in remedies:
        assert names(said, wrong, words), said
        assert end([*common, *words]) == ""


TINIER = "data=synthetic data.samples=64 recipe.size=nano batch_size=8 eval_samples=8 steps=2 profiler=none"
"""What makes a command that a message prints fast."""


@pytest.mark.parametrize("command", ["ui", "ui uri=sqlite:///runs.db", "evaluate run=outputs/ended"])
def test_a_command_that_a_message_prints_makes_the_first_one_end_well(
    command: str, made: Path, folder: Path, store: str, commands_in_this_process: None
) -> None:
    shutil.copytree(made, folder, dirs_exist_ok=True)
    shutil.rmtree("outputs/ended/best")
    Path("outputs/ended/summary.json").unlink()
    Path("mlflow.db").unlink()
    said = end_of(command.split())
    (printed,) = re.findall(r"python scripts/train.py (.*)", said)
    done = train_here(*shlex.split(printed), *TINIER.split() * ("resume" not in printed))
    assert done.code == 0, done.err
    assert not end_of(command.split())


def test_a_run_with_a_damaged_tracking_file_is_sent_after_what_the_message_says(
    made: Path, folder: Path, store: str, commands_in_this_process: None
) -> None:
    shutil.copytree(made, folder, dirs_exist_ok=True)
    damaged = Path("outputs/ended/tracking.json")
    damaged.write_text("{")
    said = end_of(["sync", "outputs/ended"])
    assert "or remove it and train on, as a new run in MLflow: resume=outputs/ended steps=…" in said
    damaged.unlink()
    done = train_here("resume=outputs/ended", "steps=8", "tracking=mlflow")
    assert done.code == 0, done.err
    assert not end_of(["sync", "outputs/ended"])
    assert json.loads(damaged.read_text())["delivered"]
