"""What bad input gets: exit code 2, one message that names the key or file and the remedy, and nothing written."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line.conftest import Start, Train
from tests.helpers import CONF, PROJECT
from trainer.checkpoint import store as checkpoint
from trainer.run.signals import CLEARED
from trainer.trainer import Trainer

TEXT = "recipe=gpt2 data=text"
BIGNET = "recipe=bignet recipe.layers=2 recipe.width=8 batch_size=4 data.samples=64 eval_samples=4 tracking=local"


def choices(group: str) -> str:
    """The choices of a config group as a message lists them."""
    return f"({', '.join(sorted(file.stem for file in (CONF / group).glob('*.yaml')))})"


# A command, and what its message must contain.
TYPED: dict[str, tuple[str, ...]] = {
    # choices and keys
    "precision=bf61": ("precision=bf61", "did you mean 'bf16'?", choices("precision")),
    "precision=null": ("precision=null is not a choice", choices("precision")),
    "presicion=bf16": ("presicion is not a key", "did you mean 'precision'?"),
    "batch=8": ("did you mean 'batch_size'?",),
    "model.size=mini": ("model is not a key of the config; did you mean 'recipe'?",),
    "optimizer.name=Adamw": ("optimizer.name=Adamw is not in torch.optim; did you mean 'AdamW'? (ASGD, Adadelta, ",),
    "recipe.size=125M": ("recipe.size=125M", "did you mean '124M'?"),
    "recipe=resnet recipe.arch=resnet51": ("recipe.arch=resnet51", "did you mean 'resnet50'?"),
    "device=tpu": ("device=tpu is not a device; use auto, cpu, cuda",),
    "+typo=1": ("typo is not a key of the config", "--cfg job"),
    "recipe.sise=mini": ("did you mean 'recipe.size'?",),
    "metrics=[f1_marco]": ("metrics=[f1_marco] is not one of accuracy, ", "did you mean 'f1_macro'?"),
    "optimizer.betas=1": ("did you mean 'optimizer.options.betas'?",),
    "early_stopping=3": ("early_stopping=3: set one of its options: early_stopping.patience, early_stopping.min_",),
    "lr=1e-3": ("lr is not a key of the config; did you mean 'optimizer.lr=1e-3'?",),
    "--steps=10": ("--steps=10: write steps=10, without dashes",),
    "--steps 10": ("--steps: write steps=10, without dashes",),
    "--deterministic": ("write deterministic=…, without dashes",),
    "optimizer.name=Adagrad optimizer.options.betas=[0.9,0.99]": ("betas: Adagrad has no such argument",),
    "optimizer.options.momentum=0.9": ("; it belongs to optimizer=muon, optimizer=rmsprop, optimizer=sgd",),
    "optimizer.options.amsgrad=true": ("add it with +optimizer.options.amsgrad=",),
    "data.path=notes.txt": ("data.path is not an option of data=python_docs", "data=text"),
    "+data=synthetic": ("set it with data=…, without the +",),
    "~recipe": ("~recipe: it cannot be removed; set recipe=bert|bignet|gpt2|llama|resnet|t5, or leave it out",),
    "recipe=bignet ~clip": ("~clip: it cannot be removed; set clip=none|norm|value, or leave it out",),
    "recipe=bignet ~steps": ("~steps: it cannot be removed; set steps=…, or leave it out",),
    "recipe=bignet precision=32": ("precision=32 is not a choice; did you mean 'fp32'?",),
    "recipe=bignet precision=bf16-mixed": ("did you mean 'bf16'?",),
    "recipe=bignet precision=16-mixed": ("did you mean 'fp16'?",),
    "recipe=bignet precision=amp": ("precision=amp is not a choice (",),
    "recipe=bignet limit_train_batches=2": ("limit_train_batches is not a key of the config; did you mean 'steps'?",),
    "recipe=resnet recipe.num_classes=2": ("did you mean 'data=…, which has the classes'?",),
    "recipe=resnet num_classes=2": ("num_classes is not a key", "did you mean 'data=…, which has the classes'?"),
    "recipe=bignet +trainer.max_epochs=3": ("trainer.max_epochs is not a key of the config; did you mean 'epochs'?",),
    "recipe=bignet trainer.precision=bf16": ("did you mean 'precision'?",),
    "recipe=bignet trainer.devices=2": ("did you mean 'torchrun --nproc-per-node=…'?",),
    "recipe=bignet --fp16": ("--fp16: write precision=fp16, without dashes",),
    "recipe=gpt2 recipe.n_layer=2": ("recipe.n_layer is not a key of the config; recipe has size, ",),
    "recipe=resnet50": ("there is no recipe/resnet50", "an architecture is recipe=resnet recipe.arch=…"),
    "recipe=bignet +steps=2": ("steps already has a value; set it with steps=…, without the +",),
    "recipe=bignet data.samples = 64": ("'data.samples' is not an override; write key=value, without blanks",),
    "recipe= bignet": ("'bignet' is not an override; write key=value, without blanks",),
    "recipe=bert init_from=./no.pth": ("init_from=./no.pth: there is no such file or folder; give a file of weights",),
    "recipe=gpt2 data=notes.txt": ("write data=text data.path=…, data=imagefolder data.path=… or data",),
    "recipe=gpt2,bignet": ("recipe=gpt2,bignet has several values; add -m",),
    "optimizer.lr=0,001": ("optimizer.lr=0,001 has several values; write optimizer.lr=0.001, or add -m",),
    "recipe=gpt2 recipe.dropout=0,1": ("write recipe.dropout=0.1, or add -m",),
    "seed=0,1": ("seed=0,1 has several values; add -m",),
    "optimizer.lr=1e-3,1e-4": ("optimizer.lr=1e-3,1e-4 has several values; add -m",),
    f"{BIGNET} output_dir=gs://bucket/runs": ("output_dir=gs://bucket/runs is no folder on this machine",),
    f"{BIGNET} output_dir=": ("output_dir= is no folder on this machine; set output_dir=outputs",),
    "steps": ("'steps' is not an override; write key=value",),
    "steps=${nothing}": ("steps", "'nothing' not found"),
    "-m seed=0,1 precision=bf16,bf61": ("did you mean 'bf16'?",),
    # types and ranges
    "steps=abc": ("steps=abc must be a whole number, or auto",),
    "steps=1.5": ("steps=1.5 must be a whole number, or auto",),
    "steps=500%": ("steps=500% must be a whole number, or auto",),
    "seed=x": ("seed=x must be a whole number",),
    "seed=4294967296": ("seed=4294967296 must lie between 0 and 4294967295",),
    "seed=null": ("seed=null must be a whole number",),
    "optimizer.lr=high": ("optimizer.lr=high must be a number, such as 0.001",),
    "optimizer.fused=auto": ("optimizer.fused=auto must be true or false",),
    "tags=[a]": ("tags=[a]: set +tags.NAME=VALUE",),
    "precision=bf16 precision.fp32_modules=lm_head": ("precision.fp32_modules=lm_head must be a list, such as [a,b]",),
    "'run_name=a\nb'": ("run_name='a\\nb' must be the name of a folder: one short line",),
    # Hydra's grammar and flags
    "-m steps=glob(*)": ("steps=glob(*): write the values, separated by commas",),
    "clip=norm ~clip.max_norm": ("~clip.max_norm: an option cannot be removed; set another value, or leave it out",),
    "--config-name=gpt2": ("--config-name=gpt2 has no effect", "experiment="),
    "--config-path here": ("--config-path has no effect",),
    "--experimental-rerun=x": ("continue a run with resume=FOLDER",),
    "--local-rank=0": ("from torch.distributed.launch; use torchrun in its place",),
    "run_name=a/b": ("run_name=a/b", "without a slash"),
    f"{BIGNET} output_dir={300 * 'a'}": ("output_dir=aaa", "File name too long"),
    # options that exclude each other
    "batch_size=7 micro_batch_size=2": ("batch_size=7", "micro_batch_size=1 or 7", "batch_size=6 or 8"),
    "precision=fp16 scaler=none": ("scaler=none with precision=fp16", "scaler=auto", "scaler.force=true"),
    "recipe=gpt2 data=digits": ("recipe=gpt2 cannot read data=digits", "data=python_docs"),
    # files and folders
    f"{TEXT} data.path=notes.txt init_from=empty": ("init_from=empty cannot be opened as a gpt2",),
    "data=text": ("missing required option: data.path",),
    f"{TEXT} 'data.path=mein Ordner ü'": ("data.path=mein Ordner ü: there is no such file or folder",),
    f"{TEXT} data.path=*.txt": ("no such file or folder; set data.path='.' data.pattern='*.txt'",),
    "recipe=gpt2 recipe.lr=1e-3": ("did you mean 'optimizer.lr'?",),
    f"{TEXT} data.path=docs.jsonl": ("is a file of rows", "use data=hub data.name=docs.jsonl"),
    f"{BIGNET} output_dir=notes.txt/runs": ("output_dir=notes.txt/runs", "notes.txt: it is a file", "output_dir="),
    f"{BIGNET} output_dir=/proc/runs": ("output_dir=/proc/runs", "output_dir="),
    "resume=nowhere": ("resume=nowhere: there is no such folder", "outputs/gpt2-bf16-s0"),
    "resume=true": ("resume=true: write resume=auto, which continues the newest run of this name, or a run folder",),
    "resume=notes.txt": ("resume=notes.txt: this is a file; give a run folder, such as outputs/gpt2-bf16-s0",),
    "resume=empty": ("empty is not the folder of a run; give one, such as outputs/gpt2-bf16-s0",),
    "resume=runs": ("runs is not the folder of a run; give one, such as runs/mine",),
    "resume=exported": ("exported is not the folder of a run; give one, such as outputs/gpt2-bf16-s0",),
}  # fmt: skip


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("command", TYPED)
def test_a_mistake_gets_one_sentence_and_leaves_nothing(
    command: str, train: Train, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "empty").mkdir()
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/config.json").write_text('{"precision.mode": "bf16"}')
    (folder / "exported").mkdir()
    (folder / "exported/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "docs.jsonl").write_text('{"text": "a row"}\n')
    (folder / "notes.txt").write_text("one two three four five\n" * 200)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(Trainer, "train_step", lambda *_: pytest.fail("training began"))
    before = everything(folder)
    done = train(*shlex.split(command))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    for words in TYPED[command]:
        assert words in done.err
    assert "Traceback" not in done.out + done.err
    assert everything(folder) == before
    assert not list(scratch.glob("mantissa*"))


def test_a_mistake_imports_no_heavy_library(folder: Path) -> None:
    """A wrong name of a group or a choice is reported before torch is imported, any other mistake before MLflow."""
    names = [["precision=bf61"], ["presicion=bf16"], ["recipe=gtp2"], ["-m", "precision=fp32,bf61"]]
    others = [["batch_size=7", "micro_batch_size=2"], ["recipe=gpt2", "data=digits"], ["optimizer.name=Adamw"]]
    program = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from trainer.run.command import main
for commands in {(names, others)!r}:
    for command in commands:
        sys.argv = ["scripts/train.py", *command]
        print(main())
    print("torch" in sys.modules)
heavy = {{"mlflow", "transformers", "torchvision", "datasets", "sklearn", "matplotlib", "pandas", "PIL"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    reported = [line for line in done.stdout.splitlines() if line in ("2", "True", "False") or line[:1] == "["]
    assert reported == ["2"] * len(names) + ["False"] + ["2"] * len(others) + ["True", "[]"], done.stderr


@pytest.mark.parametrize(("asked", "precision", "warned"), [("bf16", "fp32", True), ("no", "bf16", False)])
def test_a_precision_of_accelerate_launch_is_said_to_have_no_effect(
    asked: str, precision: str, warned: bool, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    done = train(*BIGNET.split(), "steps=2", f"precision={precision}", "checkpoint=none")
    assert done.code == 0
    assert ("ACCELERATE_MIXED_PRECISION=bf16 has no effect; set precision=bf16" in done.out + done.err) == warned


PAIR = "compare recipe=bignet arms=fp32,bf16"
LR = "search recipe=bignet space.optimizer.lr=tag(log,interval(1e-4,1e-2))"
IN_OTHERS = {
    "advise recipe=gpt2 presicion=bf16": "did you mean 'precision'?",
    "advise recipe=gpt2 time_budget=5": "time_budget=5 is not a duration; write time_budget=90s, ",
    "advise recipe=gpt2 precision=fp32,bf16": "precision=fp32,bf16 has several values; advise.py chooses",
    "compare recipe=gpt2 arms=fp32,bf61": "arms: bf61 is not a precision",
    "compare recipe=gpt2 arms=fp32,bf16 arm.x=steps=many": "steps=many must be a whole number",
    f"{PAIR} arm.fp32=clip=norm": "the arm fp32 appears twice; give each a name: arm.<name>=",
    f"{PAIR} arm.typo=precison=bf16": "arm typo: precison is not a key of the config; did you mean 'precision'?",
    f"{PAIR} arm.x=output_dir=elsewhere": "output_dir=elsewhere has no effect: set for every run",
    f"{PAIR} baseline=pf32": "baseline=pf32 is not among the arms (fp32, bf16); did you mean 'fp32'?",
    f"{PAIR} clip=none,norm": "arm fp32: clip=none,norm has several values; use one arm per value",
    f"{PAIR} margin=0": "margin=0 must be a number above 0",
    f"{PAIR} name=a/b": "name=a/b must be the name of a folder",
    f"{PAIR} seeds=1": "seeds=1 must be two or more different numbers from 0 to 999; use seeds=5",
    f"{PAIR} steps=10": "steps=10 leaves no steps to measure the speed: the steps up to log_every=10 are warm-up",
    "compare recipe=bignet arm.a=precision=fp32 arm.b=clip=none": "arm b is the same as the baseline a; change it",
    "compare recipe=gpt2 arms=fp32 arm.x=seed=3": "seed=3 has no effect: set for every run; use seeds=5",
    "doctor resume=nowhere": "resume=nowhere: there is no such folder",
    "doctor recipe=gpt2 check=format": "check=format is not a check; did you mean 'formats'?",
    "evaluate": "missing required option: run",
    "evaluate run=nowhere": "run=nowhere: there is no such folder",
    "evaluate -m run=run precision=fp32,bf16": "-m is for train.py alone; leave it out",
    "evaluate nowhere": "run=nowhere: there is no such folder",
    "evaluate run run": "'run' is not an option; write key=value",
    "doctor nowhere": "resume=nowhere: there is no such folder",
    "generate run=run": "missing required option: prompt",
    "generate run prompt=a cache=false": "cache is not an option (run, prompt, ",
    "lr_range recipe=gpt2 schedule.final=0": "schedule.final=0 has no effect: the test sets it itself",
    "lr_range recipe=gpt2 max=1e-8": "min=1e-07 and max=1e-08 must be learning rates above 0, min the lower one",
    "lr_range recipe=gpt2 parallel=ddp": "parallel=ddp has no effect: each run has one process",
    "max_batch recipe=bignet memory_budget=8": "memory_budget=8 is not a size; write memory_budget=8GiB",
    "max_batch recipe=bignet memory_budget=900TiB": "has free now",
    "max_batch recipe=gpt2 micro_batch_size=4": "micro_batch_size=4 has no effect: it is what this command finds",
    "predict run=run path=nowhere": "path=nowhere: there is no such file or folder; give a photo, or a folder of them",
    "reproduce claim=bignet_memory all=true": "claim=… and all=true exclude each other",
    "reproduce claim=bignet_memory steps=3": "a claim's file fixes all other options (these claims have no option to",
    "reproduce claim=gpt2_ladder device=cpu": "claim=gpt2_ladder is NOT TESTABLE HERE: it needs an NVIDIA GPU",
    "reproduce claim=shakespeare_cpu device=cpu": "it needs data.path=… (the text https://",
    "reproduce claim=two_y": "claim=two_y is not a claim; did you mean 'two_x'?",
    "search recipe=bignet": "there is nothing to search; give a space, such as",
    "search recipe=bignet space.optimizer.lr=interval(low,1)": "str is incompatible with Union[int, float]); write ",
    "search recipe=bignet space.optimizer.lr=interval(-1,1)": "optimizer.lr=-1.0 must be above 0 and finite",
    "search recipe=bignet space.output_dir=choice(a,b)": "output_dir is not an option of the training",
    f"{LR} optimizer.lr=1": "optimizer.lr is searched and set (optimizer.lr=1); remove one of them",
    f"{LR} precision=fp32,bf16": "search them, as in space.precision=choice(fp32,bf16)",
    f"{LR} resume=auto": "resume=auto has no effect: the search sets it",
    "search recipe=gpt2 space.optimizer.lr=log(1,2)": "is not a search space (Unknown function 'log'); write ",
    "sync uri=foo": "uri=foo is not a URI",
    "ui prot=3": "did you mean 'port'?",
}


@pytest.mark.parametrize("command", IN_OTHERS)
def test_the_other_scripts_answer_a_mistake_with_one_sentence(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "run").mkdir()
    (folder / "run/config.json").write_text('{"recipe": "gpt2", "precision.mode": "bf16", "data": "synthetic"}')
    arguments = command.split()
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"{PROJECT}/scripts/{arguments[0]}.py", run_name="__main__")
    *progress, said = capsys.readouterr().err.splitlines()
    assert (ended.value.code, said[:7]) == (2, "error: "), said
    assert IN_OTHERS[command] in said
    assert all(line.endswith(" …") for line in progress)


def test_the_process_ends_with_the_code(start: Start, folder: Path) -> None:
    process = start("precision=bf61")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert out == ""
    assert err == f"error: precision=bf61 is not a choice; did you mean 'bf16'? {choices('precision')}\n"
    assert not list(folder.iterdir())


def test_a_terminal_is_told_what_is_loaded(folder: Path) -> None:
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, PROJECT / "scripts/train.py", "precision=bf61"], stdout=theirs, stderr=theirs)
    said = b""
    while b"\n" not in said:  # a terminal may hand on what was written in parts
        said += os.read(ours, 999)
    assert said.startswith(f"loading torch and the recipes …{CLEARED}error: ".encode())


def no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_too_small_is_found_before_the_first_step(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"{BIGNET} steps=9 eval_every=3".split()
    free = 2 * 4 * 2 * 72 + checkpoint.SPARE_BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=1 << 40))
    done = train(*command)
    assert done.code == 2
    assert "output_dir=outputs: the disk has 1.0 MiB free, and a checkpoint and best/ take over 1.0" in done.err
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize("best", [1, 2])
def test_a_disk_that_fills_up_leaves_the_last_weights(
    best: int, train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", no_space)
    options = f"{BIGNET} steps=2 eval_every=1 optimizer.lr={1e-3 if best == 2 else 100}".split()
    done = train(*options)
    for step in (1, 2):
        assert f"the checkpoint of step {step} was not saved ([Errno 28] No space left on device)" in done.out
    run = folder / "outputs/bignet-fp32-s0"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["best"]["step"], summary["checkpoints"]["saved"], summary["checkpoints"]["failed"]) == (best, 0, 2)
    assert (run / "best" / "model.safetensors").exists()
    assert (done.code, summary["status"]) == ((0, "FINISHED") if best == 2 else (1, "FAILED"))
    if best == 1:
        assert done.err.startswith(
            "error: all 2 steps are done, but the best weights, of step 1, were not saved (those "
        )
        assert done.err.endswith("of step 2 are exported); free disk space and start it again: it has no checkpoint\n")


@pytest.mark.parametrize(
    ("fails", "reported"),
    [
        ("trainer.recipe.Recipe.export", "the best weights could not be exported to outputs/bignet-fp32-s0/best ("),
        ("trainer.tracking.log.write_json", "summary.json could not be written"),
    ],
)
def test_a_disk_that_is_full_at_the_end_is_an_error_and_resuming_finishes_the_run(
    fails: str, reported: str, train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, command = folder / "outputs/bignet-fp32-s0", "python scripts/train.py resume=outputs/bignet-fp32-s0"
    with monkeypatch.context() as patch:
        patch.setattr(fails, no_space)
        done = train(*f"{BIGNET} steps=2 eval_every=1".split())
    assert done.code == 1
    assert done.err.startswith(f"error: all 2 steps are done, but {reported}")
    assert done.err.endswith(f"; free disk space, then finish it with:\n  {command}\n")
    done = train(*command.split()[2:])
    assert (done.code, done.err) == (0, "")
    assert json.loads((run / "summary.json").read_text())["status"] == "FINISHED"
    assert list((run / "best").iterdir())
    assert "already complete (2 steps)" in train(*command.split()[2:]).out
