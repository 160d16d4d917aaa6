"""``resume=FOLDER`` alone continues with the recorded config; other overrides are checked against it."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mantissa
from inference.load import open_exported
from tests.command_line.conftest import Train
from trainer.config.compose import compose
from trainer.config.registration import flatten
from trainer.errors import UserError
from trainer.files import read_json_lines, read_object
from trainer.run import start
from trainer.run_folder import RunFolder

# Options of groups other than the default ones, lists, dictionaries and text that Hydra would read as something else.
RUN = [
    "recipe=bignet", "recipe.width=16", "recipe.layers=2", "precision=fp16", "precision.modules={*.0:fp32}",
    "scaler=dynamic", "scaler.interval=3", "optimizer=sgd", "optimizer.options={momentum:0.5,nesterov:false}",
    "schedule=wsd", "clip=value", "batch_size=4", "micro_batch_size=2", "eval_samples=4", "eval_every=2", "log_every=1",
    "steps=4", "seed=3", "deterministic=true", "tracking=local", "loader=plain", "checkpoint.keep=5", "run_name='1e3'",
]  # fmt: skip


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def recorded(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "config.json").read_text())
    return content


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Filled by the first test: a run of four steps, and the same one of eight."""
    return {"": tmp_path_factory.mktemp("runs")}


@pytest.fixture
def run(runs: dict[str, Path], succeed: Train, folder: Path) -> Path:
    """A copy of the run of four steps, in ``elsewhere/1e3``."""
    if "four" not in runs:
        for name, steps in (("four", 4), ("eight", 8)):
            succeed(*RUN, f"steps={steps}", f"output_dir={runs['']}/{name}")
            runs[name] = runs[""] / name / "1e3"
    return Path(shutil.copytree(runs["four"], folder / "elsewhere" / "1e3"))


def test_the_folder_alone_is_enough(run: Path, runs: dict[str, Path], succeed: Train) -> None:
    before = recorded(run)
    # The schedule depends on the number of steps, so this is not the run of eight from the start.
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(runs["eight"] / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000004")
    shutil.copy(runs["eight"] / "metrics.jsonl", run / "metrics.jsonl")
    agree = ("recipe.width=16", "optimizer.name=SGD", "scaler=dynamic", "scaler.interval=3", "seed=3")
    free_to_change = ("steps=8", "log_every=2", "profiler=none", "tracking.upload_timeout_s=7")
    done = succeed("resume=elsewhere/1e3", *agree, *free_to_change)
    assert "resumed after step 4" in done.out
    assert weights(run, 8) == weights(runs["eight"], 8)
    changed = {key for key, value in before.items() if recorded(run).get(key, "gone") != value}
    free = {"steps", "log_every", "profiler", "tracking.upload_timeout_s", "output_dir", "resume"}
    assert {key for key in changed if not key.startswith("profiler.")} == free


def test_a_folder_that_is_called_latest_is_a_folder(run: Path, succeed: Train) -> None:
    Path("latest").symlink_to(run)
    assert "latest is already complete" in succeed("resume=latest").out


def test_without_a_checkpoint_no_options_continue_a_run(run: Path, train: Train) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "best")
    assert "holds no checkpoint to resume from; start without resume=" in train("resume=elsewhere/1e3", "seed=4").err


def test_a_run_that_another_process_ends_before_this_one_has_it_is_complete(
    run: Path, succeed: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = (run / "summary.json").read_text()
    (run / "summary.json").unlink()

    @contextmanager
    def ended_before(folder: Path) -> Iterator[None]:
        (run / "summary.json").write_text(summary)
        yield

    monkeypatch.setattr(start, "in_use", ended_before)
    assert "elsewhere/1e3 is already complete (4 steps)" in succeed("resume=elsewhere/1e3").out


def test_what_would_be_another_run_is_refused(run: Path, train: Train) -> None:
    """By the choices of groups and what they bring; single keys are in tests/trainer/run/test_folder.py."""
    for typed, reported in {
        "seed=4": "seed was 3, now 4",
        "precision=fp32 scaler=auto": "precision.mode was fp16, now fp32",
        "recipe=resnet": "recipe was bignet, now resnet",
        "recipe=bignet": "recipe.width was 16, now 1000",
        "optimizer=adamw": "optimizer.name was SGD, now AdamW",
        "optimizer.options.momentum=0.9": "optimizer.options was {'momentum': 0.5, 'nesterov': False}, now",
        "scaler=static": "scaler was dynamic, now static",
        "experiment=amp_mlp": "recipe.layers was 2, now 3",
        "recipe.arch=resnet18": "recipe.arch is an option of recipe=resnet alone",
        "-m": "continues one run, but -m starts several; leave",
    }.items():
        done = train(*typed.split(), "resume=elsewhere/1e3", "steps=8")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert reported in done.err
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1] == "step-00000004"


def test_a_refused_resume_says_how_to_go_on_with_or_without_the_change(run: Path, train: Train) -> None:
    done = train("precision=bf16", "scaler=auto", "resume=elsewhere/1e3", "steps=8")
    kept, new = done.err.strip().rpartition("; set ")[2].split(" or ")
    assert kept == "resume=elsewhere/1e3"
    before, now = recorded(run), flatten(compose(shlex.split(new)))
    wanted = {"precision.mode": "bf16", "scaler": "auto", "init_from": "elsewhere/1e3", "steps": 8, "resume": None}
    wanted |= {key: before[key] for key in ("recipe", "recipe.width", "optimizer.lr", "seed")}
    assert {key: now[key] for key in wanted} == wanted


def test_a_record_that_was_edited_is_refused(run: Path, train: Train, succeed: Train) -> None:
    before = (run / "config.json").read_text()
    (run / "config.json").write_text(before.replace('"seed": 3', '"seed": 5'))
    refused = train("resume=elsewhere/1e3", "steps=8")
    assert (refused.code, "seed is 5, and was 3; put back what it was" in refused.err) == (2, True), refused.err
    (run / "config.json").write_text(before)
    succeed("resume=elsewhere/1e3", "steps=8")


@pytest.mark.parametrize("inner", ["checkpoints", "checkpoints/step-00000004", "best"])
def test_a_folder_in_a_run_names_the_run(inner: str, run: Path, train: Train, succeed: Train) -> None:
    refused = train(f"resume={run / inner}")
    assert refused.code == 2
    succeed(*shlex.split(refused.err.strip().rpartition("; set ")[2]))


def test_a_run_that_is_suggested_can_be_resumed(run: Path, train: Train) -> None:
    shutil.copytree(run, "elsewhere/newer", ignore=shutil.ignore_patterns("checkpoints"))
    for given in ("elsewhere", "elsewhere/typo"):
        assert train(f"resume={given}").err.endswith(", such as elsewhere/1e3\n")


@pytest.mark.parametrize("edit", ["removed", "damaged"])
def test_without_a_checkpoint_a_new_run_begins_from_the_best_weights(
    edit: str, run: Path, train: Train, succeed: Train
) -> None:
    if edit == "removed":
        shutil.rmtree(run / "checkpoints")
    else:
        for file in run.glob("checkpoints/*/model.safetensors"):
            file.write_bytes(b"")
    refused = train("resume=elsewhere/1e3", "steps=8")
    assert refused.code == 2
    typed = shlex.split(refused.err.strip().rpartition("; set ")[2])
    assert {"init_from=elsewhere/1e3/best", "steps=8", "recipe.width=16"} <= {*typed}
    succeed(*typed)


@pytest.mark.parametrize("part", ["", "config.json"])
def test_an_export_that_was_removed_comes_back(run: Path, succeed: Train, part: str) -> None:
    def exported() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (run / "best").iterdir()}

    before, best = exported(), read_object(run / "summary.json")["best"]
    if part:
        (run / "best" / part).unlink()
    else:
        shutil.rmtree(run / "best")
    with pytest.raises(UserError, match=r"it had them when it ended.*\n.* resume=elsewhere/1e3$"):
        open_exported("elsewhere/1e3", Path("elsewhere/1e3"))
    succeed("resume=elsewhere/1e3")
    assert (exported(), read_object(run / "summary.json")["best"]) == (before, best)
    assert "is already complete" in succeed("resume=elsewhere/1e3").out


def test_a_stopped_run_that_has_taken_more_steps_says_how_many(run: Path, train: Train) -> None:
    (run / "summary.json").unlink()
    done = train("resume=elsewhere/1e3", "steps=2")
    assert (done.code, done.out) == (2, "")
    assert "steps=2, but elsewhere/1e3 was stopped after step 4, and takes as many or more; set steps=4" in done.err


def test_a_record_of_another_version_is_no_traceback(run: Path, train: Train) -> None:
    before = recorded(run)
    for change, reported in (
        ({"recipe": "gone"}, "there is no recipe=gone"),
        ({"recipe.gone": 1}, "recipe.gone is not a key of the config"),
        ({"recipe.width": {"a": [1]}}, "recipe.width"),
        ({"clip": 5}, "there is no clip=5"),
    ):
        RunFolder(run).write_config(before | change)
        done = train("resume=elsewhere/1e3", "steps=8")
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert reported in done.err
        assert f"was written by version {mantissa.__version__}, whose options are not those of this" in done.err
        assert "a new run can start from its weights" in done.err
    (run / "run.json").unlink()  # as the versions before left it
    assert "was written by an earlier version, whose" in train("resume=elsewhere/1e3", "steps=8").err


def move_and_link(path: Path) -> None:
    path.rename(path.parents[1] / "another disk")
    path.symlink_to(path.parents[1] / "another disk")


EDITS: dict[str, tuple[Callable[[Path], object], int]] = {
    "emptied": (lambda run: (run / "metrics.jsonl").write_bytes(b""), 4),
    "no history": (lambda run: (run / "metrics.jsonl").unlink(), 4),
    "cut": (lambda run: os.truncate(run / "metrics.jsonl", 200), 4),
    "linked": (lambda run: move_and_link(run / "checkpoints"), 4),
    "damaged": (lambda run: os.truncate(run / "checkpoints/step-00000004/rng.safetensors", 99), 2),
}
"""What the owner of a run folder, or a disk, may do to it; and the step that the run continues from."""


@pytest.mark.parametrize("edit", EDITS)
def test_a_run_continues_after_its_owners_edits(edit: str, run: Path, succeed: Train) -> None:
    apply, step = EDITS[edit]
    apply(run)
    kept = (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0
    done = succeed("resume=elsewhere/1e3", "steps=6")
    assert f"resumed after step {step}" in done.out
    assert ("step 2, before it, is whole and is taken" in done.out) == (edit == "damaged")
    losses = [line["step"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line]
    assert losses == ([1, 2, 3, 4, 5, 6] if kept > 4 else [*range(1, kept + 1), 5, 6])
    assert (run / "checkpoints" / "step-00000006").is_dir()


def test_a_kill_before_the_first_checkpoint_of_a_resumed_run_refuses_nothing(
    run: Path, train: Train, succeed: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config differs from that of the checkpoint: before, after, and twice."""

    def killed(*of: object) -> None:
        raise SystemExit("killed")

    before, after = "trainer.run_folder.RunFolder.write_config", "trainer.run.report.show_start"
    for place, option in ((before, "loader=pinned"), (after, "loader=pinned"), (after, "checkpoint.keep=9")):
        with monkeypatch.context() as patch:
            patch.setattr(place, killed)
            with pytest.raises(SystemExit):
                train("resume=elsewhere/1e3", "steps=8", option)
    assert recorded(run)["checkpoint.keep"] == 9
    succeed("resume=elsewhere/1e3")
    assert recorded(run)["steps"] == 8


def test_the_printed_command_resumes_a_folder_of_any_name(
    run: Path, train: Train, succeed: Train, folder: Path
) -> None:
    odd = "it's mein Ordner ü, (a=b)"
    (folder / "elsewhere").rename(folder / odd)
    summary = json.loads((folder / odd / "1e3" / "summary.json").read_text())
    assert shlex.split(summary["resume"])[-1].startswith("resume=")
    quoted = f"resume='{odd}/1e3'".replace("t's", "t\\'s")
    succeed(quoted, "steps=5")
    command = json.loads((folder / odd / "1e3" / "summary.json").read_text())["resume"]
    assert shlex.split(command) == ["python", "scripts/train.py", quoted]
    assert "already complete (5 steps)" in train(*shlex.split(command)[2:]).out


@pytest.mark.parametrize("place", ["config.json", "tokenizer", ".lock"])
def test_a_full_disk_at_the_start_is_one_sentence(
    place: str, train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def full(path: Any, *rest: Any, **given: Any) -> int:
        if place in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *rest, **given)

    monkeypatch.setattr(os, "open", full)
    if place == "tokenizer":
        monkeypatch.setattr("trainer.data.contract.Datasets.keep", lambda self, folder: full(place))
    done = train(*RUN)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "output_dir=outputs cannot be written (No space left on device); free disk space, or choose" in done.err
