"""How a run ends: epochs=, early stopping, the best checkpoint, averaged weights, and the debug group."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes.bignet import BigNet
from recipes.data.images.folder import ImageFolder
from tests.command_line.conftest import BIGNET, Train, only_run
from tests.helpers import CPU, compose, same_bits, trainer_of
from trainer.checkpoint.reader import load
from trainer.checkpoint.store import Checkpoint
from trainer.config.settle import plan_of
from trainer.data.loader import DataOrder
from trainer.tracking.results import summary_lines
from trainer.trainer import Trainer

TINY = [*BIGNET, "batch_size=4", "micro_batch_size=2", "eval_samples=8",
        "tracking=local", "profiler=none", "eval_every=2"]  # fmt: skip
IMAGES = ["recipe=resnet", "recipe.arch=shufflenet_v2_x0_5", "data=imagefolder", "data.path=digits",
          "recipe.image_size=8", "batch_size=4", "eval_samples=8", "tracking=local",
          "loader.workers=0"]  # fmt: skip


def summary(folder: Path) -> Any:
    return json.loads((only_run(folder) / "summary.json").read_text())


@pytest.mark.usefixtures("user_data")
def test_epochs_count_the_steps_and_can_be_extended(succeed: Train, folder: Path) -> None:
    assert "epochs=0.5 of 20 samples" in succeed(*IMAGES, "epochs=0.5", "--why").out
    assert summary(folder)["step"] == 3  # 10 samples in batches of 4
    recorded = json.loads((only_run(folder) / "config.json").read_text())
    assert (recorded["steps"], recorded["epochs"]) == (3, None)
    succeed(f"resume={only_run(folder)}", "epochs=1")
    assert summary(folder)["step"] == 5


@pytest.mark.parametrize(("epochs", "batch"), [(20, 64), (1, 7), (0.5, 64), (2.5, 7), (500, 2000)])
def test_every_epoch_is_evaluated(epochs: float, batch: int) -> None:
    """After the step that has the last of its 1,442 samples, however many steps that are, and at the end."""
    sizes = (f"batch_size={batch}", "micro_batch_size=1", f"epochs={epochs}")
    plan = plan_of(compose("recipe=resnet", "data=digits", *sizes), CPU)
    ends = {math.ceil(1442 * number / batch) for number in range(1, math.floor(epochs) + 1)}
    assert plan.steps == math.ceil(1442 * epochs / batch)
    assert {step for step in range(1, plan.steps + 1) if plan.evaluates(step)} == ends | {plan.steps}
    assert (plan.evaluations, plan.eval_samples) == (len(ends | {plan.steps}), 355)
    assert plan_of(compose("recipe=resnet", *sizes[:2]), CPU).eval_samples == 10 * batch
    every = Checkpoint()
    saved = [step for step in range(1, plan.steps + 1) if every.due(step, plan.evaluates(step), plan.save_every)]
    assert set(saved) >= ends  # and long ones are saved in between
    assert max(np.diff([0, *saved], append=plan.steps)) <= max(25, plan.steps / 10)


def test_what_has_no_effect_is_said_at_the_start(succeed: Train) -> None:
    done = succeed(*TINY, "data.samples=8", "batch_size=16", "steps=4", "early_stopping.patience=1", "ema=default")
    assert "warning: batch_size=16 is more than the 8 training samples" in done.out
    assert "warning: early_stopping.patience=1 cannot end this run, which has 2 evaluations" in done.out
    assert "warning: " not in succeed(*TINY, "steps=6", "early_stopping.patience=1").out


def test_early_stopping_ends_the_run_with_its_best_weights(succeed: Train, folder: Path) -> None:
    done = succeed(*TINY, "optimizer.lr=1e-30", "early_stopping.patience=2", "steps=40")
    assert "stopped early: valid/loss has not been better than" in done.out
    found, run = summary(folder), only_run(folder)
    assert (found["status"], found["step"], found["steps"], found["best"]["step"]) == ("FINISHED", 6, 40, 2)
    assert "in the last 2 evaluations" in found["stopped_early"]
    assert (run / "best").is_dir()
    for changed, step in (
        ((), 6),
        (("early_stopping.patience=4",), 10),
        (("early_stopping.patience=null", "steps=12"), 12),
    ):
        succeed(f"resume={run}", *changed)
        assert summary(folder)["step"] == step


@pytest.mark.usefixtures("user_data")
def test_the_best_checkpoint_is_that_of_the_chosen_metric(succeed: Train, folder: Path) -> None:
    watched = ("metrics=[f1_macro,ece]", "early_stopping.patience=6", "early_stopping.metric=valid/ece")
    done = succeed(*IMAGES, "steps=6", "eval_every=1", "checkpoint.best=valid/f1_macro", *watched)
    assert "f1_macro" in done.out.partition("Done in")[2]
    run, best = only_run(folder), summary(folder)["best"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = {line["step"]: line["valid/f1_macro"] for line in lines if "valid/f1_macro" in line}
    assert best["value"] == max(values.values())
    assert best["step"] == min(step for step, value in values.items() if value == best["value"])
    assert (run / "checkpoints" / f"step-{best['step']:08d}").is_dir()


def test_one_batch_must_be_learnt(train: Train, succeed: Train, folder: Path) -> None:
    small = [*BIGNET, "profiler=none"]
    learnt = succeed(*small, "debug=overfit", "batch_size=2", "steps=60", "optimizer.lr=0.03")
    assert "debug=overfit: passed, the loss of one batch fell from " in learnt.out
    assert not (folder / "outputs" / "bignet-fp32-s0" / "checkpoints").exists()
    not_learnt = train(*small, "debug=overfit", "batch_size=2", "steps=3", "optimizer.lr=1e-30")
    assert not_learnt.code == 1
    assert "debug=overfit: after 3 steps on one batch the loss is" in not_learnt.err
    assert "debug.target=0.2" in not_learnt.err


def test_a_sweep_that_is_repeated_still_says_what_was_not_learnt(train: Train, folder: Path) -> None:
    """Without a checkpoint it is trained again; with one it is judged by the losses that were kept."""
    for kept in ("checkpoint=none", "checkpoint=default"):
        sweep = ("-m", *BIGNET, "profiler=none", "debug=overfit", "batch_size=2", "steps=3", "optimizer.lr=1e-30", kept)
        first = train(*sweep, "seed=0,1")
        assert first.code == 1
        summaries = [json.loads(path.read_text()) for path in (folder / "outputs").glob("*/summary.json")]
        assert [each["status"] for each in summaries] == ["FAILED", "FAILED"]
        again = train(*sweep, "seed=0,1")
        assert (again.code, again.err) == (1, first.err)
        assert len(os.listdir(folder / "outputs")) == (2 if kept == "checkpoint=default" else 4)
        shutil.rmtree(folder / "outputs")


def test_the_export_has_the_averages_of_the_best_step_in_fp32(succeed: Train, folder: Path) -> None:
    succeed(*TINY, "ema=default", "steps=8", "optimizer.lr=1", "precision=bf16_pure", "schedule=constant")
    run, step = only_run(folder), summary(folder)["best"]["step"]
    assert step < 8
    saved = load_file(run / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")
    exported = load_file(run / "best" / "model.safetensors")
    assert len(exported) == 4
    for name, tensor in exported.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[f"{name}.average"])


def test_the_export_has_the_frozen_weights(succeed: Train, folder: Path) -> None:
    job = (*TINY, "freeze=['0.0']", "precision=bf16_master", "steps=2")
    assert "144 parameters, 72 of them frozen" in succeed(*job).out
    best = load_file(only_run(folder) / "best" / "model.safetensors")
    torch.manual_seed(0)
    for name, first in compose(*job).recipe.build_model(None).state_dict().items():
        assert torch.equal(best[name].float(), first.bfloat16().float()) is name.startswith("0.0."), name


def test_an_export_that_is_killed_leaves_no_weights_to_be_sent(
    train: Train, succeed: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half of the new ones nor the old ones."""
    export = BigNet.export

    def killed(self: BigNet, model: Any, datasets: Any, folder: Path) -> None:
        export(self, model, datasets, folder)
        (folder / "model.safetensors").write_bytes(b"half")
        raise Killed

    class Killed(BaseException):
        pass

    succeed(*TINY, "steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(BigNet, "export", killed)
        with pytest.raises(Killed):
            train(f"resume={only_run(folder)}", "steps=4")
    assert not (only_run(folder) / "best").exists()
    succeed(f"resume={only_run(folder)}", "steps=4")
    assert load_file(only_run(folder) / "best" / "model.safetensors")
    assert not list(only_run(folder).glob(".*.partial"))


def test_the_test_text_is_evaluated_once_with_the_best_weights(
    train: Train, succeed: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a signal stopped that, and the run is resumed."""
    (folder / "notes.txt").write_text("the quick brown fox jumps over the dog. " * 60)
    (folder / "test.txt").write_text("a lazy dog sleeps under the tree. " * 20)
    text = ["recipe=gpt2", "recipe.size=nano", "recipe.context=8", "data=text", "data.path=notes.txt",
            "data.tokenizer=chars", "batch_size=4", "eval_samples=8", "steps=6", "eval_every=2", "optimizer.lr=0.05",
            "run_name=tested"]  # fmt: skip
    evaluate = Trainer.test
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", lambda *given: (signal.raise_signal(signal.SIGINT), evaluate(*given))[1])
        stopped = train(*text, "data.test=test.txt", "tracking=local")
    assert (stopped.code, stopped.err.partition(".")[0]) == (130, "stopped by SIGINT after step 6, saved")
    before, run = summary(folder), folder / "outputs" / "tested"
    assert "\n  test loss " in succeed(f"resume={run}").out
    found = summary(folder)
    assert before["units"] == found["units"] == 6 * 4 * 8
    assert found["wall_time_s"] > before["wall_time_s"] > before["train_time_s"] > 0
    assert found["test"].keys() == {"loss", "perplexity"}
    assert found["test"]["loss"] != found["final"]["valid/loss"]
    assert summary_lines(run / "metrics.jsonl", found)[0]["test_loss"] == found["test"]["loss"]
    trainer = trainer_of(*text, "data.test=test.txt")
    load(run / "checkpoints", found["best"]["step"]).restore(trainer.model, None)
    assert trainer.test() == found["test"]
    missing = train(*text, "data.test=nothing.txt")
    assert missing.code == 2
    assert "data.test=nothing.txt: there is no such file or folder" in missing.err


def test_the_last_weights_are_not_read_again_where_they_are_the_best(
    succeed: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trainer.run.export.load", lambda *_: 1 / 0)
        succeed(*TINY, "steps=4", "ema=default")
    run = only_run(folder)
    assert summary(folder)["best"]["step"] == 4
    before = load_file(run / "best" / "model.safetensors")
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: {"loss": 1e9})
    succeed(f"resume={run}", "steps=6")  # reads those of step 4
    assert summary(folder)["best"]["step"] == 4
    assert same_bits(before, load_file(run / "best" / "model.safetensors"))


@pytest.mark.usefixtures("user_data")
def test_a_damaged_photo_ends_the_run_saved_and_is_replaced_when_it_is_resumed(train: Train, folder: Path) -> None:
    options = [*IMAGES[:2], "data=imagefolder", "data.path=images", "recipe.image_size=32", "batch_size=2",
               "eval_samples=2", "eval_every=6", "steps=6", "deterministic=true", "tracking=local",
               "loader.workers=0"]  # fmt: skip
    training = ImageFolder(path="images").images(32).train
    order = [sample.index for sample in DataOrder(len(training), 0).samples(0, len(training))]
    position = max(order.index(index) for index in (1, 2, 4, 5, 7, 8))  # the others are in the data's fingerprint
    photo = folder / os.fsdecode(training.files[order[position]])
    photo.write_bytes(photo.read_bytes()[:200] + bytes(99) + photo.read_bytes()[299:])
    done = train(*options)
    assert done.code == 2
    assert f"{photo.relative_to(folder)} cannot be decoded" in done.err
    assert f"The last valid checkpoint is step {position // 2}, in" in done.err
    command = done.err.splitlines()[-1].split()[2:]
    assert train(*command, "data.on_error=skip", "loader.workers=1").code == 0
    resumed = only_run(folder)
    assert summary(folder)["unreadable_samples"] == 1
    resumed.rename(folder / "resumed")
    assert train(*options, "data.on_error=skip").code == 0
    one, other = (load(path / "checkpoints").tensors() for path in (folder / "resumed", only_run(folder)))
    assert same_bits(one, other)
