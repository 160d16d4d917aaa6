"""Every command of README and docs runs, two steps at a tiny size; where one cannot run here, the reason is named."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.run as torchrun

from evidence.search.space import PREFIX, check_space, parse_space
from tests.command_line.test_documented_commands import PAGES, PROJECT, commands
from trainer.config import registration
from trainer.config.compose import combinations, compose
from trainer.config.early_stopping import EarlyStopping
from trainer.config.schema import Config

HERE = "tests/command_line"
TRAIN = "python scripts/train.py"
GPU, PHOTOS = "tests/benchmarks/test_gpu.py", "tests/recipes/vision/test_pretrained_images.py"
STORIES, RANKS = f"{HERE}/test_doctor_stories.py", "tests/parallel/test_command.py"

# What is not run here, by how it begins: where such a command is run whole. It installs packages or downloads, needs
# several processes or another machine, takes minutes, fails on purpose, or needs a file that the reader writes.
ELSEWHERE = {
    "make train": ".ci/run",
    "make test": ".ci/run",
    "make bench-peers": "tests/benchmarks/test_peers.py",
    "source .venv/bin/activate": "Makefile",
    "sbatch ": "tests/parallel/test_slurm.py",
    "torchrun --nnodes": RANKS,
    "torchrun --standalone": RANKS,
    "pip install --no-index": GPU,
    "PYTHONPATH=": GPU,
    "pip download": GPU,
    "pip wheel": GPU,
    "python benchmarks/gpu.py reduced=true": GPU,
    "python benchmarks/bench.py": "tests/benchmarks/test_ratios.py",
    "python scripts/advise.py": "tests/evidence/advice/test_advise.py",
    "python scripts/certify.py": f"{HERE}/test_certify.py",
    "python scripts/compare.py": f"{HERE}/test_compare_command.py",
    "python scripts/doctor.py": STORIES,
    "python scripts/lr_range.py": "tests/evidence/search/test_lr_range.py",
    "python scripts/max_batch.py": f"{HERE}/test_memory_commands.py",
    "python scripts/reproduce.py claim=": f"{HERE}/test_claims.py",
    "python scripts/search.py": "tests/evidence/search/test_search.py",
    "python scripts/sync.py": f"{HERE}/tracking/test_sync.py",
    "python scripts/ui.py": f"{HERE}/tracking/test_ui.py",
    "python scripts/evaluate.py run=outputs/photos split=test": "tests/inference/test_evaluate.py",
    "python scripts/predict.py run=outputs/photos path=new_photos": "tests/inference/test_predict.py",
    f"{TRAIN} -m hydra/launcher=submitit_slurm": f"{HERE}/test_sweep.py",
    f"{TRAIN} -m recipe=tumour": f"{HERE}/training/test_own_recipe.py",
    f"{TRAIN} recipe=tumour": f"{HERE}/training/test_own_recipe.py",
    f"{TRAIN} recipe=t5 data=synthetic": STORIES,
    f"{TRAIN} recipe=llama recipe.size=nano": STORIES,
    f"{TRAIN} recipe=gpt2 recipe.size=nano debug=overfit": f"{HERE}/training/test_ending.py",
    f"{TRAIN} recipe=gpt2 data=hub": f"{HERE}/test_commands.py",
    f"{TRAIN} recipe=resnet recipe.arch=resnet18 recipe.pretrained=DEFAULT": PHOTOS,
    f"{TRAIN} resume=mlflow:RUN_ID": f"{HERE}/tracking/test_mlflow_checkpoints.py",
}
PROGRAMS = {"python", "torchrun", "make", "srun", "pip", "docker", "source", "git", "bash", "sbatch", "cd", "export"}
SMALL = {
    "gpt2": ("recipe.context=16",),
    "resnet": ("recipe.arch=shufflenet_v2_x0_5", "recipe.image_size=32", "loader.workers=0"),
    "bignet": ("recipe.layers=2", "recipe.width=8", "data.samples=16"),
}
# The runs that commands use, by their folders.
BEFORE = {
    "outputs/gpt2-bf16-s0": ["recipe=gpt2", "precision=bf16"],
    "outputs/resnet-bf16-s0": ["recipe=resnet", "precision=bf16", "data=imagefolder", "data.path=photos"],
}
WORD = r"'?[a-z_]+(?:\.[a-z_0-9]+)*=[^\s<…|\\'\"]+'?"


def documented() -> dict[str, str]:
    """Every command of the pages, and the page that has it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for command in commands(page):
            found.setdefault(command, page.name)
    return found


def elsewhere(command: str) -> str | None:
    return next((start for start in ELSEWHERE if command.startswith(start)), None)


def run_here(page: str) -> list[str]:
    return [command for command, first in documented().items() if first == page and not elsewhere(command)]


def small(arguments: list[str]) -> list[str]:
    """Overrides that make a training command tiny, except its number of steps."""
    given = dict(each.partition("=")[::2] for each in arguments)
    recipe = given.get("recipe", "gpt2")
    sizes = [*SMALL[recipe], "batch_size=4", "eval_samples=4"]
    if recipe == "resnet" and {"freeze", "optimizer.groups"} & given.keys():  # which name layers of a ResNet
        sizes.append("recipe.arch=resnet18")
    if recipe == "gpt2" and "recipe.pretrained" not in given:
        sizes += ["recipe.size=nano", *([] if "data.tokenizer" in given else ["data.tokenizer=bytes"])]
    return sizes


@pytest.fixture
def files(user_data: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own data, as the pages call it, and a standard library of a few modules."""
    for name, made in {"notes.txt": "texts/0.txt", "photos": "images", "mnist": "idx"}.items():
        (folder / name).symlink_to(folder / made)
    library = Path(sysconfig.get_path("stdlib"))
    (tmp_path / "library").mkdir()
    for name in ("abc", "ast", "bisect", "calendar", "cmd", "copy", "csv", "glob", "heapq", "inspect"):
        shutil.copy(library / f"{name}.py", tmp_path / "library")
    few = SimpleNamespace(get_path=lambda _: str(tmp_path / "library"))
    monkeypatch.setattr("recipes.data.text.corpus.sysconfig", few)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("page", sorted({path.name for path in PAGES if run_here(path.name)}))
def test_the_commands_of_a_page_run(
    page: str,
    train: Callable[..., Any],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = 2
    for command in run_here(page):
        script, *arguments = shlex.split(command)[1:]
        for run, first in BEFORE.items():
            if run in command and not (folder / run).exists():
                assert train(*first, *small(first), "steps=2", "tracking=local").code == 0
        if script != "scripts/train.py":
            given = small(arguments) if script == "scripts/memory.py" else []
            monkeypatch.setattr(sys, "argv", [script, *arguments, *given])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(PROJECT / script), run_name="__main__")
            assert ended.value.code == 0, command
            assert capsys.readouterr().out
            continue
        added = [*small(arguments), "steps=2", "tracking=local"]
        if {"--help", "--cfg"} & set(arguments):
            added = []
        elif any(argument.startswith("resume=outputs") for argument in arguments):
            steps += 2
            added = [f"steps={steps}"]
        typed = [argument for argument in arguments if not argument.startswith("epochs=")]
        done = train(*typed, *added)
        assert done.code == 0, f"{command}\n{done.out}{done.err}"
        assert done.out


def test_every_command_is_run_here_or_elsewhere() -> None:
    found = documented()
    assert len(found) > 40
    for command in found:
        assert elsewhere(command) or command.startswith("python scripts/"), f"neither run nor in ELSEWHERE: {command}"
    for start, file in ELSEWHERE.items():
        assert any(command.startswith(start) for command in found), f"no page has {start}"
        assert (PROJECT / file).exists(), file


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_looks_like_a_command_is_found_as_one(page: Path) -> None:
    found = [command.split()[0] for command in commands(page)]
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("    ") and (word := line.split()[:1]) and word[0] in PROGRAMS:
            assert word[0] in found, line


def own_options(script: str) -> set[str]:
    """The keys that are a script's own, as its help has them; the other keys of examples are train.py's."""
    text = ast.get_docstring(ast.parse((PROJECT / script).read_text(encoding="utf-8"))) or ""
    return (
        set(re.findall(r"\b([a-z_]+)=", text))
        - {path.name for path in (PROJECT / "conf").iterdir()}
        - {"micro_batch_size"}
    )


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", sorted(command for command in documented() if elsewhere(command)))
def test_what_is_not_run_here_has_options_that_exist(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (PROJECT / "Makefile").read_text(encoding="utf-8")
    if words[0] == "sbatch":
        words = ["python", "scripts/train.py", *words[words.index("scripts/slurm/train.sbatch") + 1 :]]
    if words[0] == "torchrun":
        where = words.index("scripts/train.py")
        torchrun.get_args_parser().parse_args(words[words.index("torchrun") + 1 : where + 1])
        words = ["python", *words[where:]]
    if words[0] != "python" or "recipe=tumour" in words:
        return
    own = own_options(words[1]) if words[1] != "scripts/train.py" else set()
    arguments = [word for word in words[2:] if word != "-m" and "hydra" not in word]
    others = [word for word in arguments if word.partition("=")[0] not in own]
    if any(word.startswith(PREFIX) for word in others):
        space, others = parse_space(others)
        check_space(space, others)
    overridden = [word.partition("=")[2].split() for word in others if word.startswith("arm.")]
    others = [word for word in others if not word.startswith("arm.")]
    for each in overridden:
        compose([*others, *each])
    for arms in (word.removeprefix("arms=") for word in arguments if word.startswith("arms=")):
        others.append(f"precision={arms}")
    for overrides in combinations(others).values():
        compose(overrides)


def spans(text: str) -> list[list[str]]:
    """Overrides that stand alone within a text."""
    return [shlex.split(span) for span in dict.fromkeys(re.findall(rf"`({WORD}(?: {WORD})*)`", text))]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "results.md"], ids=lambda path: path.name)
def test_keys_and_choices_within_the_text_exist(page: Path) -> None:
    files = [
        *(PROJECT / "scripts").glob("*.py"),
        PROJECT / "benchmarks" / "bench.py",
        PROJECT / "benchmarks" / "gpu.py",
    ]
    scripts = set().union(*(own_options(str(path.relative_to(PROJECT))) for path in files))
    fields = {entry.name for entry in dataclasses.fields(Config)} | {"experiment", "arms"}
    for word in (word for words in spans(page.read_text(encoding="utf-8")) for word in words):
        key, _, value = word.partition("=")
        group, dot, option = key.partition(".")
        classes = registration.groups().get(group, {}).values()
        if group == "early_stopping":
            assert option in {entry.name for entry in dataclasses.fields(EarlyStopping)}, word
        elif dot:
            assert any(entry.name == option.split(".")[0] for cls in classes for entry in dataclasses.fields(cls)), word
        elif (folder := PROJECT / "conf" / key).is_dir() and value[0] != "$":
            assert all((folder / f"{each}.yaml").exists() for each in value.split(",")), word
        else:
            assert key in fields | scripts, word


_LENGTH = {"steps", "epochs", "debug"}
"""Only one of them sets the length of a run."""


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("page", ["README.md", "docs/tasks.md"])
def test_the_options_of_the_tables_of_tasks_compose(page: str) -> None:
    lines = (PROJECT / page).read_text(encoding="utf-8").splitlines()
    together: list[dict[str, str]] = []  # as few command lines as have no key twice
    for words in spans("\n".join(line for line in lines if line.startswith("| "))):
        options = {word.partition("=")[0]: word for word in words}
        fits = (each for each in together if not options.keys() & each.keys() and "recipe" not in options)
        mine = next((each for each in fits if len(_LENGTH & (each.keys() | options.keys())) < 2), None)
        if mine is None:
            together.append(mine := {})
        mine |= options
    assert together
    for options in together:
        assert compose(list(options.values())).recipe.name
