"""Everything that can be composed from conf/ runs through the real command line, two steps at a tiny size."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from mantissa.display import size
from mantissa.formats import FORMATS
from tests.command_line.conftest import BIGNET, Train, only_run
from tests.helpers import SHIPPED

CHOICES = sorted(f"{path.parent.name}/{path.stem}" for path in SHIPPED if path.stem != "config")
SHORT = ("steps=2", "batch_size=4", "eval_samples=4", "tracking=local")
TEXT = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16")
GPT2 = (*TEXT, "data=synthetic", "data.vocab_size=300")
SMALL = (*BIGNET, "data.samples=16")
IMAGES = ("recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "recipe.image_size=32", "loader.workers=0")

# What a choice needs besides itself. A new YAML that is not here has to run as it is; with bignet, if it is no recipe.
NEEDS: dict[str, tuple[str, ...]] = {
    "recipe/bignet": SMALL[1:],
    "recipe/gpt2": GPT2[1:],
    "recipe/causal_lm": (
        *("recipe.model_type=qwen3", "recipe.config.num_hidden_layers=1", "recipe.config.hidden_size=16"),
        *("recipe.config.intermediate_size=16", "recipe.context=16", "data=synthetic", "data.vocab_size=90"),
    ),
    "recipe/bert": ("recipe.context=16", "data=synthetic", "data.vocab_size=90"),
    "recipe/llama": ("recipe.layers=1", "recipe.context=16", "data=synthetic", "data.vocab_size=90"),
    "recipe/text_classifier": (
        "recipe.model_type=bert", "recipe.config.hidden_size=32", "recipe.config.num_hidden_layers=1",
        "recipe.config.num_attention_heads=2", "recipe.context=16", "data=synthetic", "data.vocab_size=90",
    ),
    "recipe/t5": ("recipe.context=16", "data=synthetic", "data.vocab_size=90"),
    "recipe/resnet": ("recipe.arch=shufflenet_v2_x0_5",),
    "augment/imagenet": IMAGES,
    "augment/light": IMAGES,
    "augment/randaugment": (*IMAGES, "augment.mixup=0.2", "augment.cutmix=1"),
    "augment/trivialaugment": IMAGES,
    "data/digits": IMAGES,
    "data/hub": (*TEXT, "data.name=texts", "data.tokenizer=bytes"),
    "data/imagefolder": (*IMAGES, "data.path=images"),
    "data/own": ("recipe=bignet",),
    "data/python_docs": (*TEXT, "data.tokenizer=bytes"),
    "data/tokens": (*TEXT, "data.path=shards"),
    "data/text": (*TEXT, "data.path=texts/0.txt", "data.vocab_size=300"),
    "experiment/gpt2_124m": (
        *TEXT, "data.name=texts", "data.tokenizer=bytes", "data.valid_fraction=0.5", "micro_batch_size=2",
        "compile=off",
    ),
    "experiment/resnet18_fake": (*IMAGES, "data.samples=16"),
    "experiment/resnet50_a3": (
        *IMAGES, "data.path=images", "recipe.train_image_size=24", "micro_batch_size=2", "schedule.warmup_steps=1",
    ),
    "experiment/resnet50_imagenet": (*IMAGES, "data.path=images"),
    "experiment/shakespeare_cpu": (*TEXT, "data.path=texts/0.txt"),
    "experiment/shakespeare_fast": (*TEXT, "data.path=texts/0.txt"),
    "optimizer/rmsprop": ("optimizer.weight_decay=0.01",),
    "precision/fp16": ("scaler.init=1024",),
    **{f"precision/{name}": GPT2 for name, row in FORMATS.items() if row.number.scaled},
    "profiler/torch": ("profiler.wait=0", "profiler.warmup=1", "profiler.active=1"),
    "scaler/dynamic": ("precision=fp16",),
    "scaler/static": ("precision=fp16",),
    "debug/overfit": ("debug.target=0.999",),
}  # fmt: skip

REFUSED = {
    "precision/tf32": "precision=tf32 is not available",
    "parallel/ddp": "start them with torchrun",  # see tests/parallel
    "parallel/fsdp": "start them with torchrun",
    "compile/default": "compile=default on a CPU needs a C++ compiler",
    "compile/max-autotune": "compile=max-autotune on a CPU needs a C++ compiler",
    "data/own": "recipe=bignet cannot read data=own",  # no recipe here brings its own; see test_recipe_path.py
}


def tiny(choice: str) -> list[str]:
    group, name = choice.split("/")
    needs = NEEDS.get(choice, ())
    base = () if group == "recipe" or any(each.startswith("recipe=") for each in needs) else SMALL
    return [*base, f"{group}={name}", *needs, *SHORT]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.usefixtures("user_data")
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_runs_two_steps(choice: str, train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice.startswith("compile/"):
        monkeypatch.setenv("PATH", str(folder))  # without a compiler
    done = train(*tiny(choice))
    if choice in REFUSED:
        assert done.code == 2
        assert REFUSED[choice] in done.err
        assert not (folder / "outputs").exists()
        return
    assert done.code == 0, done.err
    summary = read(only_run(folder) / "summary.json")
    assert (summary["status"], summary["step"]) == ("FINISHED", 2)
    assert math.isfinite(summary["final"]["valid/loss"])


def test_compile_off_and_default_agree(succeed: Train, folder: Path) -> None:
    """The one test that compiles for real: about ten seconds, most of them in g++."""
    if not shutil.which("g++"):
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    for mode in ("off", "default"):
        succeed(*tiny(f"compile/{mode}"), "profiler=none", f"run_name={mode}")
    losses = [read(folder / "outputs" / mode / "summary.json")["final"]["valid/loss"] for mode in ("off", "default")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.usefixtures("plots")
def test_the_run_folder_holds_everything(succeed: Train, folder: Path) -> None:
    done = succeed(*GPT2, "precision=bf16", "steps=8", "batch_size=4", "micro_batch_size=2", "eval_samples=4",
                 "tracking=local", "profiler=torch", "precision.modules={ln_f:fp32}")  # fmt: skip
    assert done.err == ""
    run = only_run(folder)
    assert {path.name for path in run.iterdir()} == {
        "config.json", "precision.json", "metrics.jsonl", "summary.json", "checkpoints", "best", "plots",
        "profile", "tracking.json", "run.json", "tokenizer", ".lock",
    }  # fmt: skip
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000008"}
    assert read(run / "profile" / "trace.json")["traceEvents"]
    assert read(run / "summary.json")["utilisation"]["mfu"] > 0
    assert "aten::" in (run / "profile" / "operators.txt").read_text()
    config = read(run / "config.json")
    assert (config["recipe"], config["recipe.size"], config["eval_every"]) == ("gpt2", "nano", 8)
    assert "auto" not in (config["steps"], config["batch_size"], config["micro_batch_size"])
    manifest = read(run / "precision.json")
    assert manifest["effective"]["fp32_modules"] == ["gpt2.transformer.ln_f"]
    assert any("bfloat16" in row["compute"] for row in manifest["modules"] if row["weights"] == "float32")
    assert "bf16 autocast, fp32 weights" in done.out
    assert ("fp32 arithmetic, this CPU has no bf16" in done.out) == (manifest["support"] == "emulated")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 8, 8]
    wanted = {"loss", "lr", "grad_norm", "loss_scale", "skipped_steps", "step_time_s", "tokens_per_s", "mfu"}
    assert wanted | {"process_memory_bytes"} <= lines[0].keys()
    assert {path.suffix for path in (run / "best").iterdir()} == {".json", ".safetensors"}


def test_the_terminal_shows_what_will_happen_and_what_happened(train: Train) -> None:
    done = train(*GPT2, *SHORT[1:], "steps=30", "micro_batch_size=2", "precision=fp16", "scaler.init=1e9")
    before, _, after = done.out.partition("Done in ")
    for words in ("gpt2 nano, 836k parameters", "fp16 autocast", "4 × 16 tokens = 2 microbatches of 2", " skipped\n"):
        assert words in before
    rows = [line.split() for line in before.splitlines()[-3:-1]]
    assert [(row[0], row[-1]) for row in rows] == [("25", "★"), ("30", "★")]
    for words in ("(best, step 30)\n", " tokens/s median", " peak (process)", " skipped steps"):
        assert words in after
    *_, folder, generate, compare = after.splitlines()  # and no MLflow to compare runs in
    assert folder.split() == ["outputs/gpt2-fp16-s0/best", "opens", "in", "transformers"]
    assert "/generate.py run=outputs/gpt2-fp16-s0 " in generate
    assert shlex.split(generate)[-1].startswith("prompt=")
    typed, others = " ".join(GPT2), "batch_size=4 eval_samples=4 tracking=local steps=30 micro_batch_size=2"
    own = "arm.fp16=precision=fp16 scaler.init=1e9"
    assert compare.endswith(f"/compare.py {typed} {others} arms=fp32 '{own}' seeds=5")
    assert done.err == ""
    assert [line for line in done.out.splitlines() if len(line) > 100 and not line.startswith("python ")] == []


def test_the_reason_of_each_automatic_value_is_shown_on_demand(train: Train) -> None:
    for asked, shown in (((), False), (("--why",), True), (("why=true",), True)):
        done = train(*SMALL, *SHORT, *asked)
        assert done.code == 0, done.err
        assert ("at most ten evaluations per run" in done.out, "(--why)" in done.out) == (shown, not shown)


def test_bignet_ends_with_the_ledger(train: Train, folder: Path) -> None:
    """One peak: that of the tensors, beside the memory of the process."""
    done = train(*SMALL, "recipe.width=64", "steps=4", *SHORT[1:], "precision=bf16")
    after = done.out.partition("Done in ")[2]
    peak = size(read(only_run(folder) / "profile" / "ledger.json")["peak_bytes"])
    assert re.findall(r"(\S+ \S+) peak \(", after)[0] == peak
    for category in ("weights", "gradients", "optimizer", "autocast_copies", "activations", "temporary"):
        assert f"\n{category} " in after
    ledger = read(only_run(folder) / "profile" / "ledger.json")
    assert ledger["step"] == 3  # counted from 1, as in metrics.jsonl
    assert "autocast can save at most " in after
