"""``init_from=RUN``: a new run from the weights of another, with its architecture and its tokenizer."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line.conftest import SMALLEST, Train
from tests.helpers import CPU, same_bits, start, trainer_of
from trainer.checkpoint.reader import load
from trainer.checkpoint.schema import write_manifest
from trainer.config.compose import compose as composed
from trainer.config.settle import plan_of
from trainer.errors import UserError
from trainer.files import read_json

SHORT = ("tracking=local", "device=cpu", "batch_size=4", "eval_samples=8", "steps=2")
GPT2 = ("recipe=gpt2", "recipe.context=16", *SHORT)
TEXT = "data=text"
CACHE = "data.cache_dir=cache"


def texts(folder: Path) -> None:
    (folder / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "two.txt").write_text("a dog is over the brown fox; the fox is quick! " * 60)


def config_of(run: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("outputs", run, "config.json").read_text())
    return content


def same_end(*runs: str) -> bool:
    one, other = (load(Path("outputs", run, "checkpoints")).tensors() for run in runs)
    return same_bits(one, other)


def test_a_run_that_kept_only_its_weights_is_where_another_starts_and_what_it_is_compared_with(
    succeed: Train, folder: Path
) -> None:
    tiny = (*SMALLEST, *SHORT, "eval_every=1")
    succeed(*tiny, "run_name=light", "checkpoint.keep=0")
    assert not Path("outputs/light/checkpoints").exists()
    assert Path("outputs/light/best/model.safetensors").exists()
    done = succeed(*tiny, "run_name=tuned", "init_from=outputs/light")
    best = read_json(Path("outputs/light/summary.json"))["best"]["value"]
    first = json.loads(Path("outputs/tuned/metrics.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["valid/loss"]) == (0, pytest.approx(best))
    assert re.search(r"\n +0  +\d\.\d{4}\n", done.out)
    assert read_json(Path("outputs/tuned/summary.json"))["best"]["step"] > 0  # of which there is a checkpoint


def test_training_that_makes_the_weights_worse_is_said_to(succeed: Train, folder: Path) -> None:
    tiny = (*SMALLEST, *SHORT, "eval_every=1")
    succeed(*tiny, "run_name=source", "checkpoint.keep=0")
    tuned = (*tiny, "init_from=outputs/source")
    better, worse = succeed(*tuned, "run_name=better"), succeed(*tuned, "run_name=worse", "optimizer.lr=30")
    for run, done in (("better", better), ("worse", worse), ("worse", succeed("resume=outputs/worse", "steps=4"))):
        summary = read_json(Path("outputs", run, "summary.json"))
        before = summary["before_training"]
        assert (summary["best"]["value"] < before) == (run == "better") == ("★" in done.out)
        assert (summary["worse_than_before"] is None) == (run == "better")
        said = " ".join(done.out.split())  # wrapped
        assert (f"worse than before training (loss {before:.4f} at step 0)" in said) == (run != "better")


def test_weights_of_another_program_start_a_recipe_of_any_kind(folder: Path) -> None:
    tiny = (*SMALLEST, *SHORT)
    other = trainer_of(*tiny, "seed=7").model.state_dict()
    torch.save({"model_state_dict": {f"module.{name}": each for name, each in other.items()}}, "ckpt.pt")
    trainer = trainer_of(*tiny, "init_from=ckpt.pt")
    assert same_bits(dict(trainer.model.state_dict()), dict(other))
    assert ("init_from", "ckpt.pt", "its model_state_dict, the prefix module. removed") in trainer.decisions


@pytest.fixture
def source(succeed: Train, folder: Path, once: Callable[[Callable[[], object]], None]) -> Path:
    """A finished run with a tokenizer of its own text; empty/ is the folder of one that has no weights."""

    def make() -> None:
        texts(folder)
        (folder / "empty").mkdir()
        (folder / "empty" / "config.json").write_text('{"recipe": "gpt2", "precision.mode": "fp32"}')
        succeed(*GPT2, "recipe.size=nano", TEXT, "data.path=one.txt", "data.vocab_size=300", "run_name=first")

    once(make)
    return Path("outputs/first")


def test_a_run_starts_from_the_best_weights_with_the_same_shapes_and_tokens(source: Path) -> None:
    best = load_file(source / "best" / "model.safetensors")
    trainer = trainer_of(*GPT2[:1], f"init_from={source}", TEXT, "data.path=one.txt", "data.vocab_size=300")
    own = trainer.model.gpt2.state_dict()
    vocabulary = trainer.datasets.vocabulary
    assert len(own["transformer.wte.weight"]) > vocabulary == len(best["transformer.wte.weight"])
    assert all(torch.equal(own[name][: len(tensor)], tensor) for name, tensor in best.items())

    summary = json.loads((source / "summary.json").read_text())
    trainer = trainer_of(
        *GPT2, f"init_from={source}", TEXT, "data.path=one.txt", "optimizer.lr=1e-3", "seed=5", "recipe.size=nano"
    )
    assert trainer.evaluate()["loss"] == pytest.approx(summary["best"]["value"], abs=1e-5)


def test_the_new_run_has_its_own_data_and_is_continued_without_the_first(
    source: Path, train: Train, succeed: Train
) -> None:
    """By its folder, and by the same command."""
    new = ("recipe=gpt2", f"init_from={source}", *SHORT, TEXT, CACHE, "data.path=two.txt", "deterministic=true",
           "schedule=constant", "precision=bf16")  # fmt: skip
    succeed(*new, "run_name=whole", "steps=4")
    command = (*new, "run_name=again", "resume=auto", "--why")
    done = succeed(*command)
    for said in ("recipe.size=nano", "as in outputs/first", "of first, step 2"):
        assert said in done.out
    shutil.copytree("outputs/again", "outputs/part")
    shutil.rmtree(source)
    shutil.rmtree("cache")
    assert "of first, step 2" in succeed("resume=outputs/part", "steps=4").out
    assert "again, resumed after step 2" in succeed(*command, "steps=4").out
    for run in ("part", "again"):
        config, record = config_of(run), json.loads(Path(f"outputs/{run}/run.json").read_text())["init_from"]
        assert (config["init_from"], config["optimizer.lr"], config["data.path"]) == (str(source), 1e-4, "two.txt")
        assert (config["recipe.context"], config["data.tokenizer"]) == (16, f"outputs/{run}/tokenizer")
        assert (record["run"], record["step"]) == ("first", 2)
        assert same_end("whole", run)
    for changed, message in {
        "recipe.context=8": "recipe.context was 16, now 8",
        "data.tokenizer=chars": "now chars",
        "run_name=third": "init_from=outputs/first: there is no such file or folder",
    }.items():
        refused = train(*command, "steps=6", changed)
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_a_run_of_adapters_is_resumed_bit_for_bit_and_merged_weights_are_where_the_next_one_starts(
    source: Path, succeed: Train
) -> None:
    new = (*SHORT, TEXT, "data.path=two.txt", "deterministic=true", "schedule=constant", "optimizer.lr=0.01")
    lora = ("recipe.lora.rank=2", "recipe.lora.dropout=0.1", "recipe.lora.target=[c_fc]")
    for run, steps in (("whole", 4), ("part", 2)):
        succeed("recipe=gpt2", f"init_from={source}", *lora, *new, f"run_name={run}", f"steps={steps}")
    shutil.rmtree(source)
    succeed("resume=outputs/part", "steps=4")
    assert same_end("whole", "part")
    merged = load_file("outputs/whole/best/model.safetensors")
    assert Path("outputs/whole/best/adapter/adapter_config.json").exists()
    for more in ((), ("recipe.lora.rank=3",)):
        trainer = trainer_of("recipe=gpt2", "init_from=outputs/whole", TEXT, "data.path=two.txt", *more)
        own = {name.replace(".base_layer", ""): tensor for name, tensor in trainer.model.gpt2.state_dict().items()}
        assert any(".lora_" in name for name in own) == bool(more)
        assert all(torch.equal(own[name][: len(tensor)], tensor) for name, tensor in merged.items())


def test_a_run_of_a_pretrained_folder_and_what_starts_from_it_are_resumed_without_the_folder(
    source: Path, train: Train, succeed: Train
) -> None:
    new = (*SHORT, TEXT, "data.path=two.txt")
    shutil.copytree(source / "best", "exported")
    jobs = {"opened": "init_from=exported", "next": "init_from=outputs/opened"}
    for run, origin in jobs.items():
        succeed("recipe=gpt2", origin, *new, f"run_name={run}")
    assert config_of("next")["recipe.pretrained"] == "outputs/opened/best"
    refused = train("recipe=gpt2", "init_from=outputs/opened/tokenizer", *new)
    assert (refused.code, "; set init_from=outputs/opened/best" in refused.err) == (2, True)
    shutil.rmtree("exported")
    Path("outputs/opened/best").rename("elsewhere")
    for run in jobs:
        assert "resumed after step 2" in succeed(f"resume=outputs/{run}", "steps=3").out


def test_the_learning_rate_is_that_of_fine_tuning_where_none_is_given(source: Path) -> None:
    new = ("recipe=gpt2", f"init_from={source}", TEXT, "data.path=two.txt")
    rates = {(): 1e-4, ("recipe.lora.rank=2",): 2e-4, ("optimizer.lr=3e-4",): 3e-4, ("optimizer=sgd",): 0.01}
    for more, rate in rates.items():
        assert plan_of(composed([*new, *more]), CPU).config.optimizer.lr == pytest.approx(rate)
    assert plan_of(composed(["recipe=gpt2"]), CPU).config.optimizer.lr == 1e-3


def test_a_stopped_run_gives_the_best_weights_of_its_checkpoints(source: Path, succeed: Train) -> None:
    more = ("steps=3", "eval_every=1", "checkpoint.keep=3", "schedule=constant")
    succeed("recipe=gpt2", f"init_from={source}", *SHORT, TEXT, "data.path=one.txt", *more, "run_name=stopped")
    run = Path("outputs/stopped")
    shutil.rmtree(run / "best")
    (run / "summary.json").unlink()
    for step, score in ((1, 3.0), (2, 1.0), (3, 2.0)):
        manifest = run / f"checkpoints/step-0000000{step}/manifest.json"
        write_manifest(manifest.parent, read_json(manifest) | {"score": score})
    expected = load(run / "checkpoints", 2).tensors()
    trainer = trainer_of("recipe=gpt2", f"init_from={run}", TEXT, "data.path=two.txt", "recipe.vocabulary_multiple=1")
    own, rows = trainer.model.state_dict(), trainer.datasets.vocabulary
    assert rows == len(own["gpt2.transformer.wte.weight"])
    for name, tensor in own.items():
        saved = expected.get(f"weights/{name}", expected["weights/gpt2.transformer.wte.weight"])
        assert torch.equal(tensor, saved[:rows] if name.endswith(("wte.weight", "lm_head.weight")) else saved)


def test_averaged_weights_are_the_same_from_an_export_and_from_a_checkpoint(succeed: Train, folder: Path) -> None:
    tiny = ("recipe=bignet", "data.samples=32", "profiler=none", *SHORT)
    succeed(*tiny, "recipe.width=8", "recipe.layers=2", "ema=default", "run_name=averaged")
    one = trainer_of(*tiny, "init_from=outputs/averaged").model.state_dict()
    shutil.rmtree("outputs/averaged/best")
    other = trainer_of(*tiny, "init_from=outputs/averaged").model.state_dict()
    last = load(Path("outputs/averaged/checkpoints")).tensors()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(torch.equal(one[name], last[f"weights/{name}"]) for name in one)


REFUSED = {
    "recipe=bignet": "init_from=outputs/first is a run of recipe=gpt2, not of recipe=bignet",
    "recipe=gpt2 recipe.size=mini": "recipe.size=mini, but the run init_from=outputs/first has recipe.size=nano",
    "recipe=gpt2 recipe.context=32": "recipe.context=32, but the run init_from=outputs/first has recipe.context=16",
    "recipe=gpt2 data=text data.path=two.txt data.tokenizer=chars": "data.tokenizer=chars, but the run",
    "recipe=gpt2 data=text data.path=two.txt data.vocab_size=512": "data.vocab_size=512 has no effect: outputs/first",
    "recipe=gpt2 data=hub data.name=two.txt data.vocab_size=4096": "data.vocab_size=4096 has no effect: outputs/first",
    "recipe=gpt2 recipe.pretrained=x": "; set init_from=x",
    "recipe=gpt2 data=synthetic data.vocab_size=90": "1 tensor of another shape (gpt2.transformer.wte.weight is 2",
    "recipe=gpt2 init_from=outputs/first/checkpoints/step-00000002": "is inside of a run",
    "recipe=gpt2 init_from=empty": "init_from=empty: the run has no weights",
    "recipe=gpt2 init_from=mlflow:123": "init_from=mlflow:123: ",
}


def test_what_does_not_fit_the_run_or_is_none_is_named(source: Path, train: Train) -> None:
    for options, message in REFUSED.items():
        with pytest.raises(UserError, match=re.escape(message)):
            start(composed([f"init_from={source}", "device=cpu", *options.split()]))
    refused = train("resume=outputs/first", f"init_from={source}")
    said = "cannot resume outputs/first: init_from was None, now outputs/first; "
    assert (refused.code, said in refused.err) == (2, True), refused.err


def test_a_damaged_config_is_refused_with_a_remedy_that_works(source: Path, train: Train) -> None:
    (source / "config.json").write_text("{")
    refused = train(f"resume={source}", "steps=4")
    assert refused.code == 2
    remedy = refused.err.partition("; set ")[2].strip()
    assert f"init_from={source / 'best'}" in remedy
    done = train(*shlex.split(remedy))
    assert done.code == 0, done.err
