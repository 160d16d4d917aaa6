"""A run that turns non-finite leaves what is needed to replay the step, and names the command that does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from evidence.doctor.replay import of_run
from tests.helpers import BIGNET, compose, fit, same_bits, trainer_of
from trainer.checkpoint import store
from trainer.checkpoint.reader import load
from trainer.data.contract import Batch
from trainer.errors import NonFiniteError
from trainer.files import read_object
from trainer.run import run as run_module
from trainer.run.run import Run
from trainer.run.start import train
from trainer.trainer import StepRecord

RUN = (
    *(*BIGNET, "micro_batch_size=2", "steps=8", "profiler=none", "tracking=local", "device=cpu"),
    *("eval_every=8", "log_every=4", "schedule=constant"),
)
NO_CHECKPOINT = (*RUN, "checkpoint=none")


class Poisoned(Run):
    """One target of step 3 is infinite."""

    bad: ClassVar[set[int]] = {3}

    def step(self, microbatches: list[Batch]) -> StepRecord:
        if self.trainer.step + 1 in self.bad:
            microbatches[1]["y"][0, 3] = torch.inf
        return super().step(microbatches)


class Skipping(Poisoned):
    bad: ClassVar[set[int]] = {2, 3}


def failed(folder: Path, *overrides: str, run: type[Run] = Poisoned) -> tuple[Path, dict[str, Any], str]:
    """The folder of a run that has failed, ``failure`` of its summary, and the message."""
    config = compose(*overrides, f"output_dir={folder}", "run_name=it")
    with pytest.raises(NonFiniteError) as raised:
        train(config, run_class=run)
    path = folder / "it"
    return path, read_object(path / "summary.json")["failure"], str(raised.value)


def test_the_step_and_the_command_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, failure, message = failed(Path("outputs"), *NO_CHECKPOINT)
    summary = read_object(run / "summary.json")
    assert (summary["status"], summary["step"]) == ("FAILED", 4)
    assert summary["error"].startswith("step 3: the gradients are not finite")
    assert "warning" not in capsys.readouterr().out
    assert message.startswith(f"{failure['message']}. No checkpoint was saved.\n")
    assert message.endswith("/scripts/doctor.py resume=outputs/it")
    assert failure.pop("message").startswith("step 3: the gradients are not finite (loss inf, gradient norm nan)")
    assert failure == {
        "step": 3,
        "loss": None,
        "loss_nonfinite": 1,
        "grad_norm": None,
        "grad_norm_nonfinite": 1,
        "loss_scale": 1.0,
        "rank": [0],
        "later_updates": 0,
        "checkpoint": "failure/step-00000002",
        "generators": "of step 4",
        "micro_batch_size": 2,
    }


@pytest.mark.parametrize(
    "mode", [("precision=bf16",), ("precision=fp16", "scaler.init=1024", "scaler.floor_scale=512")]
)
def test_the_weights_before_the_step_are_saved_where_there_is_no_checkpoint(
    mode: tuple[str, ...], tmp_path: Path
) -> None:
    """In fp16 the first of two overflows is skipped; the second, at the floor, ends the run."""
    folder, failure, _ = failed(tmp_path, *NO_CHECKPOINT, *mode, "log_every=1", run=Skipping)
    before, expected = failure["step"] - 1, trainer_of(*NO_CHECKPOINT, *mode)
    assert before == (2 if "precision=fp16" in mode else 1)
    assert failure["loss_scale"] == (512 if "precision=fp16" in mode else 1)
    fit(expected, 1)
    trainer, saved = trainer_of(*NO_CHECKPOINT, *mode), load(folder / "failure")
    trainer.restore(saved)
    assert (trainer.step, trainer.loss_scale.scale) == (before, failure["loss_scale"])
    assert saved.progress["monitor"]["totals"]["skipped_steps"] == before - 1
    assert same_bits(trainer.model.state_dict(), expected.model.state_dict())
    assert same_bits(trainer.optimizer.state_dict()["state"], expected.optimizer.state_dict()["state"])


def test_a_run_with_a_checkpoint_saves_no_other_and_forgets_the_failure_when_it_is_resumed(tmp_path: Path) -> None:
    every = (*RUN, "checkpoint.every=1")
    folder, failure, message = failed(tmp_path, *every)
    assert failure["step"] == 3
    assert (failure["checkpoint"], failure["generators"]) == (None, None)
    assert not (folder / "failure").exists()
    assert f"The last valid checkpoint is step 2, in {folder}/checkpoints\nFind the cause with:\n" in message
    summary = train(compose(*every, f"resume={folder}", f"output_dir={tmp_path}", "run_name=it")).summary
    assert (summary["status"], summary["failure"]) == ("FINISHED", None)


def test_weights_that_have_changed_since_are_not_saved(tmp_path: Path) -> None:
    """The host reads four steps at once: the run ends for the overflow in step 3, and step 4 was good."""
    fp16 = ("precision=fp16", "scaler=static", "scaler.scale=64", "scaler.max_consecutive_skips=1")
    folder, failure, _ = failed(tmp_path, *NO_CHECKPOINT, *fp16, run=Skipping)
    assert (failure["step"], failure["later_updates"], failure["checkpoint"]) == (3, 1, None)
    assert not (folder / "failure").exists()


def no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "warning"),
    [
        (store, "save_file", "the weights before step 3 were not saved ([Errno 28] No space left on device)"),
        (run_module, "record_failure", "the step that failed was not recorded ([Errno 28] No space left on device)"),
    ],
)
def test_a_full_disk_does_not_hide_the_failure(
    module: Any, name: str, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(module, name, no_space)
    folder, _, message = failed(tmp_path, *NO_CHECKPOINT)
    assert message.startswith("step 3: the gradients are not finite")
    assert f"warning: {warning}\n" in capsys.readouterr().out
    assert not (folder / "failure").exists() or list((folder / "failure").iterdir()) == []


class PoisonedLayer(Run):
    def step(self, microbatches: list[Batch]) -> StepRecord:
        if self.trainer.step == 1:
            layer = next(module for module in self.trainer.model.modules() if isinstance(module, nn.Conv2d))
            layer.register_forward_hook(lambda module, inputs, output: output * torch.nan)
        return super().step(microbatches)


def test_statistics_that_are_not_finite_do_not_keep_the_step_from_being_taken_again(tmp_path: Path) -> None:
    options = (
        *("recipe=resnet", "recipe.arch=resnet18", "recipe.image_size=32", "data=synthetic", "data.classes=4"),
        *("batch_size=2", "steps=2", "profiler=none", "tracking=local", "checkpoint=none", "device=cpu"),
    )
    folder, failure, _ = failed(tmp_path, *options, run=PoisonedLayer)
    saved = load(folder / "failure").tensors()
    assert not all(tensor.isfinite().all() for name, tensor in saved.items() if name.endswith("running_mean"))
    replay, _ = of_run(str(folder), [], 0)
    assert (replay.step.number, replay.began) == (failure["step"], failure["checkpoint"].removeprefix("failure/"))
