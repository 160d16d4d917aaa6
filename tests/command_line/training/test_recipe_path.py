"""Recipes that are not in the project's folder: those of ``recipe_path``."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest

from inference.evaluate import evaluate
from tests.command_line.conftest import Result, Train, only_run
from tests.helpers import PROJECT
from trainer.config import external_recipes, options
from trainer.files import read_object

RECIPE = """
from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from trainer.data.contract import Datasets
from trainer.recipe import LossOutput, Recipe, Sizes
{imports}

class Rows:
    def __init__(self, count):
        self.x = torch.arange(count * 1.0).reshape(-1, 1) / count

    def __len__(self):
        return len(self.x)

    def batch(self, samples):
        return {{"x": self.x[[sample.index for sample in samples]]}}


@dataclass
class {name}(Recipe):
    name: ClassVar[str] = "{name}"
    width: int = {width}

    def sizes(self, hardware):
        return Sizes(4, 4, 4)

    def datasets(self, data, seed):
        return Datasets(Rows(8), Rows(4), "rows")

    def build_model(self, datasets):
        return nn.Sequential(nn.Linear(1, self.width), nn.Linear(self.width, 1))

    def count_targets(self, batch):
        return len(batch["x"])

    def loss(self, model, batch):
        return LossOutput((model(batch["x"]).float() - batch["x"]).square().sum(), {{}})
"""
FAST = ("device=cpu", "checkpoint.keep=1", "tracking=local")


def write(folder: Path, name: str, width: str = "3", imports: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(RECIPE.format(name=name, width=width, imports=imports))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(external_recipes, "_folder", [])


def test_a_recipe_without_yaml_is_found_resumed_and_evaluated(
    folder: Path, succeed: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "my own", "plainrecipe", "WIDTH // 2\n    act: Act = Act.relu", "from sizes import Act, WIDTH\n")
    (folder / "my own" / "sizes.py").write_text("import enum\nWIDTH = 6\nAct = enum.Enum('Act', 'relu gelu')\n")
    for name in ("json", "my-notes", "a.b"):  # no recipes
        (folder / "my own" / f"{name}.py").write_text("x = 1\n")
    (folder / "my own" / "draft.py").write_text("x = (\n")
    (folder / "my own" / "binary.py").write_bytes(b"\0\xff")
    assert "\n  plainrecipe " in succeed("--help", "recipe_path=my own").out
    assert "recipe.act: relu | gelu = relu" in succeed("--help", "recipe_path=my own", "recipe=plainrecipe").out
    succeed("recipe_path=my own", "recipe=plainrecipe", "recipe.act=gelu", *FAST)
    run = only_run(folder)
    config = read_object(run / "config.json")
    assert (config["data"], config["recipe.width"], config["recipe_path"]) == ("own", 3, str(folder / "my own"))
    assert config["recipe.act"] == read_object(run / "best" / "config.json")["options"]["act"] == "gelu"
    (elsewhere := folder.parent / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    external_recipes._folder.clear()
    succeed(f"resume={run}", "steps=6")
    assert read_object(run / "summary.json")["step"] == 6
    external_recipes._folder.clear()
    assert options.run(evaluate, None, [f"run={run}"]) == 0
    assert "loss" in capsys.readouterr().out


def test_yaml_beside_the_recipe_composes_with_the_projects(folder: Path, succeed: Train, train: Train) -> None:
    write(folder / "mine", "withyaml")
    recipe, experiment = folder / "mine/conf/recipe/withyaml.yaml", folder / "mine/conf/experiment/wide.yaml"
    for path, text in (
        (recipe, "defaults:\n  - withyaml_schema@recipe\n  - override /data: own\n  - _self_\nsteps: 5\n"),
        (experiment, "defaults:\n  - override /recipe: withyaml\n  - _self_\nrecipe:\n  width: 7\n"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(f"# @package _global_\n{text}")
    succeed("recipe_path=mine", "experiment=wide", "optimizer=sgd", *FAST)
    config = read_object(only_run(folder) / "config.json")
    assert (config["recipe"], config["recipe.width"], config["steps"]) == ("withyaml", 7, 5)
    experiment.write_text("# @package _global_\ndefaults:\n  - override /optimizer: sgdd\n")
    assert "there is no optimizer/sgdd (adafactor, " in train("recipe_path=mine", "experiment=wide").err
    assert "; set recipe=withyaml" in train("recipe_path=mine", "recipe=withyalm").err
    assert "; set recipe.width=1" in train("recipe_path=mine", "recipe=withyaml", "recipe.widht=1").err


@pytest.mark.parametrize(("group", "lines"), [("recipe", "[barerecipe_schema@recipe, "), ("data", "[own_schema or ")])
def test_a_yaml_without_its_schema_is_told_its_first_lines(folder: Path, train: Train, group: str, lines: str) -> None:
    name = f"bare{group}"
    write(folder / "mine", name)
    file = folder / f"mine/conf/{group}/{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("width: 3\n")
    refused = train("recipe_path=mine", f"recipe={name}", f"{group}={name}")
    assert f"{file} lacks its schema: begin with" in refused.err
    assert f"defaults: {lines}" in refused.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# @package _global_\ndefaults: [override /compile: off, _self_]\n", "write off and on in quotes"),
        ("# @package _global_\nprecision: bf16\n", "as {override /GROUP: bf16}"),
        ("experiment: null\nsteps: 4\n", "the first line of its file has to be # @package _global_"),
        ("# @package _global_\nsteps: 4\n\tseed: 1\n", 'experiment/own.yaml", line 3'),
    ],
)
def test_an_experiment_that_cannot_be_read_is_one_sentence(
    folder: Path, train: Train, content: str, words: str
) -> None:
    file = folder / "mine/conf/experiment/own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert words in mistake(train, "recipe_path=mine", "experiment=own")
    assert "has no Python file and no conf/" in mistake(train, "recipe_path=mine/conf")


_NUMBERS = itertools.count()
_LOSS = 'LossOutput((model(batch["x"]).float() - batch["x"]).square().sum(), {})'


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (
            'Datasets(Rows(8), Rows(4), "rows")',
            "Rows(8), Rows(4)",
            "datasets returns tuple, but has to return Datasets",
        ),
        ("Datasets(Rows(8), Rows(4)", "Datasets([1, 2], Rows(4)", "train is list, and is to have a __len__ above 0"),
        (
            '{"x": self.x[[sample.index for sample in samples]]}',
            "self.x",
            "batch of its datasets returns Tensor, but has to return Mapping",
        ),
        ("nn.Sequential(nn.Linear(1, self.width), nn.Linear(self.width, 1))", "None", "build_model returns NoneType"),
        (_LOSS, f"{_LOSS}.loss_sum", "loss returns Tensor, but has to return LossOutput"),
    ],
)
def test_what_a_recipe_returns_is_checked_before_the_run_has_a_folder(
    folder: Path, train: Train, right: str, wrong: str, words: str
) -> None:
    name = f"returns{next(_NUMBERS)}"  # another module
    write(folder / "mine", name)
    file = folder / f"mine/{name}.py"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    refused = train("recipe_path=mine", f"recipe={name}", *FAST)
    assert (refused.code, words in refused.err) == (2, True), refused.err
    assert not (folder / "outputs").exists()


def test_the_pages_recipe_learns_as_documented(folder: Path, succeed: Train) -> None:
    page = (PROJECT / "docs" / "recipes.md").read_text()
    (code,) = re.findall(r"^```python\n# recipes/tumour.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (folder / "mine").mkdir()
    (folder / "mine" / "tumour.py").write_text(code)
    done = succeed("-m", "recipe_path=mine", "recipe=tumour", "precision=bf16", "recipe.width=32,64", "tracking=local")
    assert "\nbest: tumour-bf16-s0-width_" in done.out
    for width in (32, 64):
        run = folder / f"outputs/tumour-bf16-s0-width_{width}"
        summary, config = read_object(run / "summary.json"), read_object(run / "config.json")
        assert summary["step"] == 200
        assert summary["final"]["valid/accuracy"] > 0.94
        assert 0.05 < summary["final"]["valid/loss"] < 0.3  # a mean over the microbatch would be divided twice
        assert (run / "best" / "model.safetensors").exists()
        assert (config["recipe"], config["recipe.width"], config["data"]) == ("tumour", width, "own")


def test_an_error_in_a_recipe_is_shown_with_its_line_and_a_sweep_continues(folder: Path, train: Train) -> None:
    write(folder / "mine", "failing")
    done = train("-m", "recipe_path=mine", "recipe=failing", "recipe.width=-1,3", *FAST)
    file = folder / "mine" / "failing.py"
    assert (done.code, only_run(folder).name) == (1, "failing-fp32-s0-width_3")
    assert f'  File "{file}", line 37, in build_model\n' in done.err
    assert done.err.splitlines()[-1].startswith("error: RuntimeError: ")


def mistake(train: Train, *overrides: str) -> str:
    done: Result = train(*overrides, *FAST)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    return done.err


def test_mistakes_are_one_sentence(folder: Path, train: Train) -> None:
    assert "recipe_path=nowhere is not a folder; give that of" in mistake(train, "recipe_path=nowhere")
    write(folder / "taken", "json")
    assert "json.py has the name of another module, json; rename it" in mistake(train, "recipe_path=taken")
    write(folder / "hyphen", "mynet")
    (folder / "hyphen/mynet.py").rename(folder / "hyphen/my-net.py")
    assert "my-net.py cannot be imported: a module's name has only letters" in mistake(train, "recipe_path=hyphen")
    write(folder / "broken", "brokenrecipe", width="3 3")
    assert "brokenrecipe.py, line 28: " in mistake(train, "recipe_path=broken", "recipe=brokenrecipe")
    write(folder / "missing", "needy", imports="import nowhere_to_be_found\n")
    missing = "needy.py cannot be imported (No module named 'nowhere_to_be_found')"
    assert missing in mistake(train, "recipe_path=missing", "recipe=needy")
    write(folder / "literal", "chosen", imports="from typing import Literal\n", width='3\n    act: Literal["a"] = "a"')
    assert "recipe=chosen: act: Unexpected type annotation" in mistake(train, "recipe_path=literal", "recipe=chosen")
    write(folder / "metre", "metre", width='3\n    unit: str = "m"')
    assert "recipe=metre: a recipe has a unit of its own" in mistake(train, "recipe_path=metre", "recipe=metre")
    write(folder / "again", "gpt2again", imports="from recipes.gpt2 import GPT2\n")
    text = (folder / "again" / "gpt2again.py").read_text().replace('"gpt2again"', '"gpt2"')
    (folder / "again" / "gpt2again.py").write_text(text)
    assert "recipe=gpt2 is defined twice" in mistake(train, "recipe_path=again", "recipe=gpt2")
