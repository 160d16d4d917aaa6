"""What bad input gets: exit code 2, one message that names the key or file and the remedy, and nothing written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer.checkpoint.writer import CheckpointWriter
from trainer.trainer import Trainer

PROJECT = Path(__file__).resolve().parents[2]
CONF = PROJECT / "conf"
GPT2 = "recipe=gpt2 recipe.size=nano recipe.context=16 batch_size=2 eval_samples=2 steps=2 tracking=local"
TUNED = "recipe=gpt2 data=text data.path=long.txt batch_size=2 eval_samples=2 steps=2 tracking=local"
TOKENS = f"{GPT2} data=synthetic data.vocab_size=300"
RESNET = "recipe=resnet recipe.arch=shufflenet_v2_x0_5 batch_size=2 eval_samples=2 steps=2 tracking=local"
BIGNET = "recipe=bignet recipe.layers=2 recipe.width=8 batch_size=4 data.samples=64 eval_samples=4 tracking=local"


def choices(group: str) -> str:
    """The choices of a config group as a message lists them."""
    return f"({', '.join(sorted(file.stem for file in (CONF / group).glob('*.yaml')))})"


# A command, and what its message must contain.
TYPED: dict[str, tuple[str, ...]] = {
    # choices and keys
    "precision=bf61": ("precision=bf61", "did you mean 'bf16'?", choices("precision")),
    "presicion=bf16": ("presicion is not a key", "did you mean 'precision'?"),
    "precision=16": (f"precision=16 is not a choice {choices('precision')}",),
    "compile=fast": ("compile=fast is not a choice", "(default, max-autotune, off)"),
    "experiment=shakespear": ("did you mean 'shakespeare_cpu'?",),
    "+typo=1": ("typo is not a key of the config", "--cfg job"),
    "recipe.sise=mini": ("did you mean 'recipe.size'?",),
    "optimizer.betas=1": ("did you mean 'optimizer.options.betas'?",),
    "optimizer.xyz=1": ("optimizer.xyz is not a key of the config; optimizer has name, lr, weight_decay",),
    "early_stopping=3": ("early_stopping=3: set one of its options: early_stopping.patience, early_stopping.min_",),
    "lr=1e-3": ("lr is not a key of the config; did you mean 'optimizer.lr=1e-3'?",),
    "batch=8": ("did you mean 'batch_size'?",),
    "model.size=mini": ("model is not a key of the config; did you mean 'recipe'?",),
    "momentum=0.9": ("did you mean 'optimizer.options.momentum=0.9'?",),
    "--steps 10": ("--steps: write steps=10, without dashes",),
    "--steps=10": ("--steps=10: write steps=10, without dashes",),
    "-lr 0.1": ("write optimizer.lr=0.1, without dashes",),
    "--deterministic": ("write deterministic=…, without dashes",),
    "optimizer.name=Adagrad optimizer.options.betas=[0.9,0.99]": ("betas: Adagrad has no such argument",),
    "optimizer.options.amsgrad=true": ("add it with +optimizer.options.amsgrad=",),
    "+optimizer.options.beta=1": ("optimizer.options.beta", "did you mean 'betas'?"),
    "data.path=notes.txt": ("data.path is not an option of data=python_docs", "data=text"),
    "profiler.wait=1": ("profiler.wait is not an option of profiler=none; it belongs to profiler=torch",),
    "+data=digits": ("set it with data=…, without the +",),
    "~recipe": ("missing required option: recipe; set recipe=…",),
    "recipe=gpt2,bignet": ("recipe=gpt2,bignet has several values; add -m",),
    "steps": ("'steps' is not an override; write key=value",),
    "steps=${nothing}": ("steps", "'nothing' not found"),
    "-m seed=0,1 precision=bf16,bf61": ("did you mean 'bf16'?",),
    # types and ranges
    "steps=abc": ("steps=abc must be a whole number, or auto",),
    "seed=x": ("seed=x must be a whole number",),
    "seed=null": ("seed=null must be given a value",),
    "seed=-1": ("seed=-1 must lie between",),
    "seed=4294967296": ("seed=4294967296 must lie between",),
    "optimizer.lr=abc": ("optimizer.lr=abc must be a number",),
    "optimizer.name=Adamw": ("optimizer.name=Adamw is not in torch.optim; did you mean 'AdamW'? (ASGD, Adadelta, ",),
    "deterministic=maybe": ("deterministic=maybe must be true or false",),
    "recipe.size=125M": ("recipe.size=125M", "did you mean '124M'?"),
    "recipe=resnet recipe.arch=resnet51": ("recipe.arch=resnet51", "did you mean 'resnet50'?"),
    "precision=bf16 precision.fp32_modules=lm_head": ("precision.fp32_modules=lm_head must be a list",),
    "device=tpu": ("device=tpu is not a device; use auto, cpu, cuda",),
    "run_name=a/b": ("run_name=a/b", "without a slash"),
    # options that exclude each other
    "batch_size=7 micro_batch_size=2": ("batch_size=7", "micro_batch_size=1 or 7", "batch_size=6 or 8"),
    "precision=fp16 scaler=none": ("scaler=none with precision=fp16", "scaler=auto", "scaler.force=true"),
    f"{TOKENS} precision=bf16_master precision.fp32_modules=[lm_head]": ("lm_head shares a weight", "add wte too"),
    f"{BIGNET} precision=bf16 precision.low_ops=[softmax]": ("low_ops: no training step calls softmax", "relu"),
    "recipe=gpt2 data=digits": ("recipe=gpt2 cannot read data=digits", "data=python_docs"),
    "recipe=t5 recipe.size=tiny": ("recipe.size=tiny is unknown", "(nano, small, base)"),
    f"{RESNET} data=digits recipe.classes=5": ("recipe.classes=5", "10 classes", "recipe.classes=auto"),
    f"{TUNED} recipe.pretrained=gpt2 recipe.context=1024": ("recipe.context=1024 is longer", "use recipe.context=32"),
    # files and folders
    f"{TUNED} recipe.pretrained=gpt2": ("recipe.pretrained=gpt2 has no tokenizer that opens", "save_pretrained"),
    f"{TUNED} recipe.pretrained=bert": ("recipe.pretrained=bert is of type bert, not gpt2; use recipe=bert",),
    f"{TUNED} recipe.pretrained=empty": ("recipe.pretrained=empty cannot be opened as a gpt2",),
    f"{TUNED} recipe.pretrained=./nowhere": ("recipe.pretrained=./nowhere: there is no such folder",),
    f"{GPT2} data=text data.path=long.txt data.tokenizer=gpt2": ("data.tokenizer=gpt2 has no tokenizer that opens",),
    "data=text": ("missing required option: data.path",),
    "data=text data.path=nowhere.txt": ("data.path=nowhere.txt", "no such file"),
    f"{GPT2} data=text 'data.path=mein Ordner ü'": ("data.path=mein Ordner ü: there is no such file or folder",),
    f"{GPT2} data=text data.path=docs.jsonl": ("is a file of rows", "use data=hub data.name=docs.jsonl"),
    f"{GPT2} data=text data.path=empty.txt": ("data.path=empty.txt is empty",),
    f"{GPT2} data=text data.path=short.txt data.tokenizer=bytes": ("tokens", "one sample needs 17", "longer text"),
    f"{GPT2} data=text data.path=latin1.txt": ("latin1.txt is not UTF-8 text", "offset 2"),
    f"{GPT2} data=text data.path=empty": ("data.path=empty", "data.pattern=*.txt", "it is empty"),
    f"{RESNET} data=imagefolder data.path=empty": ("no images in empty", ".png"),
    f"{RESNET} data=imagefolder data.path=corrupt": ("corrupt/a/4.png cannot be read", "data.skip_corrupt=true"),
    f"{TOKENS} output_dir=short.txt/runs": ("output_dir=short.txt/runs", "short.txt is a file", "output_dir="),
    f"{TOKENS} output_dir=/proc/runs": ("output_dir=/proc/runs cannot be written", "output_dir="),
    "resume=nowhere": ("resume=nowhere: no such folder", "outputs/gpt2-bf16-s0"),
    "resume=empty": ("resume=empty: the folder holds no complete checkpoint",),
}  # fmt: skip


@pytest.fixture
def files(folder: Path) -> Path:
    from PIL import Image

    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    (folder / "docs.jsonl").write_text('{"text": "a row"}\n')
    (folder / "short.txt").write_text("too short")
    (folder / "latin1.txt").write_bytes("naïve ".encode("latin-1") * 100)
    for index in range(8):
        path = folder / "corrupt" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    (folder / "corrupt" / "a" / "4.png").write_bytes(b"not a picture")
    (folder / "long.txt").write_text("one two three four five\n" * 200)
    shape = {"model_type": "gpt2", "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 300}
    shape |= {"bos_token_id": None, "eos_token_id": None}
    for name, config in (("gpt2", shape), ("bert", {"model_type": "bert"})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("command", TYPED)
def test_a_mistake_gets_one_sentence_and_leaves_nothing(
    command: str, train: Callable[..., Any], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(Trainer, "train_step", lambda *_: pytest.fail("training began"))
    before = everything(files)
    done = train(*shlex.split(command))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    for words in TYPED[command]:
        assert words in done.err
    assert "Traceback" not in done.out + done.err
    assert everything(files) == before
    assert not list(scratch.glob("mantissa*"))


def test_a_mistake_imports_no_heavy_library(folder: Path) -> None:
    """So that it is reported within seconds; importing MLflow alone would take one or two."""
    commands = [
        ["precision=bf61"], ["presicion=bf16"], ["+typo=1"], ["batch_size=7", "micro_batch_size=2"],
        ["precision=tf32", "device=cpu"], ["recipe=gpt2", "data=digits"], ["data=text", "data.path=nowhere"],
        ["resume=nowhere"], ["output_dir=/dev/null/x"], ["recipe=resnet", "steps=x"],
        ["recipe=bert", "recipe.size=big"], ["recipe=t5", "data=digits"], ["recipe=llama", "recipe.kv_heads=3"],
    ]  # fmt: skip
    program = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from tests.composing import compose_quickly
from trainer.run.command import main
compose_quickly()
for command in {commands!r}:
    sys.argv = ["scripts/train.py", *command]
    print(main())
heavy = {{"mlflow", "transformers", "torchvision", "datasets", "sklearn", "matplotlib", "pandas", "PIL"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    reported = [line for line in done.stdout.splitlines() if not line.endswith("…")]  # what is being opened
    assert reported == ["2"] * len(commands) + ["[]"], done.stderr


def test_the_process_ends_with_the_code(start: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
    process = start("precision=bf61")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert out == "loading torch and the recipes …\n"
    assert err == f"error: precision=bf61 is not a choice; did you mean 'bf16'? {choices('precision')}\n"
    assert not list(folder.iterdir())


def test_the_hub_cannot_be_reached(folder: Path) -> None:
    """Its own client would try again and again: at most one question is put to what never answers.

    One process of its own, because libraries read the hub's address while they are imported.
    """
    commands = {  # the first meets silence, the others are refused
        f"{GPT2} data=hub data.name=roneneldan/TinyStories data.tokenizer=bytes": "data=python_docs",
        f"{RESNET} data=hub data.name=ylecun/mnist": "data=digits",
        f"{GPT2} data=python_docs data.tokenizer=some/one": "data.tokenizer=bpe, chars or bytes",
    }
    program = f"""
import contextlib, io, json, os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{{server.getsockname()[1]}}"
sys.path.insert(0, {str(PROJECT)!r})
from recipes.data.text.pretrained import hub_reachable
from trainer.run.command import main
hub_reachable.__defaults__ = (2.0,)  # seconds
answers, questions = [], 0
for command in {[shlex.split(command) for command in commands]!r}:
    sys.argv, err = ["scripts/train.py", *command], io.StringIO()
    with contextlib.redirect_stderr(err):
        answers.append([main(), err.getvalue()])
    with contextlib.suppress(OSError):  # nobody else asked, or it is closed
        server.setblocking(False)
        while server.accept():
            questions += 1
    server.close()
print(json.dumps([answers, questions]))
"""
    environment = {**os.environ, "HF_HOME": str(folder.parent / "hf")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    answers, questions = json.loads(done.stdout.splitlines()[-1])
    assert questions == 1
    for (code, err), embedded in zip(answers, commands.values(), strict=True):
        assert code == 2, err
        assert err.count("\n") == 1
        assert "cannot be reached" in err
        assert embedded in err
    assert not (folder / "outputs").exists()


def test_a_corrupt_image_is_skipped_if_requested(train: Callable[..., Any], files: Path) -> None:
    done = train(*f"{RESNET} data=imagefolder data.path=corrupt data.skip_corrupt=true loader.workers=0".split())
    assert done.code == 0, done.err
    assert "left out 1 of 8 images" in done.out
    assert "corrupt/a/4.png" in done.out


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_cut_off_in_the_middle_is_named_when_it_is_read(
    workers: int, train: Callable[..., Any], files: Path
) -> None:
    """Its header is whole, so only decoding it shows the damage."""
    for path in (files / "corrupt").rglob("*.png"):
        if path.name == "4.png":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-2000])
    command = f"{RESNET} data=imagefolder data.path=corrupt loader.workers={workers} steps=9"
    done = train(*command.split())
    assert done.code == 2
    assert "Traceback" not in done.err
    assert ".png cannot be decoded" in done.err
    assert "data.skip_corrupt=true" in done.err


@pytest.fixture
def earlier(train: Callable[..., Any], folder: Path) -> Path:
    """The folder of a run with checkpoints of steps 2 and 4."""
    assert train(*f"{BIGNET} steps=4 checkpoint.every=2 checkpoint.keep=2".split()).code == 0
    return folder / "outputs" / "bignet-fp32-s0"


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("", b"", "precision.mode was fp32, now bf16; restore it or start"),
        (
            "checkpoints/step-00000004/model.safetensors",
            None,
            "is damaged: model.safetensors is missing; step 2 is intact",
        ),
        ("checkpoints/step-00000004/optimizer.safetensors", b"x", "damaged: optimizer.safetensors does not match"),
        ("checkpoints/step-00000004/manifest.json", b"{", "manifest.json cannot be read"),
        ("metrics.jsonl", b"oops\n", "metrics.jsonl, line 1, is damaged"),
        ("config.json", b"", "config.json cannot be read"),
    ],
)
def test_what_cannot_be_resumed_is_named_and_left_as_it_is(
    file: str, damage: bytes | None, words: str, earlier: Path, train: Callable[..., Any], folder: Path
) -> None:
    if file and damage is None:
        (earlier / file).unlink()
    elif file:
        (earlier / file).write_bytes(damage or b"")
    before = everything(folder)
    done = train(*f"{BIGNET} steps=8 resume={earlier}".split(), *([] if file else ["precision=bf16"]))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert words in done.err
    assert everything(folder) == before


class TestDivergence:
    """Training that is no longer finite ends before the update, whenever the host reads the flag."""

    SGD = f"{BIGNET} optimizer=sgd optimizer.lr=30 schedule=constant schedule.warmup_steps=0 steps=200"

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_ends_with_the_step_and_the_last_good_checkpoint(
        self, precision: str, train: Callable[..., Any], folder: Path
    ) -> None:
        done = train(*f"{self.SGD} precision={precision} checkpoint.every=1 log_every=1 eval_every=200".split())
        assert done.code == 3
        assert "Traceback" not in done.out + done.err
        assert done.err.endswith(f"/scripts/doctor.py resume=outputs/bignet-{precision}-s0\n")
        assert done.err.count("\n") == 3
        run = folder / "outputs" / f"bignet-{precision}-s0"
        assert json.loads((run / "failure.json").read_text())["message"] in done.err
        (last,) = (run / "checkpoints").iterdir()
        step = int(last.name.removeprefix("step-"))
        assert step >= 1
        assert f"step {step + 1}: the gradients are not finite" in done.err
        assert f"last valid checkpoint is step {step}, in outputs/bignet-{precision}-s0/checkpoints" in done.err
        weights = load_file(last / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["status"], summary["step"]) == ("FAILED", step + 1)
        for line in (run / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not JSON

    def test_gives_the_process_its_exit_code(self, start: Callable[..., subprocess.Popen[str]], folder: Path) -> None:
        process = start(*f"{self.SGD} checkpoint=none".split())
        _, err = process.communicate(timeout=300)
        assert process.returncode == 3
        assert err.startswith("error: step ")
        assert err.endswith("/scripts/doctor.py resume=outputs/bignet-fp32-s0\n")
        failure = json.loads((folder / "outputs/bignet-fp32-s0/failure.json").read_text())
        assert (folder / "outputs/bignet-fp32-s0" / failure["checkpoint"] / "manifest.json").exists()


def no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_the_checkpoints_and_reports_it(
    train: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "flush", no_space)
    done = train(*f"{BIGNET} steps=2 eval_every=1".split())
    assert done.code == 1
    assert re.fullmatch(
        r"error: all 2 steps are done, but the best weights, of step \d, were not saved; free disk space and start it "
        r"again: it has no checkpoint\n",
        done.err,
    )
    for step in (1, 2):
        assert f"the checkpoint of step {step} was not saved ([Errno 28] No space left on device)" in done.out
    summary = json.loads((folder / "outputs/bignet-fp32-s0/summary.json").read_text())
    assert (summary["status"], summary["checkpoints"]["saved"], summary["checkpoints"]["failed"]) == ("FAILED", 0, 2)
    assert list((folder / "outputs/bignet-fp32-s0/checkpoints").iterdir()) == []


@pytest.mark.parametrize("what", ["best", "summary"])
def test_a_disk_that_is_full_at_the_end_is_an_error_and_resuming_finishes_the_run(
    what: str, train: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "outputs/bignet-fp32-s0"
    with monkeypatch.context() as patch:
        if what == "best":
            patch.setattr("trainer.recipe.Recipe.export", no_space)
        else:
            patch.setattr(
                "trainer.tracking.tracker.write_json",
                lambda path, content: no_space() if path.name == "summary.json" else None,
            )
        done = train(*f"{BIGNET} steps=2 eval_every=1".split())
    assert done.code == 1
    reported = (
        f"the best weights could not be exported to {run.relative_to(folder)}/best ([Errno 28] No space left on device)"
    )
    reported = reported if what == "best" else "summary.json could not be written"
    command = "python scripts/train.py resume=outputs/bignet-fp32-s0"
    assert (
        done.err == f"error: all 2 steps are done, but {reported}; free disk space, then finish it with:\n  {command}\n"
    )
    assert (run / "summary.json").exists() == (what == "best")
    done = train(*command.split()[2:])
    assert (done.code, done.err) == (0, "")
    assert json.loads((run / "summary.json").read_text())["status"] == "FINISHED"
    assert list((run / "best").iterdir())
    assert "already complete (2 steps)" in train(*command.split()[2:]).out
    if what == "best":  # what was said of the weights before must not be joined with half of the next ones
        (run / "serving").mkdir()
        (run / "serving/serving.json").write_text("{}")
        monkeypatch.setattr("trainer.recipe.Recipe.export", no_space)
        assert train(*command.split()[2:], "steps=4").code == 1
        assert not (run / "serving").exists()
