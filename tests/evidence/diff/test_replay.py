"""Two recorded runs are replayed, and what is another one in the second is found where it is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evidence.diff.replay import Parting, first_weights, parting
from tests.evidence.diff.parts import Model
from trainer.config import external_recipes
from trainer.config.compose import compose
from trainer.files import read_json, write_json
from trainer.optim.update import Update
from trainer.precision import kernels
from trainer.run.start import train
from trainer.run_folder import RunFolder

OWN = Path(__file__).parent / "own"
OPTIONS = (
    *("recipe=partingrecipe", f"recipe_path={OWN}", "device=cpu", "tracking=local", "profiler=none", "quiet=true"),
    *("steps=4", "log_every=1", "eval_every=2", "checkpoint.keep=5", "schedule=constant", "optimizer.lr=0.01"),
)

Trained = Callable[..., RunFolder]


@pytest.fixture(scope="module", autouse=True)
def own_recipes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(external_recipes, "_folder", [])
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a run with further options, once."""
    runs: dict[tuple[str, ...], RunFolder] = {}

    def run(*options: str) -> RunFolder:
        if options not in runs:
            folder = tmp_path_factory.mktemp("runs")
            replaced = {option.partition("=")[0] for option in options}
            kept = [option for option in OPTIONS if option.partition("=")[0] not in replaced]
            train(compose([*kept, *options, f"output_dir={folder}", "run_name=it"]))
            runs[options] = RunFolder(folder / "it")
        return runs[options]

    return run


def found(a: RunFolder, b: RunFolder, step: int = 4) -> Parting:
    parts = parting(a, b, step)
    assert isinstance(parts, Parting), parts
    return parts


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ("operator", ("forward", "blocks.1", "aten.mul")),
        ("backward", ("backward", "blocks.1", "aten.mul")),
        ("draw", ("forward", "blocks.0.dropout", "aten.bernoulli_")),
        ("loss", ("forward", "(loss)", "aten.add")),
        ("buffer", ("weights", "scale", "")),
        ("data", ("data", "x", "")),
    ],
)
def test_a_change_is_found_where_it_is(change: str, place: tuple[str, str, str], trained: Trained) -> None:
    parts = found(trained(), trained(f"recipe.change={change}"), 1)
    assert (parts.step, parts.stage, parts.name, parts.op) == (1, *place), parts.lines()
    assert parts.difference is not None
    assert parts.difference.elements


@pytest.mark.parametrize("step", [1, 3])
def test_equal_runs_part_nowhere(step: int, trained: Trained) -> None:
    parts = found(trained(), trained("note=again"), step)
    assert (parts.step, parts.stage, parts.difference) == (step, "", None)
    assert "a's loss at step" in parts.lines()[1]
    assert "logged " not in parts.lines()[1].replace("as logged", "")


@pytest.mark.parametrize(
    ("option", "step", "name"),
    [
        ("optimizer.lr=0.02", 1, "blocks.0.norm.weight"),
        ("schedule=cosine", 2, "blocks.0.norm.weight"),  # the rate of the first step is the same
        ("optimizer.weight_decay=0.5", 1, "blocks.0.layer.weight"),  # norms have none
        ("optimizer.options.amsgrad=true", 1, "blocks.0.layer.weight.max_exp_avg_sq"),  # the weights are equal
    ],
)
def test_another_update_parts_after_equal_gradients(option: str, step: int, name: str, trained: Trained) -> None:
    parts = found(trained(), trained(option), 3)
    assert (parts.step, parts.stage, parts.name, parts.op) == (step, "update", name, ""), parts.lines()
    assert ("the learning rates are 0.01 and" in parts.why) == ("lr" in option or "schedule" in option)


def test_formats_part_at_the_first_product(trained: Trained) -> None:
    odd = ("batch_size=3", "micro_batch_size=3")  # in 16 bits the loss is divided by 4, and corrected
    parts = found(trained("precision=bf16", *odd), trained(*odd), 1)
    assert parts.lines()[1].count("as logged") == 2
    assert (parts.step, parts.stage, parts.name, parts.op) == (1, "forward", "blocks.0.layer", "aten.addmm")
    assert parts.difference is not None
    assert parts.difference.formats == "bf16 against fp32"
    assert 0 < parts.difference.relative < 2**-7
    assert 0 < parts.difference.largest < 0.1


def test_each_step_is_computed_in_the_setting_of_its_run(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes, with the same random numbers each time they are taken, and its update."""
    a = trained("precision=bf16", "precision.kernels=fp32", "deterministic=true")
    b = trained("precision=bf16", "precision.kernels=native", "recipe.change=operator")
    equal = trained("deterministic=true"), trained()
    settings, states = list[tuple[bool, bool]](), list[Tensor]()
    updates, forward, apply = list[bool](), Model.forward, Update.apply

    def passing(model: Model, x: Tensor) -> Tensor:
        settings.append((kernels.in_use(torch.bfloat16), torch.are_deterministic_algorithms_enabled()))
        states.append(torch.get_rng_state())
        return forward(model, x)

    def applying(update: Update, skipped: Tensor) -> None:
        updates.append(torch.are_deterministic_algorithms_enabled())
        apply(update, skipped)

    monkeypatch.setattr(Model, "forward", passing)
    monkeypatch.setattr(Update, "apply", applying)
    parts = found(a, b, 1)
    assert parts.stage == "forward"
    assert parts.lines()[1].count("as logged") == 2
    assert len(settings) >= 6  # taken, recorded, probed
    assert settings == [(True, True), (False, False)] * (len(settings) // 2)
    assert all(torch.equal(state, states[0]) for state in states)
    assert updates == []
    found(*equal, 1)
    assert updates == [True, False]


def test_microbatches_that_differ_are_said(trained: Trained) -> None:
    parts = found(trained(), trained("micro_batch_size=2"))
    assert (parts.stage, parts.why) == ("data", "it is split into 1 microbatch against 2")
    assert "log" not in parts.lines()[1]  # no loss was replayed


def test_another_seed_has_other_first_weights(trained: Trained) -> None:
    runs = trained(), trained("seed=1")
    for parts in (found(*runs), first_weights(*runs)):
        assert isinstance(parts, Parting)
        assert (parts.step, parts.stage, parts.name) == (1, "weights", "blocks.0.layer.weight"), parts.lines()
    same = first_weights(trained(), trained("optimizer.lr=0.02"))
    assert isinstance(same, Parting)
    assert not same.stage


def test_a_replay_begins_at_the_last_equal_checkpoint(trained: Trained, tmp_path: Path) -> None:
    runs = trained(), trained("schedule=cosine")  # which part in the update of step 2
    kept = [RunFolder(Path(shutil.copytree(run.path, tmp_path / str(place)))) for place, run in enumerate(runs)]
    parts = found(*kept)
    assert (parts.step, parts.stage) == (2, "update")
    assert "from the beginning" in parts.lines()[1]  # those of steps 2 and 4 differ already
    # As a resumed run whose rate was changed: step 2 is common, and both part in the next update.
    resumed = RunFolder(Path(shutil.copytree(runs[0].path, tmp_path / "resumed")))
    config = read_json(resumed.path / "config.json")
    write_json(resumed.path / "config.json", config | {"optimizer.lr": 0.02})
    for number in (4,):
        shutil.rmtree(resumed.checkpoints / f"step-{number:08d}", ignore_errors=True)
    parts = found(runs[0], resumed)
    assert (parts.step, parts.stage) == (3, "update")
    assert "replayed 1 step of each run from step-00000002" in parts.lines()[1]


def test_a_replay_that_is_not_the_run_says_so(trained: Trained, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(trained().path, tmp_path / "it")))
    log = run.path / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0]["loss"] += 1
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    parts = found(run, trained("optimizer.lr=0.02"))
    assert parts.lines()[1].count("(logged ") == 1


def test_what_a_replayed_step_raises_is_a_sentence(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        raise ValueError("no such rows\nand more")

    runs = trained(), trained("optimizer.lr=0.02")
    monkeypatch.setattr(Model, "forward", forward)
    assert parting(*runs, 1) == "ValueError: no such rows"

    def out_of_memory(model: Model, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Model, "forward", out_of_memory)
    assert parting(*runs, 1) == "both together do not fit into the memory of this machine"


def test_runs_of_several_processes_or_another_device_are_not_replayed(trained: Trained, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(trained().path, tmp_path / "it")))
    summary = run.summary()
    write_json(run.path / "summary.json", summary | {"processes": 2})
    said = parting(trained(), run, 1)
    assert isinstance(said, str)
    assert "is of 2 processes, and a replay has one" in said
    write_json(run.path / "summary.json", summary)
    precision = read_json(run.path / "precision.json")
    precision["effective"]["device"] = "mps:0"
    write_json(run.path / "precision.json", precision)
    said = first_weights(run, trained())
    assert isinstance(said, str)
    assert "device=mps" in said


def test_nothing_is_written_and_the_process_computes_as_before(trained: Trained) -> None:
    runs = trained("precision=bf16", "precision.kernels=fp32", "deterministic=true"), trained("seed=1")
    files = {file: file.read_bytes() for run in runs for file in run.path.rglob("*") if file.is_file()}
    kernels.clear()
    kernels.use(torch.float16, kernels.WIDE)
    torch.use_deterministic_algorithms(False)
    generator = torch.get_rng_state()
    found(*runs)
    assert {file: file.read_bytes() for run in runs for file in run.path.rglob("*") if file.is_file()} == files
    assert (kernels.in_use(torch.float16), kernels.in_use(torch.bfloat16)) == (True, False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), generator)
