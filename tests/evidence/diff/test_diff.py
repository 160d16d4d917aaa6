"""Two real runs: what differs before their first step, where their logs part, and what may be called equal."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evidence.diff import command
from evidence.diff.command import main
from evidence.diff.replay import Parting
from evidence.diff.runs import Kept, before, kept
from tests.helpers import BIGNET, compose
from trainer.checkpoint.schema import read_manifest, write_manifest
from trainer.files import read_object, sha256, write_json
from trainer.run.start import train
from trainer.run_folder import RunFolder

RUN = (*BIGNET, "device=cpu", "eval_samples=4", "eval_every=2", "steps=4", "log_every=1", "profiler=none")
Said = Callable[..., tuple[int, str]]


def trained(folder: Path, name: str, *overrides: str) -> RunFolder:
    train(compose(*RUN, "tracking=local", "checkpoint.every=2", *overrides, f"output_dir={folder}", f"run_name={name}"))
    return RunFolder(folder / name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a and b of the same options."""
    folder = tmp_path_factory.mktemp("runs")
    for name in "ab":
        trained(folder, name)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    """Copies of a and b that a test may change."""
    return RunFolder(shutil.copytree(made / "a", tmp_path / "a")), RunFolder(
        shutil.copytree(made / "b", tmp_path / "b")
    )


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Returns the exit code, and what is printed, without a replay."""

    def of(*given: RunFolder | Path | str) -> tuple[int, str]:
        capsys.readouterr()
        code = main([*(str(getattr(each, "path", each)) for each in given), "replay=false"])
        return code, capsys.readouterr().out

    return of


def edited(run: RunFolder, step: int, **values: Any) -> None:
    """Change values of a step in a run's log."""
    path = run.path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(line["step"] == step and values.keys() <= line.keys() for line in lines)
    lines = [line | (values if line["step"] == step and values.keys() <= line.keys() else {}) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def logged(run: RunFolder, step: int, name: str) -> float:
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return next(float(line[name]) for line in lines if line["step"] == step and name in line)


def nudged(path: Path) -> str:
    """Change the last bit of one element in a file of tensors, and return the tensor's name."""
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float32)
    tensors[name].flatten()[0] = torch.nextafter(tensors[name].flatten()[0], torch.tensor(math.inf))
    save_file(tensors, path)
    return name


def test_two_runs_of_the_same_options_are_equal_bit_for_bit(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    before_it = {path: path.read_bytes() for run in runs for path in run.path.rglob("*") if path.is_file()}
    code, text = said(*runs)
    assert code == 0
    assert text.splitlines()[-1] == "equal bit for bit"
    assert "nothing that both record differs" in text
    assert "checkpoint 4: equal bit for bit" in text
    assert "loss, lr, grad_norm, loss_scale, skipped_steps, valid/loss at 4 steps, 1 to 4" in text
    after = {path: path.read_bytes() for run in runs for path in run.path.rglob("*") if path.is_file()}
    assert after == before_it


@pytest.mark.parametrize(
    ("override", "ordering", "making"),
    [
        ("seed=1", ["seed"], ["seed"]),
        ("recipe.layers=4", [], ["recipe.layers"]),
        ("data.samples=32", ["data training"], []),
    ],
)
def test_another_option_is_named_with_what_follows(
    override: str, ordering: list[str], making: list[str], made: Path, tmp_path: Path
) -> None:
    found = before(RunFolder(made / "a"), trained(tmp_path, "other", override))
    key, _, value = override.partition("=")
    row = next(row for row in found.rows if row.name == key)
    assert float(row.b) == float(value) != float(row.a)
    assert [row.name for row in found.rows if row.group == "options" and row.name != "micro_batch_size"] == [key]
    assert (sorted(found.ordering), found.making) == (sorted(ordering), making)
    assert {row.group for row in found.rows} <= {"options", "data"}


def test_where_results_go_is_no_difference(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    config = read_object(runs[1].path / "config.json")
    elsewhere = {"run_name": "x", "output_dir": "x", "note": "x", "quiet": True, "tags": {"x": 1}, "checkpoint.keep": 2}
    write_json(runs[1].path / "config.json", config | elsewhere)
    assert said(*runs) == (0, said(*runs)[1])
    assert not before(*runs).rows


def test_machine_versions_and_code_are_compared(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    a, b = runs
    summary = b.summary()
    summary["hardware"] |= {"name": "another CPU", "threads": 64, "memory_bytes": 1}
    summary["versions"] |= {"torch": "0.0"}
    summary |= {"processes": 2, "git": {"commit": "f" * 40, "dirty": "false"}}
    write_json(b.path / "summary.json", summary)
    precision = read_object(b.path / "precision.json")
    precision["effective"] |= {"kernels": "others", "matmul_tflops": {"fp32": 0.0}}
    write_json(b.path / "precision.json", precision)
    names = {row.name: row.b for row in before(a, b).rows}
    expected = {
        "processes": "2",
        "hardware name": "another CPU",
        "hardware threads": "64",
        "precision.json effective.kernels": "others",
        "version torch": "0.0",
        "code commit": "f" * 12,
    }
    assert {name: names[name] for name in expected} == expected
    assert names.keys() - expected.keys() <= {"code with changes"}
    code, text = said(*runs)
    assert (code, text.splitlines()[-1]) == (0, "equal in all that was compared")


def test_other_data_of_the_same_size_are_seen(runs: tuple[RunFolder, RunFolder]) -> None:
    tracked = read_object(runs[1].path / "tracking.json")
    tracked["datasets"][0]["digest"] = "f" * 32
    write_json(runs[1].path / "tracking.json", tracked)
    found = before(*runs)
    assert [row.name for row in found.rows] == found.ordering == ["data training"]


def test_another_commit_alone_leaves_them_equal_bit_for_bit(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    write_json(runs[1].path / "summary.json", runs[1].summary() | {"git": {"commit": "f" * 40, "dirty": "false"}})
    code, text = said(*runs)
    assert (code, text.splitlines()[-1]) == (0, "equal bit for bit")
    assert "code commit" in text


def test_a_run_that_was_killed_does_not_say_its_versions(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    (runs[1].path / "summary.json").unlink()
    assert before(*runs).unknown == {"version": ["b"]}
    code, text = said(*runs)
    assert (code, text.splitlines()[-1]) == (0, "equal in all that was compared")


def test_one_last_digit_in_the_log_is_found(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    edited(runs[1], 4, **{"valid/loss": math.nextafter(logged(runs[1], 4, "valid/loss"), 99)})
    code, text = said(*runs)
    assert code == 1
    assert "equal up to step 3, first different at step 4" in text
    assert "valid/loss " in text
    assert "at no step by more than 1e-3" in text
    assert "bit for bit" not in text


def test_runs_that_log_more_rarely_are_compared_where_both_log(made: Path, tmp_path: Path, said: Said) -> None:
    """The loss is a mean over the steps since the line before: of step 4 it is another one, and not compared."""
    code, text = said(made / "a", trained(tmp_path, "rare", "log_every=2"))
    assert (code, text.splitlines()[-1]) == (0, "equal in all that was compared")
    assert "only in a: 1 step of 4" in text
    assert "being means since then: loss" in text


def test_a_run_that_ended_earlier_is_equal_as_far_as_it_goes(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    path = runs[1].path / "metrics.jsonl"
    path.write_text(
        "".join(line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < 3)
    )
    code, text = said(*runs)
    assert code == 1
    assert "a ends at step 4, b at step 2" in text
    assert text.splitlines()[-1] == "equal as far as both go"


def test_weights_of_a_checkpoint_are_compared_to_the_last_bit(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    folder = runs[1].checkpoints / "step-00000004"
    name = nudged(folder / "model.safetensors")
    manifest = dict(read_manifest(folder))
    hashes = read_manifest(folder)["sha256"] | {"model.safetensors": sha256(folder / "model.safetensors")}
    write_manifest(folder, manifest | {"sha256": hashes})
    found = kept(*runs)
    assert found is not None
    assert found.differing == [f"weights/{name}"]
    code, text = said(*runs)
    assert code == 1
    assert "equal bit for bit" not in text


def test_without_checkpoints_the_best_weights_are_compared(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    shutil.rmtree(runs[1].checkpoints)
    assert (found := kept(*runs)) is not None
    assert found.differing == []
    assert said(*runs)[1].splitlines()[-1] == "equal bit for bit"
    name = nudged(runs[1].path / "best" / "model.safetensors")
    assert (found := kept(*runs)) is not None
    assert found.differing == [name]
    shutil.rmtree(runs[1].path / "best")
    assert kept(*runs) is None
    code, text = said(*runs)
    assert (code, text.splitlines()[-1]) == (0, "equal in all that was compared")


@pytest.mark.parametrize("lost", ["line", "checkpoint"])
def test_what_one_run_alone_has_is_not_called_equal_bit_for_bit(
    lost: str, runs: tuple[RunFolder, RunFolder], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lost == "checkpoint":  # the last common one is of an earlier step
        monkeypatch.setattr(command, "kept", lambda *_: Kept("weights", [], 2))
    path = runs[1].path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if lost == "line":
        rows = [row for row in rows if row["step"] != 3]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = said(*runs)
    assert (code, text.splitlines()[-1]) == (0, "equal in all that was compared")
    assert lost != "line" or "1 step of 4" in text


def test_a_damaged_checkpoint_is_not_called_equal(runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    nudged(runs[1].checkpoints / "step-00000004" / "model.safetensors")
    code, text = said(*runs)
    assert "weights: not compared (" in text
    assert "does not match its SHA-256" in text
    assert (code, text.splitlines()[-1]) == (0, "equal in all that was compared")


def test_the_replay_is_asked_for_the_first_step_that_differs(
    runs: tuple[RunFolder, RunFolder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def parting(_: RunFolder, __: RunFolder, step: int) -> Parting | str:
        asked.append(step)
        return "no reason" if len(asked) > 1 else Parting(step, "forward", "0.0", "aten.addmm")

    monkeypatch.setattr(command, "parting", parting)
    paths = [str(run.path) for run in runs]
    assert main(paths) == 0
    edited(runs[1], 3, loss=9.0)
    edited(runs[1], 4, loss=9.0)
    capsys.readouterr()
    assert main(paths) == 1
    assert "step 3, forward: 0.0, aten.addmm" in capsys.readouterr().out
    assert main(paths) == 1
    assert "not replayed: no reason" in capsys.readouterr().out
    assert asked == [3, 3]


def test_the_replay_is_asked_where_the_weights_alone_differ(
    runs: tuple[RunFolder, RunFolder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "kept", lambda *_: Kept("weights", ["x"], 4))
    monkeypatch.setattr(command, "parting", lambda _, __, step: Parting(step))
    capsys.readouterr()
    assert main([str(run.path) for run in runs]) == 1
    text = capsys.readouterr().out
    assert "no result parts up to step 4" in text
    assert "do not show what parted" in text


def test_an_evaluation_that_differs_alone_is_said(
    runs: tuple[RunFolder, RunFolder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "parting", lambda _, __, step: Parting(step))
    edited(runs[1], 2, **{"valid/loss": 9.0})
    capsys.readouterr()
    assert main([str(run.path) for run in runs]) == 1
    assert "of the evaluation, which is not replayed" in capsys.readouterr().out


def test_first_weights_are_built_where_an_option_makes_them(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they differ, a replay has nothing to add."""
    other = trained(tmp_path, "other", "seed=1")
    monkeypatch.setattr(command, "parting", None)
    capsys.readouterr()
    assert main([str(made / "a"), str(other.path)]) == 1
    assert "step 1, weights: 0.0.weight" in capsys.readouterr().out
    # The logs may be equal all the same, as those of one step without an evaluation.
    shutil.copy(made / "a" / "metrics.jsonl", other.path)
    for folder in ("checkpoints", "best"):
        shutil.rmtree(other.path / folder)
    assert main([str(made / "a"), str(other.path)]) == 1
    assert "equal in all" not in capsys.readouterr().out


def test_two_logs(tmp_path: Path, runs: tuple[RunFolder, RunFolder], said: Said) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.jsonl"
    a.write_text("step,loss\n1,2.5\n2,2\n")
    b.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2}\n')
    assert said(a, b)[0] == 0
    b.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.1}\n')
    assert said(a, b)[0] == 1
    assert said(runs[0].path / "metrics.jsonl", runs[1].path / "metrics.jsonl")[0] == 0
