"""What bad input gets: exit code 2, one sentence that names the key and a remedy that works, and nothing written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import forks
from tests.command_line.conftest import Result, Train, _command
from tests.command_line.mistakes import Began, Row, begin, check, rows, up_to_the_work
from tests.helpers import PROJECT
from trainer.checkpoint import store as checkpoint
from trainer.config.step import StepConfig
from trainer.run.run import Run
from trainer.run.signals import CLEARED

BIGNET = "recipe=bignet recipe.layers=2 recipe.width=8 batch_size=4 data.samples=64 eval_samples=4 tracking=local"
TRAIN = r"""
# choices and keys
- | precision=bf61 | precision=bf61 is not a choice (auto, bf16, bf16_master, … ; set precision=bf16
- | presicion=bf16 | presicion is not a key
- | recipe.sise=mini | ; set recipe.size=mini
- | recipe=gpt2 recipe.n_layer=2 | recipe.n_layer is not a key of the config; recipe has context,
- | recipe=resnet50 | ; set recipe=resnet
- | device=tpu | device=tpu is not a device (cpu, cuda
- | metrics=f1 | metrics=f1 must be a list, such as [a,b], or null: accuracy,
- | metrics=[f1_marco] | metrics=[f1_marco] is not one of accuracy,
- | +typo=1 | typo is not a key of the config … --cfg job
- | early_stopping=3 | set one of its options: early_stopping.patience, early_stopping.min_
recipe=bignet | clip=1.0 | -
- | lr=1e-3 | lr is not a key of the config: here it is optimizer.lr; set optimizer.lr=1e-3
# options of another choice
recipe=bignet | data.path=notes.txt | data.path is an option of data=imagefolder|text|tokens alone
recipe=bignet | clip.max_norm=1.0 | clip=norm clip.max_norm=1.0, or leave
recipe=bignet | ema.decay=0.9 | ema=default ema.decay=0.9
# other trainers' words
recipe=bignet | max_steps=10 | max_steps is not a key of the config: here it is steps; set steps=10
recipe=bignet | trainer.devices=2 | torchrun --nproc-per-node
recipe=bignet | precision=16-mixed | ; set precision=fp16
recipe=resnet | recipe.num_classes=2 | the data has the classes
- | --steps=10 | --steps=10: options have no dashes; set steps=10
recipe=bignet | trainer.accelerator=cpu | device chooses it
recipe=bignet | +trainer.max_epochs=3 | ; set epochs=3
recipe=bignet precision=fp64 | compile=default | compile=default has no effect: torch runs eagerly in precision=fp64
recipe=bignet precision=fp64 | optimizer.state=bf16 | has its state in fp64; set optimizer.state=auto
recipe=bignet precision=fp64 | scaler=dynamic | fp64 has more than fp32's range
recipe=bignet precision=fp64 | 'precision.fp32_ops=[softmax]' | precision.fp32_ops has no effect: precision=fp64 has
recipe=bignet | --opt-level=O2 | ; set precision=fp16_master
recipe=bignet | opt_level=O4 | here it is precision (auto, bf16
recipe=bignet | precision=O2 | ; set precision=fp16_master
recipe=bignet | trainer.precision=64-true | ; set precision=fp64
recipe=bignet | mixed_precision=no | ; leave mixed_precision=no out
recipe=bignet | dtype=float16 | ; set precision=fp16
recipe=bignet | warmup_ratio=0.1 | counts steps, by default a twentieth … ; leave
recipe=bignet | warmup_steps=0.1 | here it is schedule.warmup_steps
recipe=bignet | --fsdp | parallel has it (ddp, fsdp)
recipe=bignet | --report_to none | ; leave --report_to none out
recipe=bignet | --fp16 | ; set precision=fp16
recipe=bignet | --deepspeed ds.json | leave --deepspeed ds.json out
recipe=gpt2 | --gradient_checkpointing | ; set activation_checkpointing=blocks
recipe=bignet | --max_grad_norm 1 | ; set clip=norm clip.max_norm=1
recipe=bignet | --gradient_accumulation_steps 2 | batch_size is that of a step
recipe=bignet | --resume_from_checkpoint x | resume continues a run
recipe=bignet | --do_train | every run trains
recipe=bignet | --model_name_or_path gpt2 | recipe chooses the model
recipe=bignet | --weight_decay off | here it is optimizer.weight_decay
recipe=bignet | --logging_steps 5 | ; set log_every=5
recipe=bignet | --eval_strategy steps | here it is eval_every
recipe=bignet | --max_steps ten | here it is steps
recipe=bignet | --local_rank 0 | leave --local_rank 0 out
recipe=resnet | pretrained=true | ; set init_from=DEFAULT
recipe=resnet | recipe.pretrained=IMAGENET1K_V1 | ; set init_from=IMAGENET1K_V1
recipe=gpt2 | init_from=DEFAULT | published weights of image classifiers
recipe=gpt2 | path=notes.txt | here it is data.path
recipe=bignet | eps=1e-6 | ; set optimizer.options.eps=1e-6
# Hydra's grammar and flags
- | +data=synthetic | data already has a value; set data=synthetic
recipe=bignet | +steps=2 | steps already has a value; set steps=2
recipe=bignet | ~clip | an option cannot be removed; set clip=none, or leave it out
recipe=bignet | ~steps | an option cannot be removed; leave it out
recipe=gpt2,bignet | - | recipe=gpt2,bignet has several values … ; set -m recipe=gpt2,bignet
- | optimizer.lr=0,001 | has several values, and -m … ; set optimizer.lr=0.001
- | recipe=bignet data.samples = 64 | 'data.samples' is not an override; write key=value, without blanks
- | steps | 'steps' is not an override; write key=value
- | steps=${nothing} | 'nothing' not found
recipe=gpt2 | freeze=wte,wpe | ; set 'freeze=[wte,wpe]'
recipe=gpt2 | freeze=wte | ; set 'freeze=[wte]'
recipe=bignet | optimizer.betas=0.9,0.95 | ; set 'optimizer.options.betas=[0.9,0.95]'
recipe=bignet | optimizer.betas=(0.9,0.95) | square brackets; set 'optimizer.options.betas=[0.9,0.95]'
-m recipe=bignet | seeds=0,1 | ; set seed=0,1
-m recipe=bignet steps=1 | batch_size=4,-4 | batch_size=-4 must be at least 1
recipe=bignet | --experiment amp_mlp | ; set experiment=amp_mlp
- | -m seed=0,1 precision=fp32,bf61 | ; set precision=fp32,bf16
- | -m steps=glob(*) | steps=glob(*): a sweep is of values, separated by commas
recipe=bignet | seed=[0,1] | ; set -m seed=0,1
recipe=bignet | seed=range(0,3) | ; set -m 'seed=range(0,3)'
recipe=bignet | optimizer.lr=interval(1e-4,1e-2) | a sweep is of values … scripts/search.py
recipe=bignet | -m hydra/sweeper=optuna seed=0,1 | not installed; leave
recipe=bignet | --config-name=gpt2 | --config-name=gpt2 has no effect … leave it out
recipe=bignet | --config-dir here | --config-dir has no effect: recipe_path
recipe=bignet | -m --cfg job | -m, --run, --cfg and --info stand alone
recipe=bignet | --resolve | --resolve beside --cfg
recipe=bignet | hydra.run.dir=here | output_dir and run_name say where runs go; leave
recipe=bignet | --experimental-rerun=x | resume continues a run
# types and ranges
- | seed=4294967296 | seed=4294967296 must lie between 0 and 4294967295
- | steps=500% | steps=500% must be a whole number, or auto
- | optimizer.lr=high | optimizer.lr=high must be a number
- | optimizer.fused=auto | optimizer.fused=auto must be true or false
precision=bf16 | precision.modules=lm_head | must be formats by name pattern, such as {lm_head:fp32}
precision=bf16 | precision.fp32_modules=[lm_head,'0.10'] | ; set 'precision.modules={lm_head:fp32,0.10:fp32}'
- | tags=[a] | tags=[a] must be names with values, such as tags.NAME=VALUE
- | run_name=a/b | run_name=a/b … without a slash
# options that exclude each other, or do not fit
precision=fp16 | scaler=none | scaler=none with precision=fp16
GPT2 precision=fp16 | precision.modules={h.0:nvfp4} | only in a run in one of bf16, … or precision=bf16
GPT2 precision=nvfp4 | precision.modules={h.0:bfloat16} | ; set 'precision.modules={h.0:bf16}'
GPT2 precision=nvfp4 | precision.modules={h.9:bf16} | matches no submodule; examples of names: gpt2.transformer.h.0
GPT2 precision=nvfp4 | 'precision.modules={h.[0,1]:bf16}' | without commas … ; set 'precision.modules={h.[01]:bf16}'
GPT2 precision=nvfp4 | precision.modules.h.0=bf16 | in braces; set 'precision.modules={h.0:bf16}'
GPT2 precision=nvfp4 | precision.modules={lm_head:fp16} | one 16-bit dtype … ; set 'precision.modules={}'
GPT2 precision=nvfp4 | precision.modules={h.0:fp32,h.0.mlp:bf16} | set 'precision.modules={h.0.mlp:bf16,h.0:fp32}'
GPT2 precision=nvfp4 | precision.modules={*:bf16} | no linear layer in the model's blocks is left … ; set precision=bf16
GPT2 precision=bf16 | precision.modules={ln_1:fp8} | has no linear layer … ; set 'precision.modules={}'
recipe=bignet precision=bf16 | precision.modules={0:mxfp8} | a multiple of 32; set 'precision.modules={\[0\]:mxfp8,
recipe=bignet | precision=mxfp8 | must be a multiple of 32; set precision=bf16
GPT2 precision=bf16 | precision.gradients=bf16 | no layer is scaled in precision=bf16; leave it out
recipe=bignet precision=bf16 | precision.until=0.8 | no effect: there is no precision.then
recipe=bignet precision=bf16 | precision.then=fp32 | needs precision.until
recipe=bignet precision=bf16 | precision.then=bf16 precision.until=0.8 | nothing would change
recipe=bignet precision=bf16 precision.then=fp32 | precision.until=1.5 | the number of a step, or a share
recipe=bignet precision=bf16 precision.then=fp32 steps=10 | precision.until=10 | leaves no step to precision.then=fp32
recipe=bignet precision=bf16 precision.then=fp32 steps=10 | precision.until=0.04 | leaves no step to precision=bf16
recipe=bignet precision=bf16 precision.then=fp32 | precision.until=80% | the number of a step, or a share … until=0.8
recipe=bignet precision=fp32 precision.until=0.8 | precision.then=bfloat16 | ; set precision.then=bf16
recipe=bignet precision=bf16 | precision.then=bf16_master precision.until=0.8 | holds weights in bfloat16
recipe=bignet precision=fp16 precision.then=bf16 precision.until=0.8 | scaler=static | precision.then=bf16: scaler=
recipe=bignet | epochs=2 steps=10 | -
experiment=resnet18_fake | recipe=bignet | resnet18_fake: it sets recipe.arch, of recipe=resnet
experiment=resnet18_fake | data=digits | it sets data.classes, of data=synthetic … no other data=; leave it out
recipe=bignet steps=10 | schedule.warmup_steps=20 | -
recipe=bignet steps=10 | profiler=torch profiler.wait=20 | needs 25 steps … steps=25
recipe=bignet | checkpoint.best=los | -
recipe=bignet | checkpoint.save_on_signal=[KILL] | -
recipe=gpt2 data=text data.path=notes.txt | recipe.context=4096 | -
# data and files
- | @mine.yaml | conf/experiment/mine.yaml of a folder it is experiment=mine recipe_path=FOLDER
data=text | data.path=[a.txt,b.txt] | data.path is one file or folder
recipe=gpt2 | data=notes.txt | data=notes.txt is not a choice (
- | tags.a.b=x | the name of a tag has no dot
recipe=gpt2 | data=text 'data.path=mein Ordner ü' | data.path=mein Ordner ü: there is no such
recipe=gpt2 | data=text data.path=docs.jsonl | is a file of rows
recipe=gpt2 | data=text data.path=https://example.org/a.txt | an address is not opened; download what is there
recipe=gpt2 | init_from=https://huggingface.co/gpt2 | give its path, or the id on the hub alone
recipe=gpt2 | data=hub data.name=LICENSE | -
recipe=bignet | eval_every=0 | ; set eval_every=1000000 eval_samples=1
recipe=bignet | early_stopping.patience=0 | ; set early_stopping.patience=1 or early_stopping.patience=null
recipe=bignet | early_stopping.min_delta=0.1 | has no effect … ; set early_stopping.patience=5, or leave
# earlier runs, and where a run goes
recipe=gpt2 data=text data.path=notes.txt | init_from=empty | init_from=empty cannot be opened as a gpt2
- | resume=nowhere | there is no such folder; give a run folder (there is no folder outputs here)
recipe=gpt2 data=text | 'data.path=.\notes.txt' | there is no such file or folder; set data.path=./notes.txt
recipe=bignet | resume=True | ; set resume=auto
- | resume=notes.txt | resume=notes.txt: this is a file; give a run folder
- | resume=runs | runs is not the folder of a run (it has no config.json); give one, such as runs/mine
- | resume=exported | exported is not the folder of a run (its config.json is of something else)
recipe=resnet data=digits | init_from=halved | halved/config.json cannot be read
BIGNET | output_dir=gs://bucket/runs | is no folder on this machine
BIGNET | output_dir=LONG | File name too long
BIGNET | output_dir=notes.txt/runs | notes.txt: it is a file
BIGNET | output_dir=/proc/runs | output_dir=/proc/runs
"""
"""For train.py."""
SMALL = {"recipe=bignet": ["recipe.layers=2", "recipe.width=16"], "recipe=gpt2": ["recipe.size=nano"]}
"""What makes a model small, where a command does not choose it."""


@pytest.fixture
def files(folder: Path) -> Path:
    """What users have beside their runs."""
    for name in ("empty", "runs/mine/checkpoints/step-00000001", "exported", "halved"):
        (folder / name).mkdir(parents=True)
    (folder / "runs/mine/checkpoints/step-00000001/manifest.json").touch()
    (folder / "runs/mine/config.json").write_text('{"precision.mode": "bf16"}')
    (folder / "exported/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "halved/config.json").write_text('{"mean": ')
    (folder / "docs.jsonl").write_text('{"text": "a row of words"}\n' * 900)
    (folder / "mine.yaml").write_text("steps: 5\n")
    for name in ("notes.txt", "LICENSE"):
        (folder / name).write_text("one two three four five\n" * 900)
    return folder


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("row", rows(TRAIN, BIGNET=BIGNET, GPT2="recipe=gpt2 data=synthetic", LONG=300 * "a"))
def test_a_mistake_leaves_nothing_and_its_remedy_is_accepted(
    row: Row, train: Train, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remedy is accepted where it goes on beyond the place at which the mistake was noticed."""
    scratch, before = tmp_path / "scratch", everything(files)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(Run, "begin", begin)  # the last place before anything is written
    open_datasets, opened = StepConfig.open_datasets, []

    def opening(config: Any) -> Any:
        if opened == [False]:
            raise Began
        opened.append(True)
        return open_datasets(config)

    monkeypatch.setattr(StepConfig, "open_datasets", opening)

    def run(words: list[str]) -> Result:
        keys = {word.partition("=")[0] for word in words}
        for choice, small in SMALL.items():
            if choice in words and "init_from" not in keys:
                words = [*words, *(word for word in small if word.partition("=")[0] not in keys)]
        try:
            done = train(*words)
        except Began:
            return Result(0, "", "")
        assert everything(files) == before
        assert not list(scratch.glob("mantissa*"))
        opened[:] = opened[:1] or [False]
        return done

    check(row, run, monkeypatch)


# --- the other scripts

TINY = "recipe=bignet recipe.layers=2 recipe.width=16"
NANO = "recipe=gpt2 recipe.size=nano data=synthetic steps=40"
STACK = "recipe=bignet recipe.layers=8 recipe.width=16"
SPACE = "space.optimizer.lr=tag(log,interval(1e-4,1e-2))"
OTHERS = r"""
compare TINY | arms=fp32,bf61 | arms: bf61 is not a precision
compare TINY | - | -
compare PAIR | seeds=1 | seeds=1 must be two or more different numbers from 0 to 999
compare PAIR | seeds=99999999999999999999 | seeds=99999999999999999999 must be two or more
compare PAIR | margin=0 | margin=0 must be a number above 0
compare PAIR | name=a/b | name=a/b must be the name of a folder
compare PAIR | precision=fp16 | precision=fp16 has no effect: each arm sets it; leave it out
compare PAIR | baseline=bf61 | is not among the arms (fp32, bf16)
compare PAIR | seed=3 | seed=3 has no effect: set for every run
compare PAIR | parallel=ddp | -
compare PAIR | steps=10 | leaves no steps to measure the speed: the steps up to log_every=10 are warm-up
compare PAIR | batch_size=8,16 | use one arm per value
compare PAIR | --seeds 5 | --seeds: options have no dashes; set seeds=5
compare PAIR | --max_steps=40 | ; set steps=40
compare PAIR | --max_steps=ten | here it is steps
doctor TINY | chekc=formats | ; set check=formats
evaluate run=outputs/ended | optimizer.lr=1 | has no effect: the model is trained; leave it out
compare PAIR | optimzer=adamw | -
compare PAIR | arm.typo=precison=fp16 | arm typo: precison is not a key of the config
compare TINY arms=fp32 | arm.fp32=precision=bf16 | the arm fp32 appears twice
compare TINY | arms=fp32 arm.same=precision=fp32 | is the same as the baseline
compare TINY arms=fp32 | arm.b=precision=bf16,fp16 | -
compare NANO arms=fp32 | 'arm.b=precision=nvfp4 precision.modules={h.0: bf61, h.1: fp32}' | {h.0:bf16,h.1:fp32}
compare NANO arms=fp32 | 'arm.b=precision=nvfp4 precision.then=bf16' | precision.then=bf16 precision.until
compare TINY arms=fp32 | 'arm.b=batch_size=7 micro_batch_size=2' | -
advise TINY | time_budget=5 | time_budget=5 is not a duration
advise TINY | resume=runs/mine | -
advise TINY | debug=overfit | -
advise TINY | precision=fp32,bf16 | has several values; advise.py chooses
layers STACK | - | precision=fp32 has no layers that need more bits … (fp8, mxfp8, nvfp4); set precision=nvfp4
layers STACK | precision=bf16 | set precision=nvfp4
layers STACK precision=nvfp4 | seeds=2 | a verdict needs 3 seeds or more; set seeds=3
layers STACK precision=nvfp4 | margin=0 | -
layers STACK precision=nvfp4 | seed=1 | seed=1 has no effect: set for every run
layers STACK precision=nvfp4 | steps=20 | a quarter of them ranks the layers … ; set steps=40
layers STACK precision=nvfp4 | precision.then=bf16 | has no effect: every run keeps its formats; leave
layers STACK precision=nvfp4 | early_stopping.patience=3 | has no effect: every run takes all its steps
layers STACK precision=nvfp4 | batch_size=8,16 | layers.py searches the layers of one setting
layers STACK precision=nvfp4 | sedes=3 | set seeds=3
layers STACK precision=nvfp4 | parallel=ddp | -
layers precision=nvfp4 | recipe=resnet recipe.arch=resnet18 steps=60 | no linear layer in the model's blocks
layers precision=nvfp4 recipe=bignet recipe.width=16 | recipe.layers=1 | is all that multiplies in nvfp4
search TINY | - | there is nothing to search
search TINY | space.output_dir=choice(a,b) | output_dir is not an option of the training
search TINY SPACE | optimizer.lr=0.1 | optimizer.lr=0.1 sets what is searched
search TINY SPACE | precision=fp32,bf16 | search them
search TINY SPACE | pruner=mean | -
search TINY SPACE | trials=0 | -
search TINY SPACE | study=taken | -
search TINY SPACE | resume=auto | resume=auto has no effect: the search sets it
lr_range TINY | min=1 max=0.1 | must be learning rates above 0, min the lower one
lr_range TINY | steps=5 | -
lr_range TINY | precision=bf16 precision.then=fp32 precision.until=0.5 | no effect: a test is of one format
advise TINY | precision=bf16 precision.then=fp32 precision.until=0.5 | no effect: advise.py times each format
max_batch TINY | precision=bf16 precision.then=fp32 precision.until=0.5 | no effect: the largest batch is found
lr_range TINY | schedule=cosine | has no effect: the test sets it itself
lr_range TINY | parallel=ddp | parallel=ddp has no effect: each run has one process
memory TINY precision=fp32,bf16 | -m | -
memory | run=outputs/ended | here it is resume; set resume=outputs/ended
advise TINY | run=outputs/ended | run=outputs/ended has no effect: advise.py only times
lr_range TINY | lr=0.1 | lr=0.1 has no effect: the test sets it itself
max_batch TINY | memory_budget=8 | memory_budget=8 is not a size, such as 8GiB
max_batch TINY | memory_budget=9999GiB | has free now
max_batch TINY | micro_batch_size=8 | has no effect: it is what this command finds
max_batch TINY | precision=fp32,bf16 | -
doctor TINY | check=format | check=format is not a check
doctor TINY | check=islands | -
doctor TINY | steps=3 step=4 | -
doctor TINY | outputs/ended | -
doctor | nowhere | resume=nowhere: there is no such folder
doctor | runs | -
diff outputs/ended | - | 1 given; give two run folders, or two logs
diff outputs/ended runs/mine | third | -
diff outputs/ended | nowhere | b=nowhere: there is no such folder; give a run folder, such as outputs/ended
diff outputs/ended | ended | b=ended: there is no such folder; set b=outputs/ended
diff outputs/ended | folder | folder is not the folder of a run
diff log.csv | outputs/ended | b is a run folder, and the other one a file; set b=outputs/ended/metrics.jsonl
diff log.csv | here.db | b=here.db is no log (.jsonl, .csv, .json), and no run folder
diff log.csv | nowhere.csv | there is no nowhere.csv
diff log.csv log.csv | step=samples | step=samples is no column of numbers in log.csv or log.csv; leave it out
diff outputs/ended runs/mine | step=samples | step=samples has no effect: the steps of runs are known; leave it out
diff outputs/ended runs/mine | repaly=false | ; set replay=false
reproduce | claim=bignet_memroy | claim=bignet_memroy is not a claim
reproduce | claim=bignet_memory steps=3 | a claim's file fixes all other options
reproduce | claim=shakespeare_cpu device=cpu | it needs data.path=…
reproduce claim=bignet_memory | device=tpu | -
evaluate | - | missing required option: run; give a run folder, such as outputs/ended
generate | nowhere | there is no such folder; give a run folder (outputs has none of … llama
evaluate | 'outputs\ended' | there is no such file or folder; set run=outputs/ended
evaluate | nowhere | run=nowhere: there is no such folder
evaluate | ended | run=ended: there is no such folder; set run=outputs/ended
generate run=outputs/ended | - | missing required option: prompt
predict run=outputs/ended | path=nowhere | there is no such file or folder; give a photo, or a folder of them
sync | uri=runs.db | -
sync | uri=folder | -
sync | nowhere | nowhere is not a run folder
sync | output_dir=nowhere | output_dir=nowhere: no such folder
ui | uri=here.db | -
ui uri=sqlite:///here.db | port=70000 | -
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What users have: a run, a study that has begun, and files that are none of these."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("empty", "folder"):
        (folder / name).mkdir(parents=True)
    (folder / "here.db").touch()
    (folder / "log.csv").write_text("step,loss\n1,2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTISSA_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        short = "batch_size=8 data.samples=64 eval_samples=8 steps=6 profiler=none tracking=local run_name=ended"
        ended = _command(*TINY.split(), *short.split())
        assert ended.code == 0, ended.err
        shutil.copytree("outputs/ended", "runs/mine")
    return folder


@pytest.fixture
def work(made: Path, folder: Path, script: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``work(["doctor", …])``: another script up to where its work begins, among the files of ``made``."""
    monkeypatch.setattr("evidence.advice.command.cpu_share_of_others", lambda: 0.0)

    shutil.copytree(made, folder, dirs_exist_ok=True)
    return lambda words: up_to_the_work(words, script, monkeypatch)


@pytest.mark.parametrize(
    "row", rows(OTHERS, PAIR="TINY arms=fp32,bf16", TINY=TINY, STACK=STACK, SPACE=SPACE, NANO=NANO)
)
def test_a_mistake_in_another_script(
    row: Row, work: Callable[[list[str]], Result], made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "study=taken" in row.wrong:
        assert work(shlex.split(f"search {TINY} {SPACE.replace('e-4', 'e-3')} study=taken")).code == 0

    def run(words: list[str]) -> Result:
        if "study=taken" not in words:
            shutil.rmtree("outputs")  # what an earlier command has begun
            shutil.copytree(made, folder, dirs_exist_ok=True)
        return work(words)

    check(row, run, monkeypatch)


TINIER = "data=synthetic data.samples=64 recipe.size=nano batch_size=8 eval_samples=8 steps=2 profiler=none"
"""What makes a command that a message prints fast."""


@pytest.mark.parametrize("command", ["ui", "ui uri=sqlite:///runs.db", "evaluate run=outputs/ended", "sync"])
def test_a_command_that_a_message_prints_makes_the_first_one_end_well(
    command: str, train: Train, store: str, work: Callable[[list[str]], Result]
) -> None:
    if command == "sync":
        Path("outputs/ended/tracking.json").write_text("{")
    else:
        shutil.rmtree("outputs/ended/best")
        Path("outputs/ended/summary.json").unlink()
        Path("mlflow.db").unlink()
    refused = work(command.split())
    assert refused.code
    if command == "sync":
        assert "or remove it and train on, as a new run in MLflow: resume=outputs/ended steps=…" in refused.out
        Path("outputs/ended/tracking.json").unlink()
        printed = "resume=outputs/ended steps=8 tracking=mlflow"
    else:
        (printed,) = re.findall(r"python \S*scripts/train.py (.*)", refused.err)
    done = train(*shlex.split(printed), *TINIER.split() * ("resume" not in printed))
    assert done.code == 0, done.err
    assert work(command.split()).code == 0


# --- the process


def test_a_mistake_imports_no_heavy_library_and_its_code_is_the_processs(folder: Path) -> None:
    """A wrong name of a group or a choice is reported before torch is imported, any other mistake before MLflow."""
    names = [["precision=bf61"], ["presicion=bf16"], ["recipe=gtp2"], ["-m", "precision=fp32,bf61"]]
    others = [["batch_size=7", "micro_batch_size=2"], ["recipe=gpt2", "data=digits"], ["optimizer.name=Adamw"]]
    program = f"""
import runpy, sys
sys.path.insert(0, {str(PROJECT)!r})
from trainer.run.command import main
for commands in {(names, others)!r}:
    for command in commands:
        sys.argv = ["scripts/train.py", *command]
        print(main())
    print("torch" in sys.modules)
heavy = {{"mlflow", "transformers", "torchvision", "datasets", "sklearn", "matplotlib", "pandas", "PIL"}}
print(sorted(heavy & set(sys.modules)), flush=True)
runpy.run_path("{PROJECT}/scripts/train.py", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    expected = ["2"] * len(names) + ["False"] + ["2"] * len(others) + ["True", "[]"]
    assert (done.returncode, done.stdout.splitlines()) == (2, expected), done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("\n") == len(names + others) + 1


def test_a_terminal_is_told_what_is_loaded(folder: Path) -> None:
    ours, theirs = os.openpty()
    ended = subprocess.run(
        [sys.executable, PROJECT / "scripts/train.py", "precision=bf61"], stdout=theirs, stderr=theirs
    )
    said = b""
    while b"\n" not in said:  # a terminal may hand on what was written in parts
        said += os.read(ours, 999)
    assert said.startswith(f"loading torch and the recipes …{CLEARED}error: ".encode())
    assert ended.returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ([str(PROJECT / "scripts/train.py"), "precision=bf61"], 2),
        (["-c", 'from trainer.config.options import run; raise SystemExit(run("operator:truth", ""))'], 0),
    ],
    ids=["train.py", "another"],
)
def test_an_error_stream_on_a_full_disk_ends_no_program(program: list[str], code: int) -> None:
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        assert subprocess.run([sys.executable, *program], stderr=full, env=environment).returncode == code


@pytest.mark.parametrize("name", ["train", "doctor", "advise", "memory"])
def test_without_arguments_a_program_prints_its_usage(name: str, folder: Path) -> None:
    done = forks.run([sys.executable, PROJECT / f"scripts/{name}.py"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"python scripts/{name}.py " in done.stderr
    assert everything(folder) == []


# --- disks


def no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_too_small_is_found_before_the_first_step(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 * 4 * 2 * 72 + checkpoint.SPARE_BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=1 << 40))
    done = train(*f"{BIGNET} steps=9 eval_every=3".split())
    assert (done.code, (folder / "outputs").exists()) == (2, False)
    assert "output_dir=outputs: the disk has 1.0 MiB free, and a checkpoint and best/ take over 1.0" in done.err


@pytest.mark.parametrize("best", [1, 2])
def test_a_disk_that_fills_up_leaves_the_last_weights(
    best: int, train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", no_space)
    done = train(*f"{BIGNET} steps=2 eval_every=1 optimizer.lr={1e-3 if best == 2 else 100}".split())
    for step in (1, 2):
        assert f"the checkpoint of step {step} was not saved ([Errno 28] No space left on device)" in done.out
    run = folder / "outputs/bignet-fp32-s0"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["best"]["step"], summary["checkpoints"]["saved"], summary["checkpoints"]["failed"]) == (best, 0, 2)
    assert (run / "best" / "model.safetensors").exists()
    assert (done.code, summary["status"]) == ((0, "FINISHED") if best == 2 else (1, "FAILED"))
    assert ("but the best weights, of step 1, were not saved" in done.err) == (best == 1)


@pytest.mark.parametrize("fails", ["trainer.recipe.Recipe.export", "trainer.tracking.log.write_json"])
def test_a_disk_that_is_full_at_the_end_is_an_error_and_the_printed_command_finishes_the_run(
    fails: str, train: Train, succeed: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "outputs/bignet-fp32-s0"
    with monkeypatch.context() as patch:
        patch.setattr(fails, no_space)
        done = train(*f"{BIGNET} steps=2 eval_every=1".split())
    assert (done.code, done.err.startswith("error: all 2 steps are done, but ")) == (1, True)
    (command,) = re.findall(r"finish it with:\n  python scripts/train.py (.*)\n", done.err)
    assert succeed(*shlex.split(command)).err == ""
    assert json.loads((run / "summary.json").read_text())["status"] == "FINISHED"
    assert list((run / "best").iterdir())
    assert "already complete (2 steps)" in succeed(*shlex.split(command)).out
