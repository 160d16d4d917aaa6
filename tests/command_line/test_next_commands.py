"""What a run prints to go on with is accepted as it stands, and is about the same run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence.comparison.command import planned
from tests.command_line.conftest import SMALLEST, Result, Train
from tests.command_line.mistakes import up_to_the_work
from tests.command_line.training.test_recipe_path import write
from tests.helpers import PROJECT
from trainer.config import external_recipes
from trainer.config.commands import new_run_command
from trainer.config.compose import compose
from trainer.config.registration import flatten, key_of
from trainer.run_folder import PATHS

FAST = ["steps=2", "batch_size=4", "eval_samples=4", "log_every=1", "profiler=none", "tracking=local"]
TEXT = ["recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=text", "data.path=my texts", *FAST]
RUNS = {
    "own": ["recipe_path=my recipes", "recipe=ownrecipe", "recipe.width=7", *FAST],
    "text": [*TEXT, "data.vocab_size=300", "precision=bf16", "precision.modules={ln_f:fp32}"],
    "tuned": [*TEXT, "init_from=outputs/text", "optimizer.lr=2e-4", "note=a 2nd, shorter one", "+tags.a=b"],
    "published": ["experiment=shakespeare_cpu", "data.path=my texts/a.txt", "recipe.context=16", *FAST],
}


@pytest.fixture
def runs(folder: Path, succeed: Train, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """``runs("tuned")``: trains it, and what it comes from."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(folder / "my recipes", "ownrecipe")
    (folder / "my texts").mkdir()
    for name in ("a", "b"):
        (folder / f"my texts/{name}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 99)

    def train(name: str) -> Result:
        if name == "tuned":
            succeed(*RUNS["text"], "run_name=text")
        return succeed(*RUNS[name], f"run_name={name}")

    return train


def typed(command: str) -> tuple[str, list[str]]:
    """The script and the arguments of a printed line."""
    python, script, *arguments = shlex.split(command)
    assert python == "python"
    assert Path(script).resolve().parent == PROJECT / "scripts"
    return Path(script).stem, arguments


@pytest.mark.parametrize("name", RUNS)
def test_the_commands_at_the_end_of_a_run_are_accepted_and_about_that_run(
    name: str,
    runs: Callable[[str], Result],
    script: Callable[..., Result],
    succeed: Train,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = dict(typed(line) for line in runs(name).out.splitlines() if line.startswith("python "))
    assert {"compare", "evaluate" if name == "own" else "generate"} == printed.keys()
    for command, arguments in printed.items():
        external_recipes._folder.clear()
        accepted = up_to_the_work([command, *arguments], script, monkeypatch)
        assert accepted.code == 0, accepted.err
    plan = planned(printed["compare"])
    same = next(arm for arm in plan.arms if arm.label == ("bf16" if name == "text" else "fp32"))
    compared, trained = options([*plan.common, *same.overrides]), options(RUNS[name])
    different = {key for key in trained if trained[key] != compared[key]}
    assert different <= {"profiler", "note", "tags"}

    # A new run is the earlier one, as it was resumed, but for what is changed, from any folder.
    succeed(f"resume=outputs/{name}", "steps=3")
    others = [each for each in RUNS[name] if each != "steps=2"]
    wanted = options([*others, f"run_name={name}", "steps=3", "optimizer.lr=0.5"])
    (elsewhere := folder.parent / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    script, arguments = typed(new_run_command(folder / "outputs" / name, ["optimizer.lr=0.5"]))
    assert script == "train"
    assert options(arguments) == wanted
    if name == "text":
        assert "steps=3" not in new_run_command(folder / "outputs" / name, ["epochs=2"])  # a run has one of them
    assert new_run_command(folder / "outputs" / name, ["precision=fp16", "scaler=none"]) == ""  # what is changed stays


def test_a_run_of_a_sweep_has_a_command_of_its_own_without_a_name_that_was_not_typed(
    succeed: Train, folder: Path
) -> None:
    succeed("-m", *SMALLEST, "steps=2", "seed=3,4", "tracking=local", "why=true")
    _, arguments = typed(new_run_command(folder / "outputs" / "bignet-fp32-s4"))
    assert arguments == [*SMALLEST, "steps=2", "seed=4", "tracking=local"]


def options(overrides: list[str]) -> dict[str, Any]:
    """What these overrides compose, with whole paths."""
    external_recipes._folder.clear()
    found = flatten(compose(overrides))
    return found | {key: str(path) for key in PATHS if found.get(key) and (path := Path(found[key]).resolve()).exists()}


@pytest.mark.parametrize(
    ("changed", "gone"),
    [(["scaler=dynamic", "scaler.init=32768"], {"scaler.scale"}), (["precision=bf16"], {"scaler", "scaler.scale"})],
)
def test_options_that_a_change_makes_meaningless_are_left_out(
    changed: list[str], gone: set[str], succeed: Train, folder: Path
) -> None:
    """As the doctor changes a run of a fixed loss scale."""
    typed_before = [*SMALLEST, "steps=2", "tracking=local", "precision=fp16", "scaler=static", "scaler.scale=1024"]
    succeed(*typed_before)
    _, arguments = typed(new_run_command(folder / "outputs/bignet-fp16-s0", changed))
    assert {*changed} <= {*arguments}
    assert {key_of(each) for each in typed_before} - {key_of(each) for each in arguments} == gone
